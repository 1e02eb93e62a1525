"""TorchRec's pipelines by name, those of recsys-examples, and HSTU, on a model without tables."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from swpipe.tasks import torchrec
from swpipe.tasks.torchrec import hstu, recsys_examples
from tests.contract.training import Training
from tests.contract.ways import Piped, Way


class Named(Piped):
    """``progress`` of a named pipeline, whose ``custom_model_fwd`` also decodes."""

    made: ClassVar[Any]
    options: ClassVar[dict[str, Any]] = {}
    fails = ("decode", "step")  # both come after all earlier iterations
    replays = False

    def __init__(self, training: Training) -> None:
        Way.__init__(self, training)
        pipeline = self.made(
            training.model, _Steps(training), torch.device("cpu"),
            custom_model_fwd=self._forward, **self.options,
        )  # fmt: skip
        self.pipe = _Dropping(pipeline)
        self._left, self._done = None, 0

    def _forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.pipe.rows.append(rows)
        loss = self.training.forward(self.training.decode(rows))
        return loss.unsqueeze(0), loss.detach()

    def _loss(self, out: Any) -> Tensor:
        loss: Tensor = out[-1] if isinstance(out, tuple) else out
        return loss


class _Steps:
    """An optimizer that steps the training, including its scheduler and planted failures."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._inner = training.optimizer
        self.rows: list[Tensor] = []

    def step(self) -> None:
        self._training.step(self.rows[-1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Dropping:
    """A pipeline whose ``drop`` is TorchRec's ``reset``."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.drop = pipeline.reset
        self.rows = pipeline._optimizer_given.rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


_NAMES = (
    *("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite"),
    *("TrainPipelineSparseDistT", "PrefetchTrainPipelineSparseDist", "TrainPipelineSemiSync"),
    *("TrainPipelineFusedSparseDist", "TrainEvalHybridPipelineBase"),
)
_REPORT = {"returns": "reporting_loss"}
_MADE: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (getattr(torchrec, name), {}) for name in _NAMES},
    **{
        name: (made, _REPORT)
        for name, made in recsys_examples.TrainPipelineFactory.list_available().items()
        if "semi_sync" not in name  # its reads are stale
    },
    "HSTU": (hstu.HSTUPipeline, _REPORT),
    "HSTUByStream": (
        hstu.HSTUPipeline,
        {**_REPORT, "prefetch": True, "prefetch_depth": 2, "thread_map": "by_stream"},
    ),
}
NAMED = tuple(
    type(name, (Named,), {"made": staticmethod(made), "options": options})
    for name, (made, options) in _MADE.items()
)
