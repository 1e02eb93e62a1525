"""Packages use each other's public names, and only ``swpipe.device`` knows kinds of device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_layout import PACKAGE, parsed

OF_OTHERS = {
    # Python's
    "_DummyThread", "_current_frames", "_exit", "_fields", "_getframe", "_replace",
    # torch's and numpy's
    "_C", "_DisableTorchDispatch", "_abort_process_group", "_accelerator_getDeviceIndex",
    "_accelerator_getStream",
    "_BaseDataLoaderIter", "_DatasetKind", "_InfiniteConstantSampler", "_dataset_kind",
    "_num_yielded",
    "_autograd", "_base", "_bit_generator",
    "_buffers", "_cdata", "_current_autograd_node", "_current_graph_task_id",
    "_engine_run_backward", "_functorch",
    "_Action", "_PipelineScheduleRuntime", "_get_default_store", "_get_dispatch_stack_at",
    "_comp_type_to_function_map", "_maybe_compute_loss", "_maybe_get_loss", "_wait_batch_p2p",
    "_get_pipeline_order", "_has_backward", "_initialize_stages", "_is_view",
    "_backward_cls", "_prepare_schedule_with_comms", "_resolve_process_group",
    "_qualified_op_name", "_stages",
    "_add_reduce_grad", "_add_send_recv", "_add_unshard_reshard", "_assert_unsharded",
    "_find_tensors", "_get_backend", "_get_default_group", "_n_microbatches", "_neg_view",
    "_new_process_group_helper", "_resolve_peer_global_rank", "_timeout",
    "_validate_and_set_stage_mapping", "_world",
    "_get_function_stack_at", "_has_storage", "_indices", "_is_profiler_enabled", "_iterator",
    "_pop_torch_function_stack",
    "_is_torch_function_enabled", "_is_torch_function_mode_enabled", "_len_torch_dispatch_stack",
    "_len_torch_function_stack", "_make_wrapper_subclass", "_mesh_resources", "_parameters",
    "_pytree",
    "_pop_torch_dispatch_stack", "_push_on_torch_dispatch_stack", "_record_function_enter_new",
    "_saved_tensors_hooks_get_disabled_error_message", "_schema", "_storage_Use_Count",
    "_top_saved_tensors_default_hooks", "_values", "_version",
    "_activate_gpu_trace", "_gpu_trace", "_is_in_bad_fork", "_lazy_init", "_register_device_module",
    # TorchRec's
    "_awaitables", "_context", "_current_step", "_dist", "_fuse_input_dist_splits",
    "_get_leaf_module_names",
    "_input", "_input_tensors", "_jt_dict", "_module", "_optimizer",
    "_override_input_dist_forwards", "_workers",
    "_embedding_collection", "_embedding_dim_for_sharding_type", "_embedding_names_per_sharding",
    "_env", "_features_to_permute_indices", "_lookups", "_need_indices", "_output_dists",
    "_overlap_handlers", "_sharding_type_to_sharding",
    # dynamicemb's
    "_prefetch_outstanding_keys", "_prefetch_states",
}  # fmt: skip
"""Private names of other projects for which there is no public one."""


def modules(package: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Each module's path under ``package``, and its syntax tree."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package), parsed(path)


def is_private(name: str) -> bool:
    """Whether a name has one leading underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.Module) -> set[str]:
    """The names that a module defines: functions, classes, variables, attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            found.add(node.attr)
    return found


def of_self(node: ast.Attribute) -> bool:
    """Whether the object is ``self`` or ``cls``."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_uses(package: Path) -> list[str]:
    """Where a module uses a private attribute or imports a private name that is not its own."""
    found = []
    for path, tree in modules(package):
        allowed = own_names(tree) | OF_OTHERS
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Attribute) and not of_self(node):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            found += [
                f"{path}:{getattr(node, 'lineno', '?')}: {name}"
                for name in names
                if is_private(name) and name not in allowed
            ]
    return found


def test_no_module_uses_a_private_name_of_another() -> None:
    """What is needed of another module has a public name there."""
    assert private_uses(PACKAGE) == []


def names_a_device(node: ast.AST) -> bool:
    """Whether an expression contains the name of a kind of device."""
    return any(
        isinstance(part, ast.Constant)
        and isinstance(part.value, str)
        and part.value.partition(":")[0] in ("cpu", "cuda")
        for part in ast.walk(node)
    )


def device_questions(package: Path) -> list[str]:
    """Where a module outside ``device`` asks what kind a device is."""
    found = []
    for path, tree in modules(package):
        if path.parts[0] == "device":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                asks = any(map(names_a_device, (node.left, *node.comparators)))
            elif isinstance(node, ast.MatchValue):
                asks = names_a_device(node.value)
            else:
                asks = isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda")
            if asks:
                found.append(f"{path}:{getattr(node, 'lineno', '?')}")
    return found


def test_only_devices_know_their_kind() -> None:
    """Elsewhere nothing is compared with "cpu" or "cuda": a device has an attribute for it."""
    assert device_questions(PACKAGE) == []
