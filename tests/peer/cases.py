"""One case per test, and one per combination of a test's hypothesis arguments."""

from __future__ import annotations

import itertools
import sys
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

THEIRS_ALONE = ("TrainPipelinePT2", "TrainPipelineSparseDistCompAutograd")
"""Tests of pipelines that swpipe does not replace, by the beginning of their classes' names."""

OF_A_CACHE = ("cache_precision", "load_factor")
"""Arguments of tests that make no difference where tables have no cache."""

PRIVATE = {
    "TrainPipelineSparseDist2DShardingTest.": "no attribute '_dmp_wrapped_module'",
    "TrainPipelinePostprocTest.test_pipeline_postproc_not_shared_with_arg": "attribute 'steps'",
    "TrainPipelinePostprocTest.test_pipeline_postproc_recursive": "no attribute 'steps'",
    "TrainPipelinePostprocTest.test_detach_restores_nested_postproc": "no attribute 'fqn'",
}
"""Tests that use TorchRec's private methods and fields, and the error where they begin to."""


@dataclass(frozen=True)
class Case:
    """One test with its arguments."""

    module: ModuleType
    test: type[unittest.TestCase]
    method: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={_short(value)}" for name, value in self.arguments.items())
        return f"{self.test.__name__}.{self.method}{f'({shown})' if shown else ''}"

    @property
    def distinct(self) -> tuple[Any, ...]:
        """A key that is equal for cases that differ only in a GPU's cache of tables."""
        rest = [item for item in self.arguments.items() if item[0] not in OF_A_CACHE]
        plain = str(rest).replace("fused_uvm_caching", "fused")
        return (self.test.__name__, self.method, plain)

    @property
    def about_ours(self) -> bool:
        """Whether the case is about a pipeline that swpipe has."""
        return not self.test.__name__.startswith(THEIRS_ALONE)

    def is_private(self, error: str) -> bool:
        """Return whether an error is about a private method or field of TorchRec."""
        return any(str(self).startswith(start) and at in error for start, at in PRIVATE.items())

    def run(self) -> unittest.TestResult:
        """Run the case without hypothesis."""
        sys.modules[self.module.__name__] = self.module  # for ranks, which import by name
        method = getattr(self.test, self.method)
        inner = getattr(method, "hypothesis", None)
        if inner is not None and self.arguments:
            setattr(self.test, self.method, lambda case: inner.inner_test(case, **self.arguments))
        result = unittest.TestResult()
        self.test(self.method).run(result)
        return result


def cases_of(modules: list[ModuleType]) -> Iterator[Case]:
    """Yield all cases of the tests that these modules define."""
    for module in modules:
        for test in vars(module).values():
            own = getattr(test, "__module__", "") == module.__name__
            if own and isinstance(test, type) and issubclass(test, unittest.TestCase):
                yield from _of(module, test)


def _of(module: ModuleType, test: type[unittest.TestCase]) -> Iterator[Case]:
    for method in unittest.TestLoader().getTestCaseNames(test):
        given = getattr(getattr(test, method), "hypothesis", None)
        strategies = getattr(given, "_given_kwargs", {})
        values = [_values(strategy) for strategy in strategies.values()]
        for chosen in itertools.product(*values):
            yield Case(module, test, method, dict(zip(strategies, chosen, strict=True)))


def _values(strategy: Any) -> list[Any]:
    """Return all values of ``sampled_from`` or ``booleans``."""
    wrapped = getattr(strategy, "wrapped_strategy", strategy)
    return list(getattr(wrapped, "elements", (False, True)))


def _short(value: Any) -> str:
    return str(getattr(value, "__name__", getattr(value, "name", value)))
