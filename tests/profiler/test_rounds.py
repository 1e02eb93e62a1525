"""In which order windows are measured, and how many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from swpipe.profiler.host import HostTimes
from swpipe.profiler.rounds import BASELINE, Counts, measure, window_orders

KINDS = ("<baseline>", "<host>", "read", "forward", "step")


def test_every_kind_of_window_comes_once_per_round() -> None:
    """All values have the same number of windows."""
    assert [sorted(order) for order in window_orders(KINDS, 5)] == [sorted(KINDS)] * 5


def test_every_second_round_reverses_the_one_before() -> None:
    """So a drift cancels out."""
    first, second, third, fourth = window_orders(KINDS, 4)
    assert second == first[::-1]
    assert fourth == third[::-1]
    assert third != first


def test_the_order_is_the_same_on_every_rank() -> None:
    """Otherwise collectives within tasks would not match."""
    assert list(window_orders(KINDS, 6)) == list(window_orders(KINDS, 6))


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((-1, 1, 2), "num_warmup is -1: give a whole number, 0 or more"),
        ((0, 0, 2), "num_measure is 0: give a whole number, 1 or more"),
        ((0, 1, 0), "num_rounds is 0: give a whole number, 1 or more"),
        ((0, 2.5, 1), "num_measure is 2.5: give a whole number, 1 or more"),
        ((0, 1, 1), "num_measure and num_rounds are both 1: one measurement has no error bar"),
    ],
)
def test_too_small_counts_are_refused(counts: tuple[int, int, int], says: str) -> None:
    """The error has the value, the rule and a fix."""
    with pytest.raises(ValueError, match=says):
        Counts(*counts)


class FakeTimer:
    """Notes its windows; each takes as long as windows were measured before it."""

    overlap = 3

    def __init__(self, fails_at: int = -1) -> None:
        self.log: list[str] = []
        self.shortcuts = ""
        self.fails_at = fails_at

    @property
    def pipe(self) -> Any:
        return self

    @contextmanager
    def shortcut(self, name: str) -> Iterator[None]:
        self.shortcuts = name
        try:
            yield
        finally:
            self.shortcuts = ""

    def window(self) -> list[float]:
        if len(self.log) == self.fails_at:
            raise ZeroDivisionError
        self.log.append(self.shortcuts)
        return [len(self.log) - 1.0]

    def host_window(self, times: HostTimes) -> None:
        self.window()


def test_each_window_is_measured_with_its_task_shortcut() -> None:
    """A column has the windows of its own task, one per round; the first window is not used."""
    timer, ticks = FakeTimer(), []
    found = measure(timer, ["read", "step"], 3, lambda: ticks.append(1))  # type: ignore[arg-type]
    at = {
        name: [int(window[0]) for window in column.windows]
        for name, column in found.columns.items()
    }
    assert list(at) == [BASELINE, "read", "step"]
    assert [timer.log[i] for i in at["read"]] == ["read"] * 3
    assert [timer.log[i] for i in at["step"]] == ["step"] * 3
    assert [timer.log[i] for i in at[BASELINE]] == [""] * 3
    assert 0 not in [i for places in at.values() for i in places]
    assert len(timer.log) == 1 + 3 * 4
    assert len(ticks) == 3 * 4 == Counts(0, 2, 3).windows(2)
    assert {column.overlap for column in found.columns.values()} == {3}


def test_a_failure_has_a_note_of_what_was_measured() -> None:
    """The note names the task that was shortcut, if any."""
    notes = []
    for fails_at in range(1, 4):
        with pytest.raises(ZeroDivisionError) as caught:
            measure(FakeTimer(fails_at), ["read"], 1, list)  # type: ignore[arg-type]
        notes += caught.value.__notes__
    assert sorted(notes) == [
        "swpipe: while profiling with task 'read' shortcut",
        "swpipe: while profiling without a shortcut",
        "swpipe: while profiling without a shortcut",
    ]
