"""An error of the iterator is raised in order, and no pulled batch is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from tests.support.plans_for_tests import piped, spread, tasks

PLANS: dict[str, Callable[[], PipelinePlan]] = {
    "serial": lambda: PipelinePlan.serial(tasks()),
    "piped": piped,
    "spread": spread,
    "pulled by a group": lambda: replace(piped(4), pull_group="loader"),
}
FAILS = (0, 3, 4, 9)
"""Batches in whose place the iterator raises: at both ends, and two in a row."""

RIGHT = ["bad 0", 1, 2, "bad 3", "bad 4", 5, 6, 7, 8, "bad 9"]
"""The results of a plain loop: batches, and errors in their places."""


class Corrupt(Exception):
    """An error that the iterator raises on purpose."""


class Rows(Iterator[int]):
    """An iterator over numbers from 0 that raises at those in ``FAILS``, and then continues."""

    def __init__(self, count: int = 10) -> None:
        self.count, self.next = count, 0

    def __next__(self) -> int:
        if self.next == self.count:
            raise StopIteration
        self.next += 1
        if self.next - 1 in FAILS:
            raise Corrupt(f"bad {self.next - 1}")
        return self.next - 1


def seen(call: Callable[[], Any]) -> list[Any]:
    """Return the batches and errors of a loop that continues after each error to the data's end."""
    found: list[Any] = []
    while True:
        try:
            found.append(call().batch)
        except Corrupt as error:
            found.append(str(error))
        except StopIteration:
            return found


@pytest.fixture(params=PLANS, name="pipe")
def each_plan(request: pytest.FixtureRequest) -> Iterator[SWPipeline[IterContext]]:
    """A pipeline under each kind of plan."""
    plan = PLANS[request.param]()
    with SWPipeline(plan, tasks(), device="cpu") as pipe:
        yield pipe


def test_batches_and_errors_come_in_the_order_of_a_plain_loop(pipe: SWPipeline) -> None:
    """All batches are returned, and each error comes between its neighbours."""
    data = Rows()
    assert seen(lambda: pipe.progress(data)) == RIGHT
    assert pipe.next_iteration == 6
    assert [ctx.iter_idx for ctx in pipe.iterate(range(2))] == [6, 7]


def test_progress_without_an_iterator_goes_on_after_an_error(pipe: SWPipeline) -> None:
    """It goes on with the iterator that has failed."""
    pipe.fill_pipeline(data := iter([1, 2]))
    assert data is not None
    assert seen(pipe.progress) == [1, 2]
    rows = Rows(6)
    with pytest.raises(Corrupt, match="bad 0"):
        pipe.progress(rows)
    assert seen(pipe.progress) == [1, 2, "bad 3", "bad 4", 5]


def test_a_fill_raises_an_error_only_where_no_batch_comes_before(pipe: SWPipeline) -> None:
    """Otherwise the batches before the error are returned first."""
    data = Rows()
    if pipe.plan.depth == 1:
        pipe.fill_pipeline(data)  # which pulls nothing
        assert seen(lambda: pipe.progress(data)) == RIGHT
        return
    with pytest.raises(Corrupt, match="bad 0"):
        pipe.fill_pipeline(data)
    pipe.fill_pipeline(data)
    assert seen(lambda: pipe.progress(data)) == RIGHT[1:]


def test_a_drain_hands_out_what_comes_before_an_error(pipe: SWPipeline) -> None:
    """The next call for an iteration raises it, with any iterator, and then continues."""
    data = Rows()
    with pytest.raises(Corrupt, match="bad 0"):
        pipe.progress(data)
    found: list[Any] = [pipe.progress(data).batch]
    found += [ctx.batch for ctx in pipe.drain()]
    assert pipe.drain() == []
    found += seen(lambda: pipe.progress(data))
    assert found == RIGHT[1:]


def test_an_error_of_another_iterator_is_raised_before_a_new_one_begins(pipe: SWPipeline) -> None:
    """It is not lost, and the new one has all its batches."""
    data = Rows()
    with pytest.raises(Corrupt, match="bad 0"):
        pipe.progress(data)
    found = [pipe.progress(data).batch] + [ctx.batch for ctx in pipe.drain()]
    other = iter([10, 11])
    if data.next == 4:  # the next row was pulled ahead, and has failed
        with pytest.raises(Corrupt, match="bad 3"):
            pipe.progress(other)
    assert seen(lambda: pipe.progress(other)) == [10, 11]
    assert found == [1, 2][: len(found)]


def test_what_is_dropped_has_no_error(pipe: SWPipeline) -> None:
    """``drop`` forgets an error together with the batches."""
    data = Rows()
    with pytest.raises(Corrupt, match="bad 0"):
        pipe.progress(data)
    pipe.progress(data)
    pipe.drain()
    pipe.drop()
    other = iter([10])
    assert seen(lambda: pipe.progress(other)) == [10]


def test_a_task_that_fails_tells_of_an_error_that_is_dropped_with_its_batches() -> None:
    """A note says so: the iterator was called ahead, and does not raise it again."""

    def fail(ctx: IterContext) -> None:
        if ctx.batch == 2:
            raise ValueError("of a task")

    made = [PipelineTask("read", lambda ctx: None), PipelineTask("train", fail)]
    plan = PipelinePlan(
        {"read": TaskSchedule(0), "train": TaskSchedule(2)}, deps=[("train", "read")]
    )
    with SWPipeline(plan, made, device="cpu", check_effects=False) as pipe:
        data = Rows()
        data.next = 1
        assert pipe.progress(data).batch == 1
        with pytest.raises(ValueError, match="of a task") as caught:
            pipe.progress(data)
        assert any(
            "an error of the iterator is dropped, too: Corrupt: bad 3" in n
            for n in caught.value.__notes__
        )
