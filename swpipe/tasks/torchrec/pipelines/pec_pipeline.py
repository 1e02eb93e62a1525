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
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from swpipe.core.messages import in_ms
from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec.pec_plan import pec
from swpipe.tasks.torchrec.pipelines.drop_in import split
from swpipe.tasks.torchrec.pipelines.named import Form, In, Out, TrainPipelineSparseDist
from swpipe.tasks.torchrec.private_parts import PEC_PARTS, find
from swpipe.tasks.torchrec.rewriting.pec import PecTasks, Sizes
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

    form = Form(plan=split, kind="split", alone="ahead", zero_grad=None)

    trial_batches = 24
    """The number of batches in each trial; 0 for PEC without a trial."""

    def _take(self, given: Mapping[str, Any]) -> None:
        # The split plan is tried first: its step is the measure, and it works for any model.
        self._phase: Phase = "split" if self.trial_batches else "pec"
        self._changes_at = self.trial_batches or None
        self._stamps: list[float] = []
        self._ms: dict[str, float] = {}
        self._pec: PecTasks | None = None
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

    def close(self) -> None:
        """Drop the batches in flight and restore the model and its modules."""
        super().close()
        if self._pec is not None:
            self._pec.close()
            self._pec = None

    def _change_plan(self) -> None:
        """Go on to the next trial, or choose a plan."""
        steps = [1e3 * (end - begin) for begin, end in pairwise(self._stamps)]
        # A filling or draining pipeline has shorter or longer steps than the steady state.
        steps = steps[FILL:-DRAIN]
        self._stamps = []
        if steps:  # empty if the batches were evaluated
            self._ms[self._phase] = _slowest(median(steps), self._given["device"])
        self._changes_at = None
        if self._phase == "split" and self._collections(self.tasks):
            self._phase = "pec"
            self._changes_at = self._done + self.trial_batches
        # PEC was tried, or the model has no collection for it. Without both measurements (all
        # batches were evaluated), the split plan is used.
        else:
            both = len(self._ms) == 2
            gain = 1 - self._ms["pec"] / self._ms["split"] if both else 0.0
            self._phase = "pec" if gain > LEAST_GAIN else "split"
        self._restart(self._start)

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        modules = self._collections(tasks) if self._phase == "pec" else {}
        if not modules:
            return super()._plan(tasks)
        self._pec = PecTasks(tasks, modules, self._sizes)
        return replace(pec(), tasks=self._pec.tasks())

    def _collections(self, tasks: SparseDistTasks) -> dict[str, Any]:
        """Return the collections that can be exchanged in two parts; empty on a single rank."""
        kind = find(PEC_PARTS[0])  # None in a TorchRec before 1.8
        if tasks.options.forward != "split" or tasks.options.memory or kind is None:
            return {}
        modules = tasks.rewrite.sharded.items()
        return {name: module for name, module in modules if isinstance(module, kind)}


def _slowest(ms: float, device: Any) -> float:
    """Return the largest time of all ranks, so that they choose the same plan; a collective."""
    times = torch.tensor([ms], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.item()
