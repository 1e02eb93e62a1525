"""Private names that swpipe may miss without an error still exist.

A name that is used directly fails its own tests if it is removed (``docs/private-symbols.md``).
These are compared, looked up with a default, or used in a call that a CPU never makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import _common_utils, _flat_param
from torch.utils.data import RandomSampler

ASKED: dict[str, Callable[[], object]] = {
    "_num_samples": lambda: RandomSampler(range(3), num_samples=2),
    "_orig_mod": lambda: torch.compile(torch.nn.Linear(1, 1), backend="eager"),
    "_is_flat_param": lambda: _flat_param.FlatParameter(torch.ones(1)),  # type: ignore[no-untyped-call]
    "_abort_process_group": lambda: distributed_c10d,
    "_resolve_process_group": lambda: distributed_c10d,
}


@pytest.mark.parametrize("name", ASKED)
def test_torch_has_a_name_that_is_asked_for(name: str) -> None:
    """It is on the object that swpipe reads."""
    assert hasattr(ASKED[name](), name)


def test_fsdp_keeps_the_wrapped_module_under_the_known_name() -> None:
    """The names of states do not contain it."""
    assert _common_utils.FSDP_WRAPPED_MODULE == "_fsdp_wrapped_module"


@pytest.mark.parametrize(
    ("namespace", "operator"),
    [
        ("c10d", "allreduce_"),
        ("_c10d_functional", "all_reduce"),
        ("_c10d_functional_autograd", "all_to_all_single"),
        ("aten", "_to_copy"),
        ("aten", "_index_put_impl_"),
    ],
)
def test_operators_have_the_known_names(namespace: str, operator: str) -> None:
    """A collective's name marks its task as global; a copy or an index may wait."""
    assert hasattr(getattr(torch.ops, namespace), operator)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("accelerate.accelerator", "_is_accelerate_prepared"),
        ("torchrec.distributed.model_parallel", "_dmp_wrapped_module"),
    ],
)
def test_other_packages_have_the_name(module: str, name: str) -> None:
    """Their source contains it."""
    assert name in inspect.getsource(pytest.importorskip(module))
