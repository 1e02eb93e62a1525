"""TorchRec's ``TrainPipelinePEC``: PEC where it pays, the split plan elsewhere.

    batch     0 ... TRIAL - 1      TRIAL ... 2 * TRIAL - 1      2 * TRIAL ...
    plan      split                pec                          the faster one

Both plans have the numbers of a serial run, so both are tried in training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from swpipe.core.messages import in_ms
from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec.pec_plan import pec
from swpipe.tasks.torchrec.pipelines.drop_in import Pass, split
from swpipe.tasks.torchrec.pipelines.named import Form, In, Out, TrainPipelineSparseDist
from swpipe.tasks.torchrec.rewriting.pec import PecTasks, Sizes
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks

Phase: TypeAlias = Literal["split", "pec"]

FILL = 8
DRAIN = 6
"""Steps at the beginning and at the end of a trial in which the pipeline fills and drains."""

LEAST_GAIN = 0.03
"""PEC is taken if it saves this share of the split plan's step: less may be chance."""


@dataclass(frozen=True, slots=True)
class PecReport:
    """What was measured of the two plans, and which was chosen.

    Attributes:
        chosen: The plan; None while both are tried.
        ms: Plan to the time of its step on the slowest rank, as far as it was measured.
        sizes: What PEC exchanges late and early.
    """

    chosen: Phase | None
    ms: Mapping[str, float]
    sizes: Sizes

    def __str__(self) -> str:
        times = ", ".join(f"{name} {in_ms(1e3 * ms)}" for name, ms in self.ms.items())
        state = f"the plan is {self.chosen}" if self.chosen else "the plans are being tried"
        return f"{state}; a step takes: {times or 'not measured yet'}; {self.sizes}"


class TrainPipelinePEC(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's, with any model; PEC is used for collections of ``PECEmbeddingCollection``.

    ``exchange_report`` says which plan is used, and why. While batches are in flight under PEC,
    updates of some rows are still to come: the model can be detached, or run by another pipeline,
    after ``drain``.
    """

    form = Form(plan=split, kind="split", alone="ahead", zero_grad=None)

    trial_batches = 24
    """How many batches are trained in each trial; 0 for PEC without a trial."""

    def _take(self, given: Mapping[str, Any]) -> None:
        self._phase: Phase = "split" if self.trial_batches else "pec"
        self._ends_at: int | None = self.trial_batches or None
        self._stamps: list[float] = []
        self._ms: dict[str, float] = {}
        self._pec: PecTasks | None = None
        self._sizes = Sizes()

    @property
    def exchange_report(self) -> PecReport:
        """What is exchanged late and early, the two plans' steps, and which plan is used."""
        sizes = [self._sizes] if self._pec is None else [self._sizes, self._pec.sizes]
        return PecReport(
            None if self._ends_at else self._phase, dict(self._ms), max(sizes, key=_steps)
        )

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """As for the other pipelines."""
        if self._ends_at is not None and self._done >= self._ends_at:
            self._end_trial(self._ends_at)
        output: Out = super().progress(dataloader_iter)
        if self._ends_at is not None and self.tasks.trains():
            self._stamps.append(time.perf_counter())
        return output

    def detach(self) -> nn.Module:
        """As for the other pipelines.

        Raises:
            RuntimeError: Updates of rows are still to come: call ``drain`` first.
        """
        if self._pec is not None and self.pipe.in_flight:
            raise RuntimeError(f"batches are in flight, and {_TO_COME}: call drain() first")
        return super().detach()

    def close(self) -> None:
        """As for the other pipelines."""
        super().close()
        if self._pec is not None:
            self._sizes = max(self._sizes, self._pec.sizes, key=_steps)
            self._pec.close()
            self._pec = None

    def _end_trial(self, done: int) -> None:
        """Go on to the next trial, or choose."""
        steps = [1e3 * (b - a) for a, b in zip(self._stamps, self._stamps[1:], strict=False)]
        steps = steps[FILL:-DRAIN]
        self._stamps = []
        if steps:  # else batches were evaluated
            self._ms[self._phase] = _slowest(median(steps), self._given["device"])
        if self._phase == "split" and self._collections(self.tasks):
            self._phase = "pec"
            self._ends_at = done + self.trial_batches
        else:
            both = len(self._ms) == 2
            gain = 1 - self._ms["pec"] / self._ms["split"] if both else 0.0
            self._phase = "pec" if gain > LEAST_GAIN else "split"
            self._ends_at = None
        self._restart(self._start)

    def _start(self) -> None:
        super()._start()
        if self._pec is not None:
            self.tasks.rewrite.refusal = lambda trains: _TO_COME if self.pipe.in_flight else ""

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        modules = self._collections(tasks) if self._phase == "pec" else {}
        if not modules:
            return super()._plan(tasks)
        self._pec = PecTasks(tasks, modules)
        return replace(pec(), tasks=self._pec.tasks())

    def _collections(self, tasks: SparseDistTasks) -> dict[str, Any]:
        """Return the collections that can be exchanged in two parts; none on one rank."""
        installed = find_spec("torchrec.distributed.pec_embedding") is not None  # from 1.8 on
        if tasks.options.forward != "split" or tasks.options.memory or not installed:
            return {}
        from torchrec.distributed.pec_embedding import ShardedPECEmbeddingCollection

        return {
            name: module
            for name, module in tasks.rewrite.sharded.items()
            if isinstance(module, ShardedPECEmbeddingCollection)
        }

    def _new_pass(self, source: Iterator[Any], limit: int | None = None) -> Pass:
        return super()._new_pass(source, self._ends_at and self._ends_at - self._done)

    @property
    def _done(self) -> int:
        """How many batches were returned, or dropped by a failure."""
        done: int = self.pipe.state_dict(check=False)["next_iteration"]
        return done


_TO_COME = "updates of rows that the batch after has not are still to come"


def _steps(sizes: Sizes) -> int:
    return sizes.steps


def _slowest(ms: float, device: Any) -> float:
    """Return the greatest of all ranks' times, on which they agree."""
    times = torch.tensor([ms], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.item()
