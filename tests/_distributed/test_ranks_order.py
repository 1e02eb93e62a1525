"""Several ranks, each with delays of its own: one order of collectives, and one loud failure."""

from __future__ import annotations

import operator
import random
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe._distributed.rank_checks import RECENT_S, _kind, check_same_plan, tell_failure
from swpipe.errors import StallError
from tests.support.ranks import Ranks
from tests.support.scripts import Script, Scripts, as_torchrun

ITERATIONS = 6
RUNS = 10

ORDERED = ("sizes", "ids", "pooled", "reduce")


class Delayed:
    """The tasks of a recommender: exchanges that one task starts and another awaits, an all-reduce.

    Each task sleeps first, for a time from its rank's own generator. A collective that met another
    one on the other rank would give different numbers, if it returned at all.
    """

    names = ("read", *ORDERED, "step")

    def __init__(self, seed: int, *, dry: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.draws = {name: random.Random(f"{seed} {self.rank} {name}") for name in self.names}
        self.dry = dry
        self.issued: list[tuple[str, int]] = []

    def tasks(self) -> list[PipelineTask]:
        return [PipelineTask(name, getattr(self, name)) for name in self.names]

    def load(self, name: str, ctx: IterContext) -> None:
        time.sleep(self.draws[name].random() * 2e-3)  # work of unequal length; orders nothing
        if name in ORDERED:
            self.issued.append((name, ctx.iter_idx))

    def told(self, name: str, ctx: IterContext) -> float:
        return 1000.0 * self.names.index(name) + ctx.iter_idx

    def exchange(self, name: str, ctx: IterContext) -> tuple[torch.Tensor, Any]:
        sent = torch.full((self.size,), self.told(name, ctx))
        got = torch.empty_like(sent)
        # Nothing may take the tensors' memory before the exchange is through.
        setattr(ctx, f"{name}_sent", sent)
        return got, None if self.dry else dist.all_to_all_single(got, sent, async_op=True)

    def arrived(self, name: str, ctx: IterContext, exchange: tuple[torch.Tensor, Any]) -> None:
        got, work = exchange
        if work is not None:
            work.wait()
            assert got.tolist() == [self.told(name, ctx)] * self.size

    def read(self, ctx: IterContext) -> None:
        self.load("read", ctx)

    def sizes(self, ctx: IterContext) -> None:
        self.load("sizes", ctx)
        ctx.sizes = self.exchange("sizes", ctx)

    def ids(self, ctx: IterContext) -> None:
        self.arrived("sizes", ctx, ctx.sizes)
        self.load("ids", ctx)
        ctx.ids = self.exchange("ids", ctx)

    def pooled(self, ctx: IterContext) -> None:
        self.load("pooled", ctx)
        ctx.pooled = self.exchange("pooled", ctx)

    def reduce(self, ctx: IterContext) -> None:
        self.arrived("pooled", ctx, ctx.pooled)
        self.load("reduce", ctx)
        total = torch.tensor([self.told("reduce", ctx)] * 3)
        if not self.dry:
            dist.all_reduce(total)
            assert total.tolist() == [self.size * self.told("reduce", ctx)] * 3

    def step(self, ctx: IterContext) -> None:
        self.arrived("ids", ctx, ctx.ids)
        self.load("step", ctx)


def plan(*, ordered: bool = True) -> PipelinePlan:
    """Return a plan of four thread groups, three with collectives of different iterations."""
    return PipelinePlan(
        {
            "read": TaskSchedule(stage=0, thread_group="read"),
            "sizes": TaskSchedule(stage=1, thread_group="dist", globally_ordered=ordered),
            "ids": TaskSchedule(stage=2, thread_group="dist", globally_ordered=ordered),
            "pooled": TaskSchedule(stage=2, thread_group="pooled", globally_ordered=ordered),
            "reduce": TaskSchedule(stage=3, globally_ordered=ordered),
            "step": TaskSchedule(stage=3),
        },
        deps=[
            ("sizes", "read"), ("ids", "sizes"), ("pooled", "read"), ("reduce", "pooled"),
            ("step", "ids"), ("step", "reduce"),
        ],
        pipeline_depth=6,
    )  # fmt: skip


def _orders(first_seed: int, runs: int, dry: bool, ordered: bool) -> list[list[tuple[str, int]]]:
    """Return the order in which this rank issued its collectives, in each run."""
    orders = []
    for seed in range(first_seed, first_seed + runs):
        work = Delayed(seed, dry=dry)
        with SWPipeline(
            plan(ordered=ordered), work.tasks(), device="cpu", stall_timeout_s=60.0
        ) as pipe:
            assert pipe.run(range(ITERATIONS)).iterations == ITERATIONS
        orders.append(work.issued)
    return orders


def test_collectives_are_issued_in_one_order(two_ranks: Ranks) -> None:
    """This holds for any delays of the ranks, and the results belong to the collectives."""
    one, other = two_ranks.run(_orders, 0, RUNS, False, True)
    assert [len(order) for order in one] == [len(ORDERED) * ITERATIONS] * RUNS
    assert one == other


def test_without_global_order_ranks_drift_apart(two_ranks: Ranks) -> None:
    """The delays matter: without global order, the orders soon differ."""
    one, other = two_ranks.run(_orders, 0, 5, True, False)
    assert one != other
    one, other = two_ranks.run(_orders, 0, 5, True, True)
    assert one == other


# ------------------------------------------------------------------------------ failure


class Planted(Exception):
    """An error that a test raises on purpose."""


def _reduce(ctx: IterContext) -> None:
    ctx.total = torch.tensor(float(ctx.batch))
    dist.all_reduce(ctx.total)


def _train(ctx: IterContext) -> None:
    if dist.get_rank() == 1 and ctx.batch == 5:
        raise Planted("on rank one")
    dist.all_reduce(ctx.total)


def _one_rank_raises(group: str) -> None:
    """Run two collectives per iteration; rank 1 fails once before the second."""
    tasks = [PipelineTask("reduce", _reduce), PipelineTask("train", _train)]
    if group == "serially":
        SWPipeline(PipelinePlan.serial(tasks), device="cpu").run_serial(range(100))
    schedule = {
        "reduce": TaskSchedule(stage=0, thread_group="dist", globally_ordered=True),
        "train": TaskSchedule(stage=1, thread_group=group, globally_ordered=True),
    }
    piped = PipelinePlan(schedule, deps=[("train", "reduce")])
    with SWPipeline(piped, tasks, device="cpu") as pipe:
        pipe.run(range(100))


JOB = """
import sys
import torch, torch.distributed as dist
from tests._distributed.test_ranks_order import _one_rank_raises
torch.set_num_threads(1)
dist.init_process_group("gloo")
_one_rank_raises(sys.argv[1])
"""


CAUSE = "rank 1 had failed before, which may be the cause: Planted: on rank one"


@pytest.mark.parametrize("group", ["own", "serially"])
def test_a_rank_that_is_let_down_says_who_failed_first_and_of_what(
    scripts: Scripts, group: str
) -> None:
    """It raises its own error, though the other rank waits in a collective."""
    zero, one = scripts.run_together(
        [Script(JOB, args=(group,), environment=told) for told in as_torchrun(2)]
    )
    assert (zero.returncode, one.returncode) == (1, 1)
    assert CAUSE in zero.stderr
    assert CAUSE not in one.stderr
    assert "Planted: on rank one" in one.stderr
    where = "serially" if group == "serially" else "thread group 'own'"
    assert f"at task 'train', iteration 5, {where}" in one.stderr


def _fail(ctx: IterContext) -> None:
    raise Planted(f"number {ctx.batch}")


def _nobody_has_failed() -> None:
    """Make all failures in the store of the shared ranks old, as in a new job."""
    check_same_plan(PipelinePlan.serial(["train"]))


def _notes(error: BaseException) -> list[str]:
    """Record an error as this rank's failure, and return the notes on it."""
    tell_failure(error)
    return getattr(error, "__notes__", [])


def _each_fails_in_turn() -> list[str]:
    """Let rank 0 fail, then rank 1; return the notes on this rank's error."""
    _nobody_has_failed()
    pipe = SWPipeline(PipelinePlan.serial([PipelineTask("fails", _fail)]), device="cpu")
    notes: list[str] = []
    for turn in range(2):
        if dist.get_rank() == turn:
            try:
                pipe.run_one_serial_iter(turn)
            except Planted as error:
                notes = error.__notes__
        dist.barrier()
    _nobody_has_failed()
    return notes


def test_the_rank_that_failed_first_is_noted_on_the_others_errors(two_ranks: Ranks) -> None:
    """The failing rank's own error has no such note; the note also names the task."""
    first, second = two_ranks.run(_each_fails_in_turn)
    assert len(first) == 1
    assert len(second) == 2
    assert second[1] == (
        "swpipe: rank 0 had failed before, which may be the cause: Planted: number 0; "
        "swpipe: at task 'fails', iteration 0, serially"
    )


def _after_an_old_failure() -> list[str]:
    """Return the notes if rank 0 failed long ago, and rank 1 and then rank 0 fail now."""
    _nobody_has_failed()
    notes: list[str] = []
    for rank, age_s in ((0, 2 * RECENT_S), (1, 0.0), (0, 0.0)):
        if dist.get_rank() == rank:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "time", partial(operator.sub, time.time(), age_s))
                notes = _notes(Planted(f"on rank {rank}"))
        dist.barrier()
    _nobody_has_failed()
    return notes


def test_a_failure_that_was_got_over_is_not_the_cause_of_a_later_one(two_ranks: Ranks) -> None:
    """The later failure replaces the caught one."""
    zero, one = two_ranks.run(_after_an_old_failure)
    assert one == []
    assert "rank 1 had failed before" in zero[0]
    assert "Planted: on rank 1" in zero[0]


def _after_a_caught_failure(again: bool) -> list[str]:
    """Let rank 1 fail, then rank 0; with ``again`` the ranks compare a plan in between."""
    _nobody_has_failed()
    rank = dist.get_rank()
    if rank == 1:
        tell_failure(Planted("caught"))
    dist.barrier()
    if again:
        check_same_plan(PipelinePlan.serial(["train"]))
    found = _notes(Planted("now")) if rank == 0 else []
    _nobody_has_failed()
    return found


def test_a_caught_failure_is_not_the_cause_of_one_in_a_later_run(two_ranks: Ranks) -> None:
    """This also holds for a recent failure; without a later run it may be the cause."""
    zero, _ = two_ranks.run(_after_a_caught_failure, False)
    assert "rank 1 had failed before" in zero[0]
    assert two_ranks.run(_after_a_caught_failure, True) == [[], []]


LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:39055"


def raised_from(cause: Exception) -> Exception:
    """Return a failure of a task that another one has caused."""
    error = Planted("a library's own")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(LOST), "lost"),
        (StallError("nothing has moved"), "stall"),
        (ConnectionResetError(), "lost"),
        (raised_from(RuntimeError(LOST)), "lost"),
        (raised_from(raised_from(StallError("nothing has moved"))), "stall"),
        (RuntimeError("a matrix is singular"), "own"),
        (ValueError(LOST), "own"),
        (raised_from(ValueError("of its own")), "own"),
    ],
)
def test_who_is_let_down_is_told_by_the_failure_or_by_its_cause(
    error: Exception, kind: str
) -> None:
    """A lost connection or a stall, also below a library's error, means that a rank is let down."""
    assert _kind(error) == kind


SILENT = (
    "swpipe: rank 3 reported no failure; it may be the cause, if it was killed, was stopped, or "
    "ended outside the pipeline"
)


def _some_are_let_down(failing: int | None) -> list[str]:
    """Let rank 3 be silent, and the others lose their connections, except one that fails itself."""
    _nobody_has_failed()
    rank = dist.get_rank()
    error = Planted("of its own") if rank == failing else RuntimeError(LOST)
    found = _notes(error) if rank != 3 else []
    _nobody_has_failed()
    return found


@pytest.mark.parametrize("failing", [None, 2])
def test_ranks_that_are_let_down_blame_no_other_victim(
    four_ranks: Ranks, failing: int | None
) -> None:
    """They name the rank that failed for its own reason, or else the rank that reported nothing.

    A rank has recovered from an error that it reported long ago.
    """
    said = four_ranks.run(_some_are_let_down, failing)
    cause = "swpipe: rank 2 had failed before, which may be the cause: Planted: of its own"
    expected = [SILENT] if failing is None else [cause]
    assert said == [[] if rank in (failing, 3) else expected for rank in range(4)]


def _all_are_let_down() -> list[list[str]]:
    found = []
    for stalls in (False, True):
        _nobody_has_failed()
        stalled = stalls and dist.get_rank() == 1
        found.append(_notes(StallError("nothing moves") if stalled else RuntimeError(LOST)))
    _nobody_has_failed()
    return found


def test_where_all_ranks_are_let_down_none_is_blamed_but_one_that_stalled(
    two_ranks: Ranks,
) -> None:
    """Examples are a broken network, and a rank whose stall ends the others."""
    cause = "swpipe: rank 1 had failed before, which may be the cause: StallError: nothing moves"
    assert two_ranks.run(_all_are_let_down) == [[[], [cause]], [[], []]]
