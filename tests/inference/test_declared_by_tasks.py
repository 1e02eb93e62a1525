"""The eleven tasks of sparse-dist declare every state that a recording sees them use.

``EmbForward`` once read the optimizers' learning rate without declaring it: the verifier accepted a
look-up before the rate was known.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

pytest.importorskip("torchrec")

from swpipe.analysis import verify
from swpipe.core.plan import BODY
from swpipe.errors import PlanError
from swpipe.inference import record
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec import SparseDistTasks, TaskOptions, TrainStep
from swpipe.tasks.torchrec.rewriting.forwards import Kind
from tests.inference.helpers import process_group
from tests.tasks.torchrec.models import CPU, Job, batches, combined, plain_model, sharded

UNITED = {
    plans.EMBED: (plans.EMBED, plans.DENSE),
    plans.DENSE_BACK: (plans.DENSE_BACK, plans.EMBED_BACK),
}
"""The tasks without the split forward: the first one does the work of both."""


class Use(NamedTuple):
    """A task's use of a state, and the object in which a recording has seen it."""

    task: str
    state: str
    mode: str
    member: str


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank in this process."""
    with process_group(tmp_path_factory.mktemp("ranks")):
        yield


def _tasks(kind: Kind) -> SparseDistTasks:
    model = plain_model(Job())
    model.bottom = nn.Sequential(nn.BatchNorm1d(5), *model.bottom)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TorchRec says of itself
        model = sharded(Job(), model)
        optimizer = combined(model)
    step = TrainStep([optimizer], clip=1.0, schedules=[LambdaLR(optimizer, lambda step: 0.7**step)])
    return SparseDistTasks(model, step, TaskOptions(forward=kind), device=CPU)


def state_of(member: str) -> str:
    """Return the declared state that a recorded object belongs to."""
    if ".learning_rate_tensor" in member:
        return "learning rate"
    if member.endswith(".grad"):
        return "gradients"
    if "options" in member or "state of" in member or member.startswith("step."):
        return "optimizer"
    if (
        "tables.0.embedding_bags" in member
        or "weights_host" in member
        or "fused[0]: param" in member
        or member.startswith("optimizer: parameter")
    ):
        return "tables"
    if ".tables.0" in member:  # offsets, warnings, and what else a kernel keeps
        return "table cache"
    return "buffers" if "running_" in member or "num_batches" in member else "dense"


def _declared(tasks: SparseDistTasks) -> dict[str, dict[str, str]]:
    return {
        task.name: {io.state: io.mode for io in task.io if io.state is not None}
        for task in tasks.tasks()
    }


def test_every_state_that_is_used_is_declared(one_process: None) -> None:
    """The step has a schedule, clipping, a fused optimizer and batch norm; all is restored.

    The rate within the kernel is no separate state: a look-up sets and uses it. Nor is the kernel's
    scratch memory: all tasks that use it are ordered, since they use the tables.
    """
    tasks = _tasks("split")
    before = [parameter.detach().clone() for parameter in tasks.model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        undeclared = [replace(task, io=()) for task in tasks.tasks()]
        state = {"model": tasks.model, "optimizer": tasks.step.optimizers[0]}
        found: Any = record(undeclared, next(iter(batches(1))), device=CPU, state=state)
    assert all(map(torch.equal, before, tasks.model.parameters()))
    assert {plans.START, plans.DENSE_BACK} <= found.collectives <= plans.ORDERED
    uses = [
        Use(task, state_of(member), mode, member)
        for task, effects in found.effects.items()
        if task != BODY
        for mode, places in (("r", effects.reads), ("w", effects.writes))
        for place in places
        for member in found.states.get(place.name, ())
        if not member.startswith("unnamed memory")
    ]
    declared = _declared(tasks)
    assert {use.state for use in uses} >= {"tables", "dense", "buffers", "gradients", "optimizer"}
    missing = [
        use
        for use in uses
        if use.state not in ("learning rate", "table cache")
        and use.mode not in declared[use.task].get(use.state, "")
    ]
    assert missing == []
    kernel = {use.task for use in uses if use.state in ("learning rate", "table cache")}
    assert kernel
    assert all({"tables", "optimizer"} & declared[task].keys() for task in kernel)


@pytest.mark.parametrize("kind", ["prefetch", "pipelined"])
def test_a_task_that_does_the_work_of_two_declares_the_states_of_both(
    one_process: None, kind: Kind
) -> None:
    """The other forwards run the same functions of the model in fewer tasks."""
    declared, split = _declared(_tasks(kind)), _declared(_tasks("split"))
    for one, both in UNITED.items():
        for task in both:
            for state, mode in split[task].items():
                assert set(mode) <= set(declared[one].get(state, "")), (one, state)


def test_tasks_that_set_the_current_batch_are_ordered(one_process: None) -> None:
    """The replaced forwards serve all batches: two threads would set them at the same time.

    Only a stale plan lets the next look-up overlap with this batch's dense half; other plans order
    the two since they communicate.
    """
    tasks = _tasks("split").tasks()
    stale = plans.semi_sync()
    plan = replace(stale, same_period_deps=[(plans.EMBED_BACK, plans.EMBED)])
    apart = {
        name: replace(plan.schedule[name], thread_group="look-ups", globally_ordered=False)
        for name in (plans.PREFETCH, plans.EMBED)
    }
    with pytest.raises(PlanError, match="'current batch'"):
        verify(replace(plan, schedule={**plan.schedule, **apart}), tasks, pull_ahead=True)
    verify(plan, tasks, pull_ahead=True)
    with pytest.raises(PlanError, match="'tables'"):
        verify(replace(stale, stale={}), tasks, pull_ahead=True)
