"""From which default generators code may draw, whether or not it did so while recorded."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from swpipe._state.code_names import CodeNames, read_code
from swpipe._state.generators import NUMPY, PYTHON, TORCH
from swpipe._tensors.stateful import is_generator

_TORCH_NAMES = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
    "multinomial", "normal", "poisson", "binomial", "dropout", "dropout1d", "dropout2d",
    "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "gumbel_softmax",
    "rrelu", "dropout_p", "random_split",
    "fractional_max_pool2d", "fractional_max_pool3d", "reset_parameters", "manual_seed",
    "set_rng_state", "rsample", "sample",
    "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_",
    "xavier_normal_", "orthogonal_", "sparse_", "dropout_", "rrelu_",
}  # fmt: skip
"""Names of functions and methods of torch that draw, and of an option."""

_DRAWING_MODULES = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
    torch.nn.RReLU,
    torch.nn.FractionalMaxPool2d,
    torch.nn.FractionalMaxPool3d,
)


def draws_by(
    code: CodeNames, namespace: Mapping[str, Any], own: Set[str] = frozenset()
) -> Iterator[str]:
    """The default generators from which code may draw.

    Args:
        code: What it names.
        namespace: The globals that it has.
        own: What generators of Python and numpy are called: they have methods of the same names.
    """
    roots = {_root(namespace.get(name)) for name in code.loaded} | code.imported
    names = _TORCH_NAMES - ({"sample"} if "random" in roots else set())
    named = sum(code.counts[name] for name in names & code.names if not _only_of(own, name, code))
    given = code.with_generator + code.counts["Generator"]  # seeded, and given to what draws
    if named > given or _makes_modules(code, namespace):
        yield TORCH
    if "random" in roots:
        yield PYTHON
    if "numpy.random" in roots or ("numpy" in roots and "random" in code.names):
        yield NUMPY


def is_drawing(function: Any) -> bool:
    """Whether a function or method of torch draws, by its own name."""
    owner = getattr(function, "__objclass__", getattr(function, "__self__", None))
    module = getattr(function, "__module__", None) or getattr(owner, "__module__", None) or ""
    return function.__name__ in _TORCH_NAMES and module.partition(".")[0] == "torch"


def default_generator(value: Any) -> Iterator[str]:
    """What a generator is called that is Python's or numpy's default."""
    numpy = sys.modules.get("numpy.random")
    if value is getattr(random.random, "__self__", None):
        yield PYTHON
    elif numpy is not None and value is getattr(numpy.rand, "__self__", None):
        yield NUMPY


def draws_seed(value: Any) -> bool:
    """Whether a pass over a loader or a sampler draws from torch's default generators."""
    if isinstance(value, DataLoader):
        return value.generator is None or draws_seed(value.sampler)
    if isinstance(value, BatchSampler):
        return draws_seed(value.sampler)
    return isinstance(value, Sampler) and getattr(value, "generator", value) is None


def names_of_generators(found: Iterable[tuple[str, Any]]) -> set[str]:
    """What only generators of Python and numpy, and their modules, are called.

    Args:
        found: Names and values.
    """
    kinds: dict[str, set[bool]] = {}
    for name, value in found:
        if not (isinstance(value, ModuleType) and _root(value).startswith(("random", "numpy"))):
            own = is_generator(value) and not isinstance(value, torch.Generator)
            kinds.setdefault(name, set()).add(own)
    return {name for name, own in kinds.items() if name and own == {True}}


def _only_of(owners: Set[str], name: str, code: CodeNames) -> bool:
    """Whether all that the code does with a name is to take it of these."""
    takers = {called for called, taken in code.uses.items() if name in taken}
    return bool(takers) and takers <= owners and name not in code.loaded


def _root(value: Any) -> str:
    """The name of a module, or of that of which a function or a class is."""
    if isinstance(value, ModuleType):
        return value.__name__
    return getattr(value, "__module__", None) or "" if callable(value) else ""


def _makes_modules(code: CodeNames, namespace: Mapping[str, Any]) -> bool:
    """Whether code names a class of modules, whose parameters are drawn when one is made."""
    found: list[Any] = [namespace.get(name) for name in code.loaded]
    for _ in range(3):  # such as torch.nn.Linear
        inside = [vars(one) for one in found if isinstance(one, ModuleType)]
        found = [one for one in found if not isinstance(one, ModuleType)]
        found += [held[name] for held in inside for name in code.names & held.keys()]
    return any(isinstance(one, type) and issubclass(one, torch.nn.Module) for one in found)


def modules_draw(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether the forward of one of some modules may draw from torch's default generators."""
    for module in modules:
        if isinstance(module, _DRAWING_MODULES) or getattr(module, "dropout", False):
            return True
        forward = getattr(type(module).forward, "__code__", None)
        of_torch = type(module).__module__.partition(".")[0] == "torch"
        if forward and not of_torch and not _TORCH_NAMES.isdisjoint(read_code(forward, "").names):
            return True
    return False
