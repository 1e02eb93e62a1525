"""A schedule on several ranks gives the numbers of a single process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from docs.examples.moe_gpt import mean_loss
from swpipe.plans.pipeline_parallel import (
    Action,
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    plan_v_schedule,
    torch_schedule,
)
from swpipe.tasks.pipeline_parallel import PipelineRuntime, SerialRuntime, StepResult
from swpipe.tasks.pipeline_parallel.run_rules import CollectivesBeside, kept_buffers
from tests.support.ranks import Ranks
from tests.tasks.pipeline_parallel.by_hand import PlainLoop, Step
from tests.tasks.pipeline_parallel.small_gpt import batch, on_rank, random_schedule, whole

COSTS = PipelineCosts(20, 30, 15)

DEADLINE_S = 240.0
"""Enough for four ranks on a busy machine with two cores."""


def made(name: str, n_micro: int, n_ranks: int) -> PipelineSchedule:
    """Return a schedule by its name."""
    if name == "ours":
        return plan_v_schedule(n_ranks, n_micro, COSTS, effort=0.05).schedule
    return torch_schedule(name, n_ranks, n_micro)  # type: ignore[arg-type]


def same(result: StepResult, wanted: Step) -> bool:
    """Return whether losses and outputs are equal; a rank without the last stage has None."""
    if result.losses is None:
        return result.output is None
    output = torch.cat(wanted.outputs)
    return torch.equal(result.losses, wanted.losses) and torch.equal(result.output, output)


def different(schedule: PipelineSchedule, steps: int = 2) -> list[str]:
    """Train and evaluate; return the differences from a single process on this rank."""
    own = on_rank(schedule, dist.get_rank())
    runtime = PipelineRuntime(schedule, own, mean_loss)
    loop = PlainLoop(whole(schedule.n_stages), schedule.n_micro, mean_loss)
    optimizers = [
        torch.optim.AdamW([p for module in modules for p in module.parameters()])
        for modules in (runtime.modules, loop.modules)
    ]
    found = []
    for step in range(steps):
        inputs, target = batch(2 * schedule.n_micro, step)
        result = runtime.train(inputs, target=target, with_output=True)
        if not same(result, loop.train(inputs, target=target)):
            found.append(f"step {step}: losses or output")
        for stage, module in own.items():
            wanted = loop.modules[stage].parameters()
            for (name, parameter), other in zip(module.named_parameters(), wanted, strict=True):
                assert parameter.grad is not None
                assert other.grad is not None
                if not torch.equal(parameter.grad, other.grad):
                    found.append(f"step {step}: gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
        inputs, target = batch(4 * schedule.n_micro, 100 + step)
        result = runtime.evaluate(inputs, target=target, with_output=True)
        if not same(result, loop.evaluate(inputs, target=target)):
            found.append(f"evaluation {step}: losses or output")
    return found


def all_different(schedules: Sequence[PipelineSchedule]) -> list[list[str]]:
    """Return the differences for several schedules, one after the other."""
    return [different(schedule) for schedule in schedules]


def none_different(ranks: Ranks, schedules: Sequence[PipelineSchedule]) -> bool:
    """Run on the ranks, and return whether none of them found a difference."""
    found = ranks.run(all_different, schedules, deadline_s=DEADLINE_S)
    return found == [[[] for _ in schedules]] * ranks.size


CASES = {2: [("ours", 4), ("dualpipev", 4), ("1f1b", 4), ("ours", 1)], 4: [("zbv", 3)]}
"""Pairs of ranks: orders and numbers of microbatches, also fewer than ranks."""

PLACEMENTS = [(1, 0, 1, 0), (0, 1, 1, 1), (0, 1, 1, 0, 1, 0, 0, 1)]


def test_several_ranks_give_the_bits_of_one_process(two_ranks: Ranks, four_ranks: Ranks) -> None:
    """These are losses, outputs and gradients, with an evaluation of another size per step."""
    for ranks in (two_ranks, four_ranks):
        assert none_different(ranks, [made(*case, ranks.size) for case in CASES[ranks.size]])


def test_any_valid_order_gives_the_same_bits(two_ranks: Ranks) -> None:
    """Orders and placements are random: the runtime runs all that the checker accepts."""
    schedules = [random_schedule(place, 3, seed) for seed, place in enumerate(PLACEMENTS)]
    assert none_different(two_ranks, schedules)


WITH_COLLECTIVES = (
    "0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD\n1UNSHARD,1F0,1B0,1F1,1B1,1REDUCE_GRAD,1RESHARD"
)


def test_collectives_run_where_the_schedule_has_them(two_ranks: Ranks) -> None:
    """It has all of them, or only reductions."""
    schedule = PipelineSchedule.from_csv(WITH_COLLECTIVES)
    reductions = WITH_COLLECTIVES.replace("0UNSHARD,", "").replace("1UNSHARD,", "")
    reductions = reductions.replace(",0RESHARD", "").replace(",1RESHARD", "")
    assert none_different(two_ranks, [schedule, PipelineSchedule.from_csv(reductions)])


# --------------------------------------------------------------------------------- one rank

F, B = "F", "B"


def plain(*rows: list[tuple[int, str, int]], n_micro: int = 1) -> PipelineSchedule:
    """Return a schedule of these rows."""
    return PipelineSchedule(tuple(tuple(Action(*one) for one in row) for row in rows), n_micro)  # type: ignore[arg-type]


ALONE = torch_schedule("zbv", 1, 2)
"""Two stages and two microbatches on one rank."""


class Stateful(nn.Module):
    """A stage with a linear layer and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Map rows."""
        out: Tensor = self.norm(self.linear(x))
        return out


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss."""
    return (output - target).square().mean()


def rows(count: int) -> Tensor:
    """Return some rows."""
    return torch.arange(3.0 * count).view(count, 3).sin()


def after_two_steps() -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return running means on one rank and in one process; then the gradients of the 2nd step."""
    modules = [[Stateful(), Stateful()] for _ in range(3)]
    runtimes = [PipelineRuntime(ALONE, dict(enumerate(modules[k])), squared) for k in (0, 2)]
    loop = PlainLoop(modules[1], 2, squared)
    for each in (runtimes[0], loop):
        for step in (1, 2):
            each.train(rows(8) * step, target=rows(8))
    runtimes[1].train(rows(8) * 2, target=rows(8))
    buffers = [[b for module in modules[k] for b in module.buffers()] for k in (0, 1)]
    grads = [[p.grad for m in modules[k] for p in m.parameters()] for k in (0, 2)]
    return [tuple(buffers), tuple(grads)]  # type: ignore[list-item]


def test_steps_leave_nothing_behind(one_rank: Ranks) -> None:
    """Running means have seen each microbatch once.

    Gradients replace those of the previous step, which would be scaled a second time.
    """
    ((buffers, grads),) = one_rank.run(after_two_steps)
    assert all(map(torch.equal, *buffers))
    assert int(buffers[0][2]) == 4  # batches that the norm has seen
    assert all(map(torch.equal, *grads))


def wrong_gradients(make: Callable[[list[nn.Module]], Any]) -> list[str]:
    """Return the differences from the plain loop in four steps; the last two accumulate."""
    modules: list[list[nn.Module]] = [[Stateful(), Stateful()] for _ in range(2)]
    runtime, loop = make(modules[0]), PlainLoop(modules[1], 2, squared)
    found = []
    for step, accumulate in enumerate((False, False, True, True)):
        inputs = rows(8) * (step + 1)
        result = runtime.train(inputs, target=rows(8), accumulate=accumulate, with_output=step == 1)
        wanted = loop.train(inputs, target=rows(8), accumulate=accumulate)
        if not torch.equal(result.losses, wanted.losses):
            found.append(f"losses of step {step}")
        if step == 1 and not torch.equal(result.output, torch.cat(wanted.outputs)):
            found.append(f"output of step {step}")
        grads = [[p.grad for one in each for p in one.parameters()] for each in modules]
        if not all(map(torch.equal, *grads)):  # type: ignore[arg-type]
            found.append(f"gradients of step {step}")
    result, wanted = (each.evaluate(rows(4), target=rows(4)) for each in (runtime, loop))
    return found + ([] if torch.equal(result.losses, wanted.losses) else ["evaluation"])


def of_one_rank(modules: list[nn.Module]) -> PipelineRuntime:
    """Return a runtime whose rank has both stages."""
    return PipelineRuntime(ALONE, dict(enumerate(modules)), squared)


def test_gradients_replace_those_before_or_are_added_to_them(one_rank: Ranks) -> None:
    """``accumulate`` decides, under a schedule and serially: the bits of a plain loop."""
    assert one_rank.run(wrong_gradients, of_one_rank) == [[]]
    assert wrong_gradients(lambda modules: SerialRuntime(modules, 2, squared)) == []


def test_buffers_are_kept() -> None:
    """Running means are the same as before a measurement."""
    module = Stateful()
    before = [buffer.clone() for buffer in module.buffers()]
    with kept_buffers([module]):
        module(rows(8))
        assert not all(map(torch.equal, before, module.buffers()))
    assert all(map(torch.equal, before, module.buffers()))


def steps_after_a_failure() -> list[str]:
    """Return the errors of three steps, of which the first one's loss function raises."""
    broken = [True]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if broken:
            raise ZeroDivisionError("planted")
        return squared(output, target)

    runtime = PipelineRuntime(ALONE, {0: Stateful(), 1: Stateful()}, loss)
    told = []
    for _ in range(2):
        try:
            runtime.train(rows(8), target=rows(8))
        except (ZeroDivisionError, RuntimeError) as error:
            told.append(str(error))
        broken.clear()
    return told


def test_a_runtime_that_failed_is_not_used_again(one_rank: Ranks) -> None:
    """Its error is raised unchanged; the next call says why it refuses."""
    ((first, second),) = one_rank.run(steps_after_a_failure)
    assert first == "planted"
    assert "make a new runtime" in second


class Reducing(Stateful):
    """A stage that sums over the ranks in its forward, its backward, or a hook before it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "hook":  # as those of sharded modules do
            self.register_forward_pre_hook(lambda module, given: _reduce(given[0]))

    def forward(self, x: Tensor) -> Tensor:
        """Map rows."""
        out = super().forward(x)
        if self.where == "forward":
            _reduce(out)
        if self.where == "backward":
            out.register_hook(_reduce)
        return out


def _reduce(value: Tensor) -> None:
    dist.all_reduce(value.detach().clone())


def summed(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss over the ranks."""
    loss = squared(output, target)
    _reduce(loss)
    return loss


def told_of_passes() -> list[str]:
    """Return the errors of watched passes on this rank; the last one is of an evaluation."""
    told = []
    for kind in ("forward", "backward", "hook", "loss"):
        stage, loss = Reducing(kind), summed if kind == "loss" else squared
        with pytest.raises(RuntimeError) as caught, CollectivesBeside(None):
            loss(stage(rows(4)), rows(4)).backward()
        told.append(str(caught.value))
    rank = dist.get_rank()
    schedule = plain([(0, F, 0), (0, B, 0)], [(1, F, 0), (1, B, 0)])
    runtime = PipelineRuntime(schedule, {rank: Reducing("forward" if rank else "")}, squared)
    try:
        runtime.evaluate(rows(4), target=rows(4))
    except RuntimeError as error:
        told.append(str(error.__cause__ or error))
    return told


def test_a_collective_inside_a_pass_is_refused(two_ranks: Ranks) -> None:
    """The first one is, also in hooks and losses: it would wait for ranks at other passes."""
    reduces = "starts the collective allreduce_ inside a pass"
    for rank, told in enumerate(two_ranks.run(told_of_passes)):
        assert [reduces in one for one in told] == [True] * (4 + rank)


# -------------------------------------------------------------------------------- bad input


def refusals() -> list[str]:
    """Return this rank's errors of runtimes that cannot be made."""
    rank = dist.get_rank()
    deadlock = plain([(0, B, 0), (0, F, 0)], [(1, F, 0), (1, B, 0)])
    order = [(1, F, 1), (1, F, 0), (1, B, 0), (1, B, 1)]
    first = [(0, F, 1), (0, F, 0), (0, B, 0), (0, B, 1)]
    schedules = [
        random_schedule((0, 1, 2, 3), 2, 0),
        deadlock,
        plain(first, order, n_micro=2),
        random_schedule((0, 1, 0), 1, 0),
        random_schedule((0, 1, 1, 0), 2, rank),
    ]
    cases = [(schedule, dict[int, nn.Module](on_rank(schedule, rank))) for schedule in schedules]
    good = random_schedule((0, 1, 1, 0), 2, 0)
    alone = dist.new_group([1])
    for kind in ("missing", "shared", "wrapped"):
        own: dict[int, nn.Module] = dict(on_rank(good, rank))
        if rank and kind == "missing":
            del own[2]
        elif rank and kind == "shared":
            own[2] = own[1]
        elif rank:
            inside = nn.parallel.DistributedDataParallel(own[2], process_group=alone)
            own[2] = nn.Sequential(inside)
        cases.append((good, own))
    told = []
    for schedule, chunks in cases:
        with pytest.raises(ScheduleError) as error:
            PipelineRuntime(schedule, chunks, mean_loss)
        told.append(str(error.value))
    return told


def test_what_cannot_run_is_refused_on_all_ranks(two_ranks: Ranks) -> None:
    """The error has one line; no rank waits for a rank whose mistake it may be."""
    told, alike = two_ranks.run(refusals, deadline_s=DEADLINE_S)
    assert told == alike
    for one, words in zip(
        told,
        [
            "the schedule is for 4 ranks, the process group has 2",
            "0B0 on rank 0 comes before 0F0",
            "1F1 comes out of the order of the microbatches: ",
            "the schedule has 3 stages on 2 ranks: ",
            "ranks 0 and 1 have different schedules",
            "rank 1: the chunks are those of stages [1], and the schedule places stages ",
            "rank 1: layers.2.input_norm.weight of stage 2 is ",
            "rank 1: stage 2: 0 is a DistributedDataParallel inside a chunk ",
        ],
        strict=True,
    ):
        assert one.startswith(words)
        assert "\n" not in one


def say_what_is_wrong() -> list[str]:
    """Return the errors for batches that do not fit a runtime of two microbatches."""
    runtime = PipelineRuntime(ALONE, {0: Stateful(), 1: Stateful()}, squared)
    told = []
    given: list[tuple[tuple[Tensor, ...], Any]] = [
        ((rows(7),), rows(7)),
        ((rows(8),), rows(6)),
        ((), rows(8)),
        ((rows(8),), None),
        ((torch.tensor(1.0),), rows(8)),
        ((rows(8),), {"rows": rows(8)}),
        ((rows(0),), rows(0)),
    ]
    for inputs, target in given:
        try:
            runtime.train(*inputs, target=target)
        except ValueError as error:
            told.append(str(error))
    runtime.train(rows(8), target=rows(8))
    with pytest.raises(ValueError, match="the first batch had torch.float32 \\(8, 3\\)"):
        runtime.train(rows(4), target=rows(4))
    return told


def test_batches_that_do_not_fit_are_refused(one_rank: Ranks) -> None:
    """They are refused before anything runs: the next step works."""
    (told,) = one_rank.run(say_what_is_wrong)
    assert told == [
        "input 0 has 7 rows, which 2 microbatches do not divide: give a multiple of 2",
        "input 0 has 8 rows, target has 6 rows: give all of them the same rows",
        "inputs: rank 0 has the first stage; give it",
        "target: rank 0 has the last stage; give it",
        "input 0 is a tensor without dimensions: give a tensor with rows of the batch",
        "target is of type dict: give a tensor with rows of the batch",
        "input 0 has 0 rows, which 2 microbatches do not divide: give a multiple of 2",
    ]


class Failing(Stateful):
    """A stage whose backward pass fails if ``fails`` is set."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        """Map rows."""
        out = super().forward(x)
        if self.broken:
            out.register_hook(_planted)
        return out


def _planted(grad: Tensor) -> None:
    raise ZeroDivisionError("planted")


def what_ranks_are_told() -> list[str]:
    """Return this rank's errors if a batch, and then a pass, of rank 0 alone fails."""
    rank = dist.get_rank()
    schedule = plain([(0, F, 0), (0, B, 0)], [(1, F, 0), (1, B, 0)])
    stage = Failing()
    runtime = PipelineRuntime(schedule, {rank: stage}, squared)
    told = []
    for size in (8, 0, 8):  # rank 0 has none of the second batch
        try:
            runtime.train(rows(8 if rank else size), target=rows(8) if rank else None)
        except (ValueError, RuntimeError) as error:
            told.append(" ".join([str(error), *getattr(error, "__notes__", [])]))
    stage.broken = rank == 0
    for _ in range(2):  # rank 1 has done its part when the last pass of rank 0 fails
        try:
            runtime.train(rows(8), target=rows(8))
        except (ZeroDivisionError, RuntimeError) as error:
            told.append(" ".join([str(error), *getattr(error, "__notes__", [])]))
    return told


def test_what_one_rank_refuses_all_ranks_raise(two_ranks: Ranks) -> None:
    """After a wrong batch, the next step runs. A failed pass is raised at the next step, too."""
    first, second = two_ranks.run(what_ranks_are_told)
    batch_of_none = "rank 0 failed before the step: ValueError: input 0 has 0 rows"
    assert batch_of_none in first[0]
    assert batch_of_none in second[0]
    pass_of_rank_0 = "rank 0 failed at stage 0, B of microbatch 0: ZeroDivisionError: planted"
    assert pass_of_rank_0 in first[1]
    assert pass_of_rank_0 in first[2]  # the next call says why it refuses
    assert "make a new runtime" in first[2]
    assert second[1:] == [pass_of_rank_0]


def test_there_has_to_be_a_process_group() -> None:
    """The error comes before anything is made."""
    with pytest.raises(RuntimeError, match="there is none: call torch.distributed.init_process_"):
        PipelineRuntime(ALONE, {}, squared)
