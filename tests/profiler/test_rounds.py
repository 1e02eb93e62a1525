"""The visits of a profile: their order, their number, and the handling of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from swpipe.errors import ShortcutError, UnsavedStateError
from swpipe.profiler import rounds
from swpipe.profiler.measure import Pulls
from swpipe.profiler.rounds import MAX_ROUNDS, Counts, Rounds
from swpipe.profiler.spread import BASE, Kind

READ, STEP = "read", "step"


class Machine:
    """A stand-in for a timer and its pipeline that notes shortcuts; a round ends with "|".

    Args:
        takes_s: The time of an iteration with this kind shortcut, in this visit (from 0).
        raises: Kind to what its visits raise, from visit ``after`` on.
        modified: The kinds whose cache later tasks have modified at the end of a visit.
    """

    pipelined = False
    num_warmup = 2
    measure = 3
    cycle = 1
    tasks = ()
    calls = ()
    pulls = Pulls()
    device = SimpleNamespace(has_streams=False)

    def __init__(
        self,
        takes_s: Callable[[Kind, int], float] = lambda kind, visit: 1.0,
        raises: dict[Kind, BaseException] | None = None,
        after: int = 0,
        modified: frozenset[Kind] = frozenset(),
    ) -> None:
        self.takes_s = takes_s
        self.raises = raises or {}
        self.after = after
        self.modified = modified
        self.log: list[Kind] = []
        self.lengths: list[int] = []
        self.ended: list[int] = []  # after how many visits nothing was in flight
        self.now_s = 0.0
        self.kind: Kind = BASE
        self.plan = SimpleNamespace(depth=1)

    @property
    def pipe(self) -> Any:
        return self

    @property
    def visits(self) -> list[Kind]:
        return [entry for entry in self.log if entry != "|"]

    @property
    def rounds(self) -> list[list[Kind]]:
        found: list[list[Kind]] = [[]]
        for entry in self.log:
            if entry != "|":
                found[-1].append(entry)
            else:
                found.append([])
        return found[:-1]

    def perf_counter(self) -> float:
        return self.now_s

    @contextmanager
    def shortcut(self, kind: str) -> Iterator[None]:
        self.kind = kind
        try:
            yield
        finally:
            self.kind = BASE

    @contextmanager
    def observe(self, seen: object) -> Iterator[None]:
        yield

    def cycle_shortcuts(self, cycle: int) -> None:
        """Do nothing: there is one batch."""

    def check_shortcuts(self) -> None:
        if self.kind in self.modified:
            raise ShortcutError(self.kind, "planted")

    def replay_in_backward_s(self, *kind: str) -> float:
        return 0.0

    def run(self) -> Any:
        self.seconds_: list[float] = []
        return self

    def iterate(
        self, warmup: int, measure: int, begin_to_measure: Callable[[], object], **_: Any
    ) -> slice:
        if self.kind in self.raises and len(self.visits) >= self.after:
            raise self.raises[self.kind]
        self.log.append(self.kind)
        begin_to_measure()
        begin, seconds = len(self.seconds_), self.takes_s(self.kind, len(self.visits) - 1)
        self.lengths.append(measure)
        self.seconds_ += [seconds] * measure
        self.now_s += seconds * (measure + self.num_warmup)
        return slice(begin, begin + measure)

    def end(self) -> None:
        self.ended.append(len(self.visits))

    def seconds(self) -> list[float]:
        return self.seconds_

    @property
    def numbers(self) -> range:
        return range(len(self.seconds_))

    def restore(self) -> None:
        self.log.append("|")


def measured(
    machine: Any,
    kinds: list[Kind],
    ticks: list[int] | None = None,
    **changes: Any,
) -> Rounds:
    """Return what was measured on the machine after a round of warm-up."""
    counts = Counts(**{"num_warmup": 2, "num_measure": 3, "num_rounds": 3, **changes})
    found = Rounds(machine, counts, machine.restore)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "time", machine)
        found.warm_up()
        found.measure(kinds, lambda: ticks.append(1) if ticks is not None else None)
    return found


def test_each_kind_is_visited_once_per_round_in_another_order() -> None:
    """Between visits there is no shortcut; before the first round, iterations warm up."""
    kinds: list[Kind] = [*"abcdef"]
    machine = Machine()
    found = measured(machine, kinds, num_rounds=4)
    first, *others = machine.rounds
    assert first == [BASE, BASE]
    for order in others:
        assert [place for place, kind in enumerate(order) if kind == BASE] == [0, 4, 8]
        assert sorted(kind for kind in order if kind) == kinds
    assert len({tuple(order) for order in others}) == 4
    assert {kind: len(of) for kind, of in found.saved_s.items()} == dict.fromkeys(kinds, 4)
    assert len(found.completed) == 4


def test_orders_and_lengths_are_the_same_on_every_rank() -> None:
    """Otherwise collectives within tasks would not match."""
    one, other = Machine(), Machine()
    for machine in (one, other):
        measured(machine, [READ, STEP], num_rounds=20)
    assert one.log == other.log
    assert one.lengths == other.lengths
    assert set(one.lengths) == {2, 3, 4}  # not in step with what is slow every fifth iteration
    assert one.log.count("|") == 1 + 20  # each round starts from the same state


def test_a_machine_that_gets_slower_does_not_change_what_is_saved() -> None:
    """Each visit is compared with those around it."""
    found = measured(Machine(lambda kind, visit: 10.0 + visit - 4.0 * (kind == READ)), [READ, STEP])
    assert found.saved_s == {READ: [pytest.approx(4.0)] * 3, STEP: [pytest.approx(0.0)] * 3}


def test_a_time_limit_is_kept() -> None:
    """There are at least two rounds; then as many as end within the time."""
    assert len(measured(Machine(), [READ], seconds=1e-9).completed) == 2
    machine = Machine()
    found = measured(machine, [READ], seconds=200.0)
    warm_up_s = 10.0
    assert 170.0 < machine.now_s - warm_up_s <= 200.0
    assert len(found.completed) > 5


def test_time_goes_where_intervals_are_widest() -> None:
    """From the sixth round on, half of the kinds are visited."""
    noise = iter(range(10**6))

    def takes_s(kind: Kind, visit: int) -> float:
        return 10.0 + (5.0 * (next(noise) % 2) if kind == STEP else 0.0)

    machine = Machine(takes_s)
    found = measured(machine, [READ, STEP], seconds=2000.0)
    assert len(found.saved_s[READ]) + len(found.saved_s[STEP]) == 5 + len(found.completed)
    assert len(found.saved_s[STEP]) > len(found.saved_s[READ]) >= 5


def test_a_target_ends_the_profile_once_it_is_reached() -> None:
    """Kinds whose interval is narrow enough are not visited any more."""
    noise = iter(range(10**6))

    def takes_s(kind: Kind, visit: int) -> float:
        return 10.0 + (1.0 * (next(noise) % 2) if kind == STEP else 0.0)

    found = measured(Machine(takes_s), [READ, STEP], target_spread_ms=300)
    assert all(each.spread_s <= 0.3 for each in rounds.time_saved(found.saved_s).values())
    assert 5 <= len(found.saved_s[READ]) < len(found.saved_s[STEP]) < MAX_ROUNDS
    wild = Machine(lambda kind, visit: 10.0 + 5.0 * (next(noise) % 2))
    assert len(measured(wild, [READ], target_spread_ms=1e-3).completed) == MAX_ROUNDS
    assert len(measured(wild, [READ], target_spread_ms=1e-3, seconds=1000.0).completed) < 40


def test_ranks_do_what_the_first_one_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clocks differ."""
    wanted = iter([[READ], [READ], []])
    monkeypatch.setattr(rounds, "is_alone", lambda: False)
    monkeypatch.setattr(rounds, "gather", lambda mine: [next(wanted), mine])
    found = measured(Machine(), [READ], seconds=1e9)
    assert len(found.completed) == 2


def test_a_task_that_cannot_be_shortcut_does_not_lose_the_others() -> None:
    """It has no figure, but a reason; nothing of it is measured any more."""
    error = ValueError("planted")
    machine, ticks = Machine(raises={READ: error}), []
    found = measured(machine, [READ, STEP], ticks)
    assert len(ticks) == 3
    assert found.failed == {READ: error}
    assert "swpipe: while profiling with task 'read' shortcut" in error.__notes__
    assert {kind: len(of) for kind, of in found.saved_s.items()} == {STEP: 3}
    assert len(found.completed) == 3
    assert machine.log[-1] == "|"
    alone = measured(Machine(raises={READ: error}), [READ])  # the report says what the step takes
    assert (len(alone.completed), list(alone.failed)) == (2, [READ])


def test_a_task_whose_cache_was_modified_has_no_figure() -> None:
    """Its last replays gave wrong values, which no later replay would notice."""
    found = measured(Machine(modified=frozenset([READ])), [READ, STEP])
    assert isinstance(found.failed[READ], ShortcutError)
    assert list(found.saved_s) == [STEP]


def test_what_fails_without_a_shortcut_too_is_raised() -> None:
    """The task that was shortcut is not to blame."""
    error = ValueError("planted")
    machine = Machine(raises={READ: error, BASE: error}, after=3)
    with pytest.raises(ValueError, match="planted") as caught:
        measured(machine, [READ, STEP])
    assert "swpipe: while profiling without a shortcut" in caught.value.__notes__
    assert machine.log[-1] == "|"


def test_training_that_cannot_be_undone_is_raised() -> None:
    """It is no reason to leave a task out."""
    with pytest.raises(UnsavedStateError):
        measured(Machine(raises={READ: UnsavedStateError(["x"], "why", "mend")}), [READ, STEP])


def test_on_several_ranks_a_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may wait in a collective of the task that failed."""
    monkeypatch.setattr(rounds, "is_alone", lambda: False)
    with pytest.raises(ValueError, match="planted"):
        measured(Machine(raises={READ: ValueError("planted")}), [READ, STEP])


def test_on_several_ranks_nothing_is_in_flight_between_visits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank might replay a collective that another one runs; one rank alone goes on."""
    for alone in (True, False):
        monkeypatch.setattr(rounds, "is_alone", lambda: alone)  # noqa: B023 - used in the loop
        machine = Machine()
        measured(machine, [READ, STEP], num_rounds=2)
        each = range(1, 1 + len(machine.visits))
        assert (set(machine.ended) == set(each)) == (not alone)


def test_an_interrupt_keeps_the_rounds_that_are_whole() -> None:
    """It keeps them from the second one on."""
    with pytest.raises(KeyboardInterrupt):
        measured(Machine(raises={READ: KeyboardInterrupt()}, after=7), [READ, STEP])
    machine = Machine(raises={READ: KeyboardInterrupt()}, after=11)
    found = measured(machine, [READ, STEP], num_rounds=5)
    assert found.interrupted
    assert [len(of) for of in found.saved_s.values()] == [2, 2]
    assert len(found.completed) == 2
    assert machine.log[-1] == "|"
