"""Tables of slots against counting slot by slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swpipe.plans.modulo.reservation import Starts, Table

SLOTS = 12
Work = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=4)


def slots_of(start: int, time: int) -> set[int]:
    """The slots of one operation, one by one."""
    return {(start + k) % SLOTS for k in range(time)}


def filled(work: list[tuple[int, int]]) -> Table:
    """A table with these operations, named 0, 1 and so on, whether they clash or not."""
    table = Table(SLOTS)
    for task, (start, time) in enumerate(work):
        table.put(task, start, time)
    return table


@given(work=Work, start=st.integers(0, 30), time=st.integers(0, 5))
def test_those_in_the_way_are_found(work: list[tuple[int, int]], start: int, time: int) -> None:
    """Every task that has one of the slots, over the end of the period too."""
    wanted = slots_of(start, time)
    assert filled(work).clashing(start, time) == {
        task for task, has in enumerate(work) if slots_of(*has) & wanted
    }


@given(work=Work, time=st.integers(1, 5))
def test_all_starts_are_tried_at_once(work: list[tuple[int, int]], time: int) -> None:
    """A start is blocked exactly if some task is in the way."""
    table = filled(work)
    blocked = {start for start in range(SLOTS) if table.blocked(time) >> start & 1}
    assert blocked == {start for start in range(SLOTS) if table.clashing(start, time)}


@given(work=Work, gone=st.integers(0, 3))
def test_what_is_given_back_is_free(work: list[tuple[int, int]], gone: int) -> None:
    """And nothing else is."""
    table = filled(work)
    table.free(gone)
    left = [slots_of(*has) for task, has in enumerate(work) if task != gone]
    taken = set().union(*left)
    assert {slot for slot in range(SLOTS) if table.clashing(slot, 1)} == taken


@given(work=Work, time=st.integers(1, 5), start=st.integers(0, 40))
def test_the_next_free_start_is_found(work: list[tuple[int, int]], time: int, start: int) -> None:
    """After a time and before it, in this period or in another."""
    table = filled(work)
    starts = Starts(SLOTS, table.blocked(time))
    free = [at for at in range(start - SLOTS, start + SLOTS + 1) if not table.clashing(at, time)]
    later = [at for at in free if at >= start]
    assert starts.after(start) == (later[0] if later else None)
    if free:
        assert starts.before(start) == [at for at in free if at <= start][-1]
