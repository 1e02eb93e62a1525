"""Tasks that draw give the same draws under every plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from tests.plans_for_tests import NAMES, piped, spread

PLANS = {"two groups": piped(), "four groups": spread(), "deep": piped(depth=6)}


def drawing(name: str) -> PipelineTask:
    """A task that draws in several pieces, so that two at once would mix."""

    def draw(ctx: IterContext) -> None:
        setattr(ctx, name, torch.cat([torch.rand(50) for _ in range(5)]))

    return PipelineTask(name, draw, random=True)


def draws(plan: PipelinePlan, seed: int | None = 7) -> list[torch.Tensor]:
    """All draws of six iterations under a plan."""
    with SWPipeline(plan, [drawing(name) for name in NAMES], seed=seed) as pipe:
        found = []
        for ctx in pipe.iterate(range(6)):
            found += [getattr(ctx, name) for name in NAMES]
    return found


def serial_draws(seed: int | None = 7) -> list[torch.Tensor]:
    """The same, run serially."""
    with SWPipeline(piped(), [drawing(name) for name in NAMES], seed=seed) as pipe:
        contexts = [pipe.run_one_serial_iter(batch, batch) for batch in range(6)]
    return [getattr(ctx, name) for ctx in contexts for name in NAMES]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_draws_do_not_depend_on_the_plan(plan: PipelinePlan) -> None:
    """Threads and overlap change nothing."""
    assert same(draws(plan), serial_draws())


def test_draws_depend_on_seed_task_and_iteration() -> None:
    """No two tasks or iterations draw the same, and another seed draws anew."""
    ours = serial_draws()
    assert len({tuple(d.tolist()) for d in ours}) == len(ours)
    assert not same(ours, serial_draws(seed=8))


def test_without_a_seed_torchs_own_initial_seed_serves() -> None:
    """``torch.manual_seed`` makes runs repeatable as users expect."""
    torch.manual_seed(3)
    once = draws(piped(), seed=None)
    torch.manual_seed(3)
    assert same(once, draws(spread(), seed=None))


def test_the_callers_own_draws_do_not_depend_on_the_plan() -> None:
    """The generators stand where they stood once a task is through."""

    def callers(run: Callable[[], object]) -> torch.Tensor:
        torch.manual_seed(5)
        run()
        return torch.rand(4)

    assert torch.equal(callers(lambda: draws(piped())), callers(serial_draws))
    assert torch.equal(callers(serial_draws), callers(lambda: None))


def test_the_iterator_may_draw_as_well() -> None:
    """A shuffling data loader gives the same batches under every plan."""

    def data() -> object:
        return (torch.rand(2) for _ in range(8))

    def batches(plan: PipelinePlan) -> list[torch.Tensor]:
        torch.manual_seed(11)
        with SWPipeline(plan, [drawing(name) for name in NAMES], seed=1) as pipe:
            return [ctx.batch for ctx in pipe.iterate(data())]  # type: ignore[arg-type]

    assert same(batches(piped()), batches(spread()))


def test_the_generators_are_put_back_when_a_task_fails() -> None:
    """Also then."""
    torch.manual_seed(1)
    expected = torch.rand(3)

    def fail(_: IterContext) -> None:
        torch.rand(100)
        raise ArithmeticError

    torch.manual_seed(1)
    task = PipelineTask("a", fail, random=True)
    with SWPipeline(PipelinePlan.serial([task]), [task]) as pipe:
        with pytest.raises(ArithmeticError):
            pipe.run_one_serial_iter(0)
    assert torch.equal(torch.rand(3), expected)
