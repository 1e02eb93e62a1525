"""``DeclaredIO.reset``: called where iterations are dropped, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from swpipe import DeclaredIO, IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule

PLANS = {
    "serial": {"keep": TaskSchedule(), "use": TaskSchedule()},
    "stages": {"keep": TaskSchedule(), "use": TaskSchedule(stage=2)},
    "worker": {"keep": TaskSchedule(thread_group="w"), "use": TaskSchedule(stage=2)},
}


class Keeper:
    """Two tasks that pass each batch through a list outside the context."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.kept: list[int] = []
        self.resets = 0
        self.fails_at = fails_at

    def keep(self, ctx: IterContext) -> None:
        self.kept.append(ctx.batch)

    def use(self, ctx: IterContext) -> None:
        if ctx.batch == self.fails_at:
            raise KeyError(ctx.batch)
        ctx.used = self.kept.pop(0)

    def reset(self) -> None:
        self.kept.clear()
        self.resets += 1

    def pipeline(self, plan: str) -> SWPipeline:
        tasks = [
            PipelineTask("keep", self.keep, [DeclaredIO(reset=self.reset)]),
            PipelineTask("use", self.use),
        ]
        return SWPipeline(PipelinePlan(PLANS[plan], deps=[("use", "keep")]), tasks)


@pytest.fixture(params=PLANS, name="plan")
def each_plan(request: pytest.FixtureRequest) -> str:
    """The name of each plan."""
    name: str = request.param
    return name


def test_after_a_failure_the_next_batches_meet_nothing_old(plan: str) -> None:
    """What was kept for the dropped iterations is dropped with them."""
    keeper = Keeper(fails_at=3)
    with keeper.pipeline(plan) as pipe:
        with pytest.raises(KeyError):
            pipe.run(range(9))
        assert keeper.resets == 1
        assert [ctx.used for ctx in pipe.iterate([7, 8])] == [7, 8]
        assert keeper.resets == 1


def test_after_a_serial_failure() -> None:
    """Tasks that run one by one drop their iteration, too."""
    keeper = Keeper(fails_at=3)
    with keeper.pipeline("worker") as pipe, pytest.raises(KeyError):
        pipe.run_serial(range(9))
    assert (keeper.kept, keeper.resets) == ([], 1)


def test_close_drops_what_is_in_flight() -> None:
    """This holds for an explicit call, and for a pipeline that is collected."""
    keeper = Keeper()
    with keeper.pipeline("worker") as pipe:
        pipe.progress(iter(range(9)))
    assert (keeper.kept, keeper.resets) == ([], 1)
    pipe = keeper.pipeline("stages")
    pipe.progress(iter(range(9)))
    with pytest.warns(ResourceWarning, match="dropped without close"):
        del pipe
    assert (keeper.kept, keeper.resets) == ([], 2)


def test_what_ends_drops_nothing(plan: str) -> None:
    """Neither the end of the data nor ``drain`` nor a later close drops anything."""
    keeper = Keeper()
    with keeper.pipeline(plan) as pipe:
        pipe.run(range(5))
        pipe.progress(iter(range(5)))
        pipe.drain()
    assert (keeper.kept, keeper.resets) == ([], 0)


def _failing(reset: Callable[[], None]) -> tuple[SWPipeline, Keeper]:
    def use(ctx: IterContext) -> None:
        raise KeyError(ctx.batch)

    others = Keeper()
    tasks = [
        PipelineTask("a", others.keep, [DeclaredIO(reset=reset)]),
        PipelineTask("b", use, [DeclaredIO(state="s"), DeclaredIO(reset=others.reset)]),
    ]
    pipe = SWPipeline(
        PipelinePlan({"a": TaskSchedule(), "b": TaskSchedule(stage=1)}, deps=[("b", "a")]), tasks
    )
    return pipe, others


def _raise() -> None:
    raise OSError("the disk is gone")


def test_a_reset_that_fails_is_noted_on_the_failure() -> None:
    """The failure itself is raised, and the other resets are called."""
    pipe, others = _failing(_raise)
    with pipe:
        with pytest.raises(KeyError) as caught:
            pipe.run(range(3))
        assert "swpipe: OSError in the reset of io[0] of task 'a': the disk is gone" in (
            caught.value.__notes__
        )
        assert others.resets == 1


def test_a_reset_that_fails_in_close_is_raised() -> None:
    """It is raised once; the pipeline is closed all the same."""
    pipe, others = _failing(_raise)
    pipe.fill_pipeline(iter(range(3)))
    with pytest.raises(OSError, match="disk") as caught:
        pipe.close()
    assert "swpipe: in the reset of io[0] of task 'a'" in caught.value.__notes__
    assert others.resets == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.close()
