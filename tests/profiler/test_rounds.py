"""In which order windows are measured, and how many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from swpipe.profiler import rounds
from swpipe.profiler.host import HostTimes
from swpipe.profiler.rounds import BASELINE, Counts, Measured, measure, window_orders

KINDS = ("<baseline>", "read", "forward", "step")


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
    """Notes its windows, each as what is shortcut, and restores as "|".

    Each window takes as long as windows were measured before it. A window of ``raises`` fails.
    """

    overlap = 3
    tasks = ()

    def __init__(self, raises: dict[str, BaseException] | None = None, after: int = 0) -> None:
        self.log: list[str] = []
        self.shortcuts = ""
        self.raises = raises or {}
        self.after = after

    @property
    def pipe(self) -> Any:
        return self

    @property
    def windows(self) -> list[str]:
        return [entry for entry in self.log if entry != "|"]

    @contextmanager
    def shortcut(self, name: str) -> Iterator[None]:
        self.shortcuts = name
        try:
            yield
        finally:
            self.shortcuts = ""

    def check_shortcuts(self) -> None:
        """All replays are right."""

    def window(self, times: HostTimes) -> list[float]:
        if self.shortcuts in self.raises and len(self.windows) >= self.after:
            raise self.raises[self.shortcuts]
        self.log.append(self.shortcuts)
        return [len(self.windows) - 1.0]

    def restore(self) -> None:
        self.log.append("|")


def measured(timer: Any, names: list[str], rounds: int, ticks: list[int] | None = None) -> Measured:
    """What was measured with the fake timer."""
    ticks = [] if ticks is None else ticks
    return measure(timer, names, rounds, lambda: ticks.append(1), timer.restore)


def test_each_window_is_measured_with_its_task_shortcut() -> None:
    """A column has the windows of its own task, one per round; the first window is not used."""
    timer, ticks = FakeTimer(), []
    found = measured(timer, ["read", "step"], 3, ticks)
    at = {
        name: [int(window[0]) for window in column.windows]
        for name, column in found.columns.items()
    }
    assert list(at) == [BASELINE, "read", "step"]
    assert [timer.windows[i] for i in at["read"]] == ["read"] * 3
    assert [timer.windows[i] for i in at["step"]] == ["step"] * 3
    assert [timer.windows[i] for i in at[BASELINE]] == [""] * 3
    assert 0 not in [i for places in at.values() for i in places]
    assert len(timer.windows) == 1 + 3 * 3
    assert len(ticks) == 3 * 3 == Counts(0, 2, 3).windows(2)
    assert {column.overlap for column in found.columns.values()} == {3}


def test_each_window_starts_from_the_same_state() -> None:
    """A shortcut repeats one gradient: a momentum grows with it, and the loss is soon infinite."""
    timer = FakeTimer()
    measured(timer, ["read", "step"], 2)
    assert timer.log[1::2] == ["|"] * len(timer.windows)


def test_a_task_that_cannot_be_shortcut_does_not_lose_the_others() -> None:
    """It has no figure, but a reason; nothing of it is measured any more."""
    error = ValueError("planted")
    timer = FakeTimer({"read": error})
    found = measured(timer, ["read", "step"], 3)
    assert found.failed == {"read": error}
    assert "swpipe: while profiling with task 'read' shortcut" in error.__notes__
    assert list(found.columns) == [BASELINE, "step"]
    assert [len(column.windows) for column in found.columns.values()] == [3, 3]
    assert len(timer.windows) == 1 + 3 * 2 + 1  # and one after the failure


def test_what_fails_without_a_shortcut_too_is_raised() -> None:
    """The task that was shortcut is not to blame."""
    error = ValueError("planted")
    timer = FakeTimer({"read": error, "": error}, after=2)
    with pytest.raises(ValueError, match="planted") as caught:
        measured(timer, ["read", "step"], 3)
    assert "swpipe: while profiling without a shortcut" in caught.value.__notes__
    assert timer.log[-1] == "|"


def test_on_several_ranks_a_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may wait in a collective of the task that failed."""
    monkeypatch.setattr(rounds, "is_alone", lambda: False)
    with pytest.raises(ValueError, match="planted"):
        measured(FakeTimer({"read": ValueError("planted")}), ["read", "step"], 3)


def test_an_interrupt_keeps_the_rounds_that_are_whole() -> None:
    """From the first one on."""
    first = FakeTimer({"read": KeyboardInterrupt()}, after=1)
    with pytest.raises(KeyboardInterrupt):
        measured(first, ["read", "step"], 3)
    later = FakeTimer({"read": KeyboardInterrupt()}, after=4)
    found = measured(later, ["read", "step"], 3)
    assert found.interrupted
    assert [len(column.windows) for column in found.columns.values()] == [1, 1, 1]
    assert later.log[-1] == "|"
