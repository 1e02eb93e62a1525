"""TorchRec's ``TrainPipelinePEC``: PEC where it is faster, the split plan elsewhere.

    batch     0 ... TRIAL - 1      TRIAL ... 2 * TRIAL - 1      2 * TRIAL ...
    plan      split                pec                          the faster one

Both plans give the same numbers as a serial run, so both can be tried during training.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from swpipe.core.messages import in_ms
from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec.pec_plan import pec
from swpipe.tasks.torchrec.pipelines.drop_in import split
from swpipe.tasks.torchrec.pipelines.named import In, Out, TrainPipelineSparseDist
from swpipe.tasks.torchrec.rewriting.pec import Sizes, pec_tasks
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks

Phase: TypeAlias = Literal["split", "pec"]

FILL = 8
DRAIN = 6
"""The steps at the beginning (FILL) and end (DRAIN) of a trial that are not measured."""

LEAST_GAIN = 0.03
"""The share of the split plan's step that PEC must save to be chosen; less may be chance."""


@dataclass(frozen=True, slots=True)
class PecReport:
    """The measured step times of the two plans, and the plan that was chosen.

    Attributes:
        chosen: The plan; None while both are being tried.
        ms: Plan to the time of its step on the slowest rank, as far as it has been measured.
        sizes: The bytes that PEC exchanges late and early.
    """

    chosen: Phase | None
    ms: Mapping[str, float]
    sizes: Sizes

    def __str__(self) -> str:
        times = ", ".join(f"{name} {in_ms(1e3 * ms)}" for name, ms in self.ms.items())
        state = f"the plan is {self.chosen}" if self.chosen else "the plans are being tried"
        return f"{state}; a step takes: {times or 'not measured yet'}; {self.sizes}"


class TrainPipelinePEC(TrainPipelineSparseDist[In, Out]):
    """Counterpart of TorchRec's class, for any model; PEC applies to ``PECEmbeddingCollection``.

    ``exchange_report`` says which plan is used, and why. While batches are in flight under PEC,
    some row updates are pending. Call ``drain`` before the model is detached or run by another
    pipeline.
    """

    _plan_for = staticmethod(split)
    _kind = "split"
    _kind_alone = "ahead"
    _zero_grad = None

    trial_batches = 24
    """The number of batches in each trial, more than FILL + DRAIN; 0 for PEC without a trial."""

    def _take(self) -> None:
        # The split plan is tried first: its step is the measure, and it works for any model.
        self._phase: Phase = "split" if self.trial_batches else "pec"
        self._changes_at = self.trial_batches or None
        self._stamps: list[float] = []
        self._ms: dict[str, float] = {}
        self._sizes = Sizes()

    @property
    def exchange_report(self) -> PecReport:
        """The bytes exchanged late and early, the two plans' step times, and the plan in use."""
        chosen = None if self._changes_at else self._phase
        return PecReport(chosen, dict(self._ms), copy.deepcopy(self._sizes))

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Run one step as ``PassPipeline.progress`` does, and measure it while plans are tried."""
        output: Out = super().progress(dataloader_iter)
        # Only steps of training are compared; evaluation has no gradients to exchange.
        if self._changes_at is not None and self.tasks.trains():
            self._stamps.append(time.perf_counter())
        return output

    def _change_plan(self) -> None:
        """Go on to the next trial, or choose a plan."""
        steps = [1e3 * (end - begin) for begin, end in pairwise(self._stamps)]
        # A filling or draining pipeline has shorter or longer steps than the steady state.
        steps = steps[FILL:-DRAIN]
        self._stamps = []
        self._changes_at = self._done + self.trial_batches
        # No step was measured if the batches were evaluated, or a state from beyond the trial was
        # loaded: the same plan is tried again.
        if steps:
            self._ms[self._phase] = _slowest(median(steps), self._device)
            if self._phase == "split" and self._collections(self.tasks):
                self._phase = "pec"
            else:
                gain = 1 - self._ms.get("pec", inf) / self._ms["split"]
                self._phase = "pec" if gain > LEAST_GAIN else "split"
                self._changes_at = None
        self._restart(self._start)

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        tasks.rewrite.look_ups = {}
        modules = self._collections(tasks) if self._phase == "pec" else {}
        if not modules:
            return super()._plan(tasks)
        return replace(pec(), tasks=pec_tasks(tasks, modules, self._sizes))

    def _collections(self, tasks: SparseDistTasks) -> dict[str, Any]:
        """Return the collections that can be exchanged in two parts; empty on a single rank."""
        if tasks.options.forward != "split" or tasks.options.memory:
            return {}
        modules = tasks.rewrite.sharded.items()
        # Only PEC's collections, which TorchRec has since 1.8, compare two successive batches.
        return {name: module for name, module in modules if hasattr(module, "overlap_dist")}


def _slowest(ms: float, device: Any) -> float:
    """Return the largest time of all ranks, so that they choose the same plan; a collective."""
    times = torch.tensor([ms], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.item()
