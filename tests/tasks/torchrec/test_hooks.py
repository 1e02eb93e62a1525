"""Overridden steps of TorchRec's classes: the numbers of the same subclass of TorchRec."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks import torchrec as ours
from swpipe.tasks.torchrec.pipelines.hooks import HOOKS, NO_HOOKS
from tests.support.ranks import Ranks
from tests.tasks.torchrec.loops import made, streams_on_a_cpu, theirs, trained
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)
from tests.tasks.torchrec.trial import Outcome, Restarting, refusal, to_the_end

BASE, SPARSE, FUSED = (
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "TrainPipelineFusedSparseDist",
)

Subclass = Callable[[Any], Any]


# ------------------------------------------------------------------------------- the subclasses


def scales_the_loss(base: Any) -> Any:
    """Return a subclass that multiplies the losses, as a gradient scaler does."""

    class Scaled(base):
        def _backward(self, losses: Any) -> None:
            assert isinstance(self._optimizer, torch.optim.Optimizer)
            (4 * torch.sum(losses, dim=0)).backward()

    return Scaled


def backs_twice(base: Any) -> Any:
    """Return a subclass that changes the losses, and calls TorchRec's backward."""

    class Weighted(base):
        def _backward(self, losses: Any) -> None:
            super()._backward(losses / 3)

    return Weighted


def clips(base: Any) -> Any:
    """Return a subclass that clips gradients before the step."""

    class Clipped(base):
        def _optimizer_step(self) -> None:
            nn.utils.clip_grad_norm_(self._model.module.top.parameters(), 1e-3)
            self._optimizer.step()

    return Clipped


def stops_together(base: Any) -> Any:
    """Return a subclass that drops batches that only some ranks have, and every third one."""

    class Together(base):
        pulled = 0

        def _next_batch(self, dataloader_iter: Any) -> Any:
            if dataloader_iter is not self._dataloader_iter:
                self._dataloader_iter = dataloader_iter
                self._dataloader_exhausted = False
            if self._dataloader_exhausted:
                return None
            self.pulled += 1
            if self.pulled % 3 == 1:
                next(dataloader_iter, None)
            batch = next(dataloader_iter, None)
            has = torch.tensor(float(batch is not None))
            dist.all_reduce(has)
            if has.item() < dist.get_world_size():
                self._dataloader_exhausted = True
                return None
            return batch

    return Together


def doubles_copies(base: Any) -> Any:
    """Return a subclass that changes the batch on the device, as TorchRec's documentation does."""

    class Doubled(base):
        def copy_batch_to_gpu(self, dataloader_iter: Any) -> Any:
            batch = self._next_batch(dataloader_iter)
            if batch is None:
                return None, None
            batch = batch.to(self._device, non_blocking=True)
            batch.dense = 2 * batch.dense
            return batch, self._new_context()

    def context(self: Any) -> Any:
        return self._create_context() if base.__module__.startswith("torchrec.") else None

    Doubled._new_context = context  # type: ignore[attr-defined]
    return Doubled


def does_all(base: Any) -> Any:
    """Return a subclass that overrides everything, and leaves out a batch in the pull alone."""
    doubled = doubles_copies(base)
    clipped = clips(doubled)
    together = stops_together(clipped)
    return scales_the_loss(together)


CHANGING: dict[str, tuple[Subclass, tuple[str, ...]]] = {
    "_backward": (scales_the_loss, (BASE, SPARSE, FUSED)),
    "super()._backward": (backs_twice, (BASE, SPARSE, FUSED)),
    "_optimizer_step": (clips, (SPARSE,)),
    "copy_batch_to_gpu": (doubles_copies, (SPARSE, FUSED)),
    "_next_batch": (stops_together, (SPARSE, FUSED)),
    "all": (does_all, (SPARSE,)),
}


def _uneven(pipeline: Any) -> list[Any]:
    return to_the_end(pipeline, batches(9 - 2 * dist.get_rank()))


def _changed(hook: str) -> list[str]:
    """Return the differences between subclasses of ours and of TorchRec's."""
    subclass, names = CHANGING[hook]
    loop = _uneven if hook in ("_next_batch", "all") and dist.get_world_size() > 1 else 7
    found = []
    for name in names:
        with streams_on_a_cpu():
            wanted = trained(subclass(theirs(name)), loop)
            plain = trained(theirs(name), 7)
        found += trained(subclass(getattr(ours, name)), loop).differences(wanted)
        if not wanted.differences(plain):
            found.append(f"{name}: the override changes nothing")
    return found


@pytest.mark.parametrize("hook", CHANGING)
def test_an_override_has_the_numbers_of_torchrecs(two_ranks: Ranks, hook: str) -> None:
    """Two ranks have tables and dense part in one backward or in two."""
    assert two_ranks.run(_changed, hook) == [[], []]


@pytest.mark.parametrize("hook", ["_backward", "_next_batch"])
def test_an_override_has_the_numbers_of_torchrecs_on_one_rank(one_rank: Ranks, hook: str) -> None:
    """Both parts have one backward, and the ranks have nothing to agree on."""
    assert one_rank.run(_changed, hook) == [[]]


# ---------------------------------------------------------------------------- which are called


def counts_calls(base: Any, calls: list[str]) -> Any:
    """Return a subclass that notes each call."""

    def noting(name: str) -> Callable[..., Any]:
        def hook(self: Any, *given: Any) -> Any:
            calls.append(name)
            return getattr(base, name)(self, *given)

        return hook

    return type("Noting", (base,), {name: noting(name) for name in HOOKS})


LAST = ("_backward", "_optimizer_step", "dequeue_batch")
"""The hooks at the end of a step, in their order."""

ONCE = {*HOOKS} - {"fill_pipeline", "_next_batch", "enqueue_batch", "copy_batch_to_gpu"}
"""Hooks that TorchRec calls once for each batch; it tries some more at the end of the data."""


def _called(name: str) -> list[Any]:
    mine: list[str] = []
    other: list[str] = []
    wanted = trained(counts_calls(theirs(name), other), 5)
    found: list[Any] = trained(counts_calls(getattr(ours, name), mine), 5).differences(wanted)
    counts = Counter(mine)
    found += [f"{hook}: {counts[hook]}" for hook in ONCE if counts[hook] != Counter(other)[hook]]
    found += [hook for hook in ("enqueue_batch", "copy_batch_to_gpu") if counts[hook] != 5]
    found += ["fill_pipeline"] if counts["fill_pipeline"] != 6 else []
    last = [hook for hook in mine if hook in LAST]
    return found if last == [*LAST] * 5 else [*found, *last]


def test_each_hook_is_called_once_for_each_batch(two_ranks: Ranks) -> None:
    """It is called as often as by TorchRec; ``fill_pipeline`` in each call of ``progress``."""
    assert two_ranks.run(_called, SPARSE) == [[], []]


def _unsharded() -> list[str]:
    """Return the hooks that are called for a model without sharded modules."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, batch: Batch) -> Any:
            loss = self.layer(batch.dense).sum()
            return loss, loss.detach()

    model, calls = Plain(), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with counts_calls(ours.TrainPipelineSparseDist, calls)(model, optimizer, CPU) as pipeline:
        to_the_end(pipeline, batches(2))
    return sorted({*HOOKS} - {*calls})


def test_each_hook_is_called_for_any_model(one_rank: Ranks) -> None:
    """This includes models without sharded modules, and without exchanges."""
    assert one_rank.run(_unsharded) == [[]]


# --------------------------------------------------------------------------- batches in flight


def fills_with_copies(base: Any) -> Any:
    """Return a subclass that continues with copies of a batch until all ranks' data has ended."""

    class Filled(base):
        def _next_batch(self, dataloader_iter: Any) -> Any:
            if dataloader_iter is not self._dataloader_iter:
                self._dataloader_iter = dataloader_iter
                self._dataloader_exhausted = False
            if self._dataloader_exhausted:
                return None
            batch = next(dataloader_iter, None)
            any_left = torch.tensor(float(batch is not None))
            dist.all_reduce(any_left)
            if batch is None and any_left.item() > 0:
                return copy.copy(self.batches[0])
            self._dataloader_exhausted = batch is None
            return batch

    return Filled


def _evaluated(kind: Any, count: int) -> list[Any]:
    pipeline = made(fills_with_copies(kind))
    pipeline._model.eval()
    with torch.no_grad():
        return to_the_end(pipeline, batches(count))


def _filled() -> list[str]:
    count = (5, 1)[dist.get_rank()]
    wanted = _evaluated(theirs(SPARSE), count)
    outputs = _evaluated(ours.TrainPipelineSparseDist, count)
    own = Outcome(outputs[:count], {}).differences(Outcome(wanted[:count], {}))
    return own if len(outputs) == 5 else [*own, str(len(outputs))]


def test_an_override_of_the_pull_finds_the_batches_in_flight(two_ranks: Ranks) -> None:
    """A prediction that fills up a rank's steps does so; one batch may be all there is."""
    assert two_ranks.run(_filled) == [[], []]


def _in_flight() -> list[Any]:
    pipeline = made(fills_with_copies(ours.TrainPipelineSparseDist))
    data = batches(6)
    found: list[Any] = []
    for _ in range(2):
        pipeline.progress(data)
        found.append(len(pipeline.batches) - pipeline.pipe.in_flight)
    pipeline.drain()
    found.append(len(pipeline.batches))
    pipeline.progress(data)
    pipeline._model.module.top.register_forward_pre_hook(_fail)
    found.append(refusal(partial(pipeline.progress, data)))
    return [*found, len(pipeline.batches)]


def _fail(*_: Any) -> None:
    raise ValueError("planted")


def test_batches_in_flight_are_those_of_the_pipeline(one_rank: Ranks) -> None:
    """This holds after a step, a drain and a failure."""
    assert one_rank.run(_in_flight) == [[0, 0, 0, "ValueError: planted", 0]]


def _epochs() -> list[int]:
    pipeline, data = made(stops_together(ours.TrainPipelineSparseDist)), Restarting()
    return [len(to_the_end(pipeline, data)) for _ in range(3)]


def test_an_override_of_the_pull_gives_every_epoch(one_rank: Ranks) -> None:
    """The same iterator is pulled again after its end, though the override saw it exhausted."""
    assert one_rank.run(_epochs) == [[2, 2, 2]]


def filters_first(base: Any) -> Any:
    """Return a subclass that ends by StopIteration, as ``next`` without a default does."""

    class Ended(base):
        def _next_batch(self, dataloader_iter: Any) -> Any:
            return next(dataloader_iter)

    return Ended


def _ended() -> int:
    return len(trained(filters_first(ours.TrainPipelineSparseDist), 3).outputs)


def test_an_override_of_the_pull_may_raise_stop_iteration(one_rank: Ranks) -> None:
    """It ends the data; the batches in flight are trained on."""
    assert one_rank.run(_ended) == [3]


# ------------------------------------------------------------------------------ what is refused


def test_what_is_never_called_is_refused_with_the_task_that_does_it() -> None:
    """It may be in the class or a mixin; a method of the user's own is none of TorchRec's."""
    kind = ours.TrainPipelineFusedSparseDist
    for name, task in NO_HOOKS.items():
        if hasattr(theirs(FUSED), name):
            said = refusal(lambda name=name: type("Mine", (kind,), {name: print}))
            assert said.startswith(f"TypeError: Mine overrides {name} of TorchRec's {FUSED}, ")
            assert f"such as {name} to '{task}'" in said
    said = refusal(lambda: type("Mine", (kind,), {"_create_context": print}))
    assert "Mine overrides _create_context" in said
    mixin = type("Mixin", (), {"_wait_for_batch": print})
    assert "Mine overrides _wait" in refusal(lambda: type("Mine", (mixin, kind), {}))
    assert refusal(lambda: type("Mine", (kind,), {"own": print})) == "nothing raised"


def test_every_method_of_torchrecs_that_does_a_tasks_work_is_known() -> None:
    """The tables name methods that some class of TorchRec's has."""
    kinds = [theirs(name) for name in ("TrainPipelineSemiSync", "PrefetchTrainPipelineSparseDist")]
    kinds += [theirs(BASE), theirs(FUSED)]
    for name in {*HOOKS, *NO_HOOKS}:
        assert any(hasattr(kind, name) for kind in kinds), name


def _misused() -> list[str]:
    pipeline = made(ours.TrainPipelineSparseDist)
    stash = {"start_batch": 0, "stash_gradients": True}
    return [
        refusal(lambda: pipeline.enqueue_batch(batches(1))),
        refusal(lambda: setattr(pipeline, "_backward", print)),
        refusal(lambda: made(clips(ours.TrainPipelineSemiSync), **stash)),
        refusal(lambda: pipeline.batches),
    ]


def test_a_hook_that_would_be_ignored_is_refused(one_rank: Ranks) -> None:
    """It is called from elsewhere, set in one pipeline, or next to what it would undo."""
    (said,) = one_rank.run(_misused)
    assert said[0].startswith("RuntimeError: enqueue_batch() was called outside of the task")
    assert said[1].startswith("TypeError: TrainPipelineSparseDist._backward was to be replaced")
    assert said[2].startswith("NotImplementedError: Clipped overrides _optimizer_step, and stash")
    assert said[3].startswith("AttributeError: TrainPipelineSparseDist has no 'batches'")


def _unknown() -> str:
    tasks = partial(
        ours.SparseDistTasks,
        nn.Linear(1, 1),
        ours.TrainStep(torch.optim.SGD([torch.zeros(1)], lr=0.1)),
        device=CPU,
    )
    return refusal(lambda: tasks(ours.TaskOptions(forward="own", functions={"copies": print})))


def test_a_function_for_nothing_is_refused() -> None:
    """``TaskOptions.functions`` names what the tasks call."""
    said = _unknown()
    assert said.startswith("ValueError: TaskOptions.functions has copies, which no task calls")
    assert "copy, start_input_dist" in said


# ---------------------------------------------------------------------- a prefetch on a thread


def _prefetched_apart() -> list[str]:
    """Return the differences from TorchRec's base with caches filled on a separate thread."""
    plan = plans.prefetch()
    apart = replace(plan.schedule[plans.PREFETCH], thread_group="prefetch")
    plan = replace(plan, schedule={**plan.schedule, plans.PREFETCH: apart})
    model = sharded(Job())
    step = ours.TrainStep([dense_optimizer(Job(), model)])
    tasks = ours.SparseDistTasks(model, step, ours.TaskOptions(forward="prefetch"), device=CPU)
    with ours.SparseDistPipeline(tasks, plan) as pipeline:
        outputs = to_the_end(pipeline, batches(6))
    return Outcome(outputs, everything(model)).differences(trained(theirs(BASE), 6))


def test_caches_may_be_filled_on_a_background_thread(two_ranks: Ranks) -> None:
    """``thread_group`` of the task is all that is needed."""
    assert two_ranks.run(_prefetched_apart) == [[], []]


# ------------------------------------------------------------------------------ pipeline_forward


def _split_forward(name: str, modules: int) -> list[str]:
    job = Job(modules=modules)
    wanted = trained(theirs(BASE), 6, job)
    kind = getattr(ours, name)
    return trained(partial(kind, pipeline_forward=True), 6, job).differences(wanted)


@pytest.mark.parametrize("name", [BASE, SPARSE, FUSED, "PrefetchTrainPipelineSparseDist"])
def test_look_ups_before_the_forward_have_the_same_numbers(two_ranks: Ranks, name: str) -> None:
    """This holds for one sharded module, and for several."""
    for modules in (1, 2, 4):
        assert two_ranks.run(_split_forward, name, modules) == [[], []]


def _order(pipeline_forward: bool, modules: int = 2) -> list[str]:
    """Return the look-ups and dense parts of the third batch, in order."""
    job = Job(modules=modules)
    pipeline = made(ours.TrainPipelineBase, job, pipeline_forward=pipeline_forward)
    found: list[str] = []
    inner = pipeline._model.module
    inner.bottom.register_forward_hook(lambda *_: found.append("dense"))
    for k, table in enumerate(inner.tables):
        own = table.compute_and_output_dist

        def noted(*given: Any, k: int = k, own: Any = own, **more: Any) -> Any:
            found.append(f"look-up {k}")
            return own(*given, **more)

        table.compute_and_output_dist = noted
    data = batches(3)
    for _ in range(3):
        found.clear()
        pipeline.progress(data)
    return found


def test_all_modules_are_looked_up_before_the_forward(two_ranks: Ranks, one_rank: Ranks) -> None:
    """Therefore the exchanges of several overlap; on one rank there is none."""
    late = ["dense", "look-up 0", "look-up 1"]
    assert two_ranks.run(_order, True) == [["look-up 0", "look-up 1", "dense"]] * 2
    assert two_ranks.run(_order, False) == [late] * 2
    assert one_rank.run(_order, True) == [late]


def test_one_module_keeps_its_place_in_the_forward(two_ranks: Ranks) -> None:
    """No other exchange can overlap with its own, and a split would cost a second backward."""
    assert two_ranks.run(_order, True, 1) == [["dense", "look-up 0"]] * 2
