"""A training by a pipeline class, ours or TorchRec's, and common parts of its tests."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch

from swpipe.tasks import torchrec as ours
from swpipe.tasks.torchrec.pipelines.refused_arguments import signature_of
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)
from tests.tasks.torchrec.trial import Outcome, to_the_end

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed.train_pipeline import train_pipelines

    experimental_pipelines = pytest.importorskip(
        "torchrec.distributed.train_pipeline.experimental_pipelines",
        reason="the classes are compared with those of TorchRec 1.8",
    )
    MODULES = [train_pipelines, experimental_pipelines]
    if find_spec("torchrec.distributed.train_pipeline.pec_train_pipeline"):  # since TorchRec 1.9
        from torchrec.distributed.train_pipeline import pec_train_pipeline

        MODULES.append(pec_train_pipeline)

PIPELINES = tuple(
    name
    for name in ours.__all__
    if re.match("Train(Pipeline|Eval)|Eval|Prefetch", name)
    and any(hasattr(module, name) for module in MODULES)
)
"""The pipelines that the installed TorchRec has."""


def theirs(name: str) -> Any:
    """Return TorchRec's class of that name."""
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


def arguments(kind: Any) -> dict[str, Any]:
    """Return the names of a constructor's parameters in order, with their defaults."""
    parameters = signature_of(kind).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def made(kind: Any, job: Job | None = None, **options: Any) -> Any:
    """Return a pipeline on a newly sharded model."""
    job = job or Job()
    model = sharded(job)
    return kind(model, dense_optimizer(job, model), CPU, **options)


def trained(
    kind: Any,
    loop: Callable[[Any], list[Any]] | int,
    job: Job | None = None,
    **options: Any,
) -> Outcome:
    """Train a pipeline on a number of batches, or by a loop of its own."""
    pipeline = made(kind, job, **options)
    run = loop if callable(loop) else lambda one: to_the_end(one, batches(loop))
    outputs = run(pipeline)
    return Outcome(outputs, everything(pipeline._model))


def several(*counts: int) -> Iterator[Iterator[Batch]]:
    """Yield iterators over different batches, with these lengths."""
    for seed, count in enumerate(counts):
        yield batches(count, seed=seed)


def _record_nothing(tensor: torch.Tensor, stream: object) -> None:
    """Do nothing: a CPU has no streams."""


@contextmanager
def streams_on_a_cpu() -> Iterator[None]:
    """Let TorchRec's pipelines that use streams and events run on a CPU."""
    cpu = mock.Mock(wraps=torch.cpu)
    cpu.Event = mock.Mock
    cpu.synchronize = lambda: None
    cpu.current_stream = lambda: mock.Mock()
    with (
        mock.patch.object(torch, "get_device_module", return_value=cpu),
        mock.patch.object(torch.Tensor, "record_stream", _record_nothing),
    ):
        yield
