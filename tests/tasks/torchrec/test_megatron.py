"""Megatron's wrappers: the model inside is found, its gradient buffer is zeroed and reduced.

Its DDP with a Float16Module inside was refused as untraceable; with ``find="direct"`` it trained on
the sum of all gradients since the beginning.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from swpipe.tasks.torchrec import PipelineFactory, TrainStep
from swpipe.tasks.torchrec.wrappers import unwrapped
from tests.support.pairs import pairwise_cases
from tests.support.ranks import Ranks
from tests.tasks.torchrec.megatron import DistributedDataParallel, Float16Module, Optimizer
from tests.tasks.torchrec.models import CPU, Job, batches, dense_optimizer, everything, sharded
from tests.tasks.torchrec.trial import EXACT, Outcome, to_the_end


def _megatron(nested: bool = True) -> tuple[Any, Any]:
    """A sharded model within Megatron's wrappers, and the optimizer of its dense part."""
    model = sharded(Job(), ddp=False)
    parameters = dense_optimizer(Job(), model).param_groups[0]["params"]
    inner = model._dmp_wrapped_module
    wrapped = DistributedDataParallel(Float16Module(inner) if nested else inner, parameters)
    model._dmp_wrapped_module = wrapped
    return model, Optimizer(parameters, 0.1)


def _finalize(model: Any) -> None:
    """As ``finalize_model_grads``."""
    model._dmp_wrapped_module.finish_grad_sync()


def _by_hand(steps: int, accumulate: int) -> Outcome:
    model, optimizer = _megatron()
    wrapper = model._dmp_wrapped_module
    outputs = []
    for k, batch in enumerate(batches(steps)):
        last = (k + 1) % accumulate == 0 or k + 1 == steps
        if k % accumulate == 0:
            wrapper.zero_grad_buffer()
            optimizer.zero_grad()
        loss, logits = model(batch)
        if last:
            loss.backward()
            wrapper.finish_grad_sync()
            optimizer.step()
        else:
            with wrapper.no_sync():
                loss.backward()
        outputs.append(logits)
    return Outcome(outputs, everything(model))


def _differences(
    accumulate: int, cases: list[tuple[str, bool, str]]
) -> dict[tuple[str, bool, str], list[str]]:
    steps = 3 * accumulate
    wanted = _by_hand(steps, accumulate)
    found = {}
    for name, finalize, find in cases:
        model, optimizer = _megatron()
        step = TrainStep(
            [optimizer], accumulate=accumulate, finalize=_finalize if finalize else None
        )
        with PipelineFactory.create(
            name, model=model, step=step, device=CPU, find=find
        ) as pipeline:
            outcome = Outcome(to_the_end(pipeline, batches(steps)), everything(model))
        if where := outcome.differences(wanted):
            found[name, finalize, find] = where
    return found


CASES = pairwise_cases(EXACT, (True, False), ("trace", "direct"), (1, 3))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_plan_trains_as_a_loop_over_megatrons_wrappers(
    two_ranks: Ranks, accumulate: int
) -> None:
    """Zeroed before each step, reduced after it, bit for bit."""
    cases = [case[:3] for case in CASES if case[3] == accumulate]
    assert two_ranks.run(_differences, accumulate, cases) == [{}, {}]


def test_one_rank_too(one_rank: Ranks) -> None:
    """Nothing to reduce, and all the same to zero."""
    assert one_rank.run(_differences, 1, [(name, False, "trace") for name in EXACT]) == [{}]


def _shortcut() -> bool:
    """Whether a replayed backward leaves the buffer as the backward left it."""
    model, optimizer = _megatron()
    step = TrainStep([optimizer])
    with PipelineFactory.create("jagged_sw_serial", model=model, step=step, device=CPU) as pipeline:
        buffer = model._dmp_wrapped_module._buffer
        (one, other) = islice(batches(2), 2)
        pipeline.pipe.enable_shortcut("DenseBackward")
        pipeline.pipe.run_one_serial_iter(one)
        cached = buffer.clone()
        buffer.fill_(7.0)
        pipeline.pipe.disable_shortcut("FinalizeGrads")
        model._dmp_wrapped_module._ready = True
        pipeline.pipe.run_one_serial_iter(other)
        return bool(cached.any()) and torch.equal(buffer, cached)


def test_a_shortcut_of_the_backward_puts_the_buffer_back(one_rank: Ranks) -> None:
    """``parameter.grad`` is None with Megatron: that alone would be nothing."""
    assert one_rank.run(_shortcut) == [True]


def _refused(options: dict[str, Any]) -> str:
    model, optimizer = _megatron()
    step = TrainStep([optimizer], **options)
    try:
        PipelineFactory.create("jagged_sw_serial", model=model, step=step, device=CPU)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_what_needs_a_parameters_own_gradient_is_refused(one_rank: Ranks) -> None:
    """A norm over ``parameter.grad`` would clip nothing."""
    scaler = torch.amp.GradScaler("cpu")
    for options in ({"clip": 1.0}, {"scaler": scaler}):
        assert "parameter.main_grad" in one_rank.run(_refused, options)[0]


def test_wrappers_are_taken_off_in_any_nesting() -> None:
    """And a model that merely has a module of that name is not one."""
    inner = nn.Sequential(nn.Linear(1, 1))
    inner.module = nn.Linear(1, 1)
    for wrapped in (
        Float16Module(inner),
        DistributedDataParallel(inner, []),
        Float16Module(DistributedDataParallel(Float16Module(inner), [])),
    ):
        assert unwrapped(wrapped) is inner
    assert unwrapped(inner) is inner
