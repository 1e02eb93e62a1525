"""One case per test, and one per combination of a test's hypothesis arguments."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Case:
    """One test with its arguments."""

    test: type[unittest.TestCase]
    method: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={_short(value)}" for name, value in self.arguments.items())
        return f"{self.test.__name__}.{self.method}{f'({shown})' if shown else ''}"

    def run(self) -> unittest.TestResult:
        """Run it, without hypothesis."""
        method = getattr(self.test, self.method)
        inner = getattr(method, "hypothesis", None)
        if inner is not None and self.arguments:
            setattr(self.test, self.method, lambda case: inner.inner_test(case, **self.arguments))
        result = unittest.TestResult()
        self.test(self.method).run(result)
        return result


def cases_of(modules: list[ModuleType]) -> Iterator[Case]:
    """All cases of the tests that these modules define."""
    for module in modules:
        for test in vars(module).values():
            if isinstance(test, type) and issubclass(test, unittest.TestCase):
                if test.__module__ == module.__name__:
                    yield from _of(test)


def _of(test: type[unittest.TestCase]) -> Iterator[Case]:
    for method in unittest.TestLoader().getTestCaseNames(test):
        given = getattr(getattr(test, method), "hypothesis", None)
        strategies = getattr(given, "_given_kwargs", {})
        values = [_values(strategy) for strategy in strategies.values()]
        for chosen in itertools.product(*values):
            yield Case(test, method, dict(zip(strategies, chosen, strict=True)))


def _values(strategy: Any) -> list[Any]:
    """All values of ``sampled_from`` and ``booleans``."""
    wrapped = getattr(strategy, "wrapped_strategy", strategy)
    return list(getattr(wrapped, "elements", (False, True)))


def _short(value: Any) -> str:
    return str(getattr(value, "__name__", getattr(value, "name", value)))
