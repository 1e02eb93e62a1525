"""Which parts of TorchRec swpipe uses beyond its documentation, and whether they are as expected.

The import of ``swpipe.tasks.torchrec`` asks for these parts, not for a number: a TorchRec that has
them is taken. For a new release, ::

    pip install --no-deps --target NEW torchrec==X.Y.Z
    python -m swpipe.tasks.torchrec.private_parts NEW

compares the parts with those of the TorchRec that is installed: what is gone, and to where it may
have moved; which parameters differ; and the lines of source that have changed. The new release is
imported on the installed torch and fbgemm, or on those of ``--python``, an interpreter that has
swpipe's dependencies.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A class or function of TorchRec's.

    Parameters are written as ``"a, b"``. What is called with them takes these first, in this order,
    and any others with a default.

    Attributes:
        module: Where it is imported from.
        name: Its name there.
        takes: The parameters that it is called with; None where it is not called.
        calls: Its methods that are called, with their parameters.
        replaces: Its methods that are called by TorchRec and replaced here: all their parameters.
        has: Its attributes that are read or set, of the class or of its objects.
    """

    module: str
    name: str
    takes: str | None = None
    calls: Mapping[str, str] = field(default_factory=dict)
    replaces: Mapping[str, str] = field(default_factory=dict)
    has: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def members(self) -> list[str]:
        """The names below it."""
        return [*self.calls, *self.replaces, *self.has.split()]


def _parts(module: str, *names: str, **parts: Mapping[str, Any]) -> Iterator[Part]:
    yield from (Part(module=module, name=name) for name in names)
    yield from (Part(module=module, name=name, **uses) for name, uses in parts.items())


_DISTRIBUTED = "torchrec.distributed"
_PIPELINE = f"{_DISTRIBUTED}.train_pipeline"
_READ = "_input_dists create_context input_dist"  # of collections of tables

PARTS: tuple[Part, ...] = (
    *_parts(
        f"{_PIPELINE}.utils",
        _fuse_input_dist_splits={"takes": "context"},
        _override_input_dist_forwards={"takes": "pipelined_modules"},
    ),
    *_parts(
        f"{_PIPELINE}.tracing",
        _get_leaf_module_names={"takes": "model"},
        Tracer={"takes": "leaf_modules", "calls": {"is_leaf_module": "m, module_qualified_name"},
                "has": "_leaf_modules"},
        ArgInfoStepFactory={"calls": {"get_attr": "name"}},
        ScalarArgInfoStep={"has": "value"},
        GetAttrArgInfoStep={"has": "attr_name"},
        GetItemArgInfoStep={"has": "item_index"},
        NodeArgsHelper={
            "takes": "model, context, pipeline_postproc",
            "calls": {"get_node_args": "node, for_postproc_module"},
            "replaces": {
                "_get_node_args_helper_inner": "arg, for_postproc_module",
                "_handle_placeholder": "child_node, arg_info",
                "_handle_module": "child_node, arg_info",
                "_handle_constant": "arg, arg_info, for_postproc_module",
                "_handle_collection_element": "arg, for_postproc_module",
            },
            "has": "_model _pipeline_postproc",
        },
    ),
    *_parts(
        f"{_PIPELINE}.types",
        ArgInfo={"takes": "steps", "calls": {"add_step": "step"}, "has": "steps"},
        CallArgs={"takes": "args, kwargs", "calls": {"build_args_kwargs": "initial_input"}},
    ),
    *_parts(
        f"{_PIPELINE}.runtime_forwards",
        "PipelinedForward",
        "PrefetchPipelinedForward",
        BaseForward={"takes": "name, args, module, context", "calls": {"set_context": "context"},
                     "has": "name args _name _args _module _context"},
    ),
    *_parts(
        f"{_PIPELINE}.pipeline_context",
        TrainPipelineContext={
            "has": "index version module_contexts input_dist_splits_requests "
                   "input_dist_tensors_requests fused_splits_awaitables",
        },
        PrefetchTrainPipelineContext={
            "has": "module_input_post_prefetch module_contexts_post_prefetch",
        },
    ),
    *_parts(
        f"{_PIPELINE}.pipeline_stage",
        PipelineStage={"takes": "name, runnable, stream, fill_callback, data_exhausted_callback"},
    ),
    *_parts(_PIPELINE, "train_pipelines"),
    *_parts(
        f"{_DISTRIBUTED}.types",
        Awaitable={"calls": {"wait": ""}, "replaces": {"_wait_impl": ""}},
        LazyAwaitable={"takes": ""},
        LazyGetItemMixin={},
        ShardedModule={
            "calls": {
                "create_context": "",
                "preprocess_input": "args, kwargs",
                "input_dist": "ctx",
                "prefetch": "dist_input, forward_stream, ctx",
                "compute_and_output_dist": "ctx, input",
            },
        },
    ),
    *_parts(
        f"{_DISTRIBUTED}.dist_data",
        KJTAllToAllTensorsAwaitable={"has": "_workers _awaitables _input"},
    ),
    *_parts(
        f"{_DISTRIBUTED}.comm_ops",
        "All2All_Pooled_Req", "All2All_Seq_Req", "ReduceScatter_Req", "ReduceScatterBase_Req",
        "ReduceScatterV_Req", "Variable_Batch_All2All_Pooled_Req",
    ),
    *_parts(
        f"{_DISTRIBUTED}.model_parallel",
        get_unwrapped_module={"takes": "module"},
        DMPCollection={"calls": {"sync": ""}},
    ),
    *_parts(f"{_DISTRIBUTED}.embeddingbag", ShardedEmbeddingBagCollection={"has": _READ}),
    *_parts(
        f"{_DISTRIBUTED}.embedding",
        "EmbeddingCollectionSharder",
        ShardedEmbeddingCollection={"has": _READ},
    ),
    *_parts("torchrec.optim.fused", "FusedOptimizer"),
    *_parts("torchrec.streamable", "Pipelineable"),
    *_parts(
        "torchrec",
        "EmbeddingCollection",
        "EmbeddingConfig",
        JaggedTensor={"calls": {"values": "", "lengths": "", "weights_or_none": ""}},
        KeyedJaggedTensor={
            "calls": {"keys": "", "values": "", "lengths": "", "weights_or_none": ""},
            "has": "_values _weights _lengths _offsets _jt_dict",
        },
    ),
)  # fmt: skip


def problems(parts: tuple[Part, ...] = PARTS) -> list[str]:
    """What of the parts is not as expected in the TorchRec that is imported; one line each."""
    return [line for part in parts for line in _of_part(part)]


def _of_part(part: Part) -> Iterator[str]:
    found = _find(part)
    if found is None:
        yield f"{part} is gone{_moved(part.name)}"
        return
    if part.takes is not None:
        yield from _of_call(str(part), found, part.takes)
    for name, takes in part.calls.items():
        yield from _of_member(part, found, name, takes)
    for name, takes in part.replaces.items():
        yield from _of_member(part, found, name, takes, exactly=True)
    for name in part.has.split():
        if not _has(found, name):
            yield f"{part} has no {name!r}"


def _of_member(
    part: Part, owner: Any, name: str, takes: str, *, exactly: bool = False
) -> Iterator[str]:
    if not _has(owner, name):
        yield f"{part}.{name} is gone"
    else:
        member = inspect.getattr_static(owner, name)
        bound = getattr(owner, name) if isinstance(member, classmethod) else member
        bare = not isinstance(member, classmethod | staticmethod)
        yield from _of_call(f"{part}.{name}", bound, takes, skip=bare, exactly=exactly)


def _of_call(
    name: str, called: Any, takes: str, *, skip: bool = False, exactly: bool = False
) -> Iterator[str]:
    given = [one.strip() for one in takes.split(",") if one.strip()]
    parameters = list(inspect.signature(called).parameters.values())[skip:]
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in plain]
    needed = [p.name for p in plain[len(given) :] if p.default is p.empty]
    if names[: len(given)] != given or needed or (exactly and names != given):
        bare = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
        yield f"{name} takes ({bare}), and was ({takes})"


def _find(part: Part) -> Any:
    try:
        module = importlib.import_module(part.module)
    except ModuleNotFoundError:
        return None
    if hasattr(module, part.name):
        return getattr(module, part.name)
    try:
        return importlib.import_module(str(part))  # a module of a package
    except ModuleNotFoundError:
        return None


def _moved(name: str) -> str:
    """Where else that is imported the name is."""
    places = [
        place
        for place, module in sorted(sys.modules.items())
        if place.startswith("torchrec.") and getattr(module, name, None) is not None
        if getattr(getattr(module, name), "__module__", place) == place
    ]
    return f"; {' and '.join(places)} has that name" if places else ""


def _has(kind: Any, name: str) -> bool:
    """Whether a class, or an object of it, has an attribute: initialisers name those they set."""
    if hasattr(kind, name):
        return True
    for base in inspect.getmro(kind):
        if name in (*vars(base).get("__annotations__", ()), *vars(base).get("__slots__", ())):
            return True
        code = getattr(inspect.unwrap(vars(base).get("__init__", _has)), "__code__", None)
        if code is not None and name in code.co_names:
            return True
    return False


def sources(parts: tuple[Part, ...] = PARTS) -> dict[str, str]:
    """The source of each part; of a class the members that are used, and its initialiser."""
    found = {}
    for part in parts:
        whole = _find(part)
        if inspect.isclass(whole):
            made = ["__init__"] if part.takes is not None or part.has else []
            for name in (*made, *part.members()):
                member = inspect.unwrap(getattr(whole, name, None))  # type: ignore[arg-type]
                code = getattr(member, "__code__", None)  # none of a dataclass is in a file
                if code is not None and Path(code.co_filename).exists():
                    found[f"{part}.{name}"] = inspect.getsource(member)
        elif inspect.isfunction(whole):
            found[str(part)] = inspect.getsource(whole)
    return found


def _look() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in PARTS:
            _find(part)
        version = importlib.import_module("importlib.metadata").version("torchrec")
        return {"version": version, "problems": problems(), "sources": sources()}


def _look_at(folder: Path, python: str) -> dict[str, Any]:
    """The same of the TorchRec in a folder, in a process of its own."""
    package = Path(__file__).parents[3]
    paths = os.pathsep.join([str(folder.resolve()), str(package)])
    done = subprocess.run(
        [python, "-m", __spec__.name, "--look"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{folder}: TorchRec cannot be imported by {python}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            before, after = old[name].splitlines(), new[name].splitlines()
            yield "\n".join([f"{name} has changed:", *list(unified_diff(before, after, n=2))[2:]])
    for name in old.keys() - new.keys():
        yield f"{name} is no function any more"


def main() -> int:
    """Compare; the exit status is 1 if a part is not as expected."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", nargs="?", type=Path, help="where the new TorchRec is")
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter to import it with"
    )
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    here = _look()
    if options.look:
        sys.stdout.write(f"\n{json.dumps(here)}\n")
        return 0
    other = here if options.folder is None else _look_at(options.folder, options.python)
    changes = sorted(_changes(here["sources"], other["sources"]))
    head = f"torchrec {here['version']} is installed"
    if options.folder is not None:
        head += f"; {options.folder} has {other['version']}"
    lines = [
        head,
        *(f"not as expected: {line}" for line in other["problems"]),
        *changes,
        f"{len(PARTS)} parts: {len(other['problems'])} not as expected, {len(changes)} changed",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if other["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
