"""HSTU's pipeline and its factory have the numbers of a synchronous loop, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from swpipe.errors import PlanError
from swpipe.tasks.torchrec import PipelineFactory
from swpipe.tasks.torchrec.hstu import (
    HSTU_DEFAULT_THREAD_MAP,
    HSTUPipeline,
    HSTUPipelineFactory,
)
from swpipe.tasks.torchrec.recsys_examples.jagged import JaggedPipeline
from tests.support.ranks import Ranks
from tests.tasks.torchrec.hstu.training import GATED, Case, batches, by_hand, by_pipeline, made
from tests.tasks.torchrec.models import CPU
from tests.tasks.torchrec.trial import to_the_end

NAMES = ["hstu_prefetch_sparse_dist", "hstu_sparse_dist"]


def _pipeline(**options: Any) -> HSTUPipeline[Any, Any]:
    model, optimizer = made("plain")
    return HSTUPipeline(model, optimizer, CPU, **options)


def test_progress_returns_loss_tokens_and_output() -> None:
    """The sum of the losses, the number of events, and what the model returns."""
    (batch,) = batches(1)
    with _pipeline() as pipe:
        loss, tokens, (logits, labels) = pipe.progress(iter([batch]))
        with pytest.raises(StopIteration):
            pipe.progress(iter([]))
    events = len(batch.times.values())
    assert float(tokens) == events
    assert loss.ndim == 0
    assert logits.shape == labels.shape == (events, 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_factory_makes_a_pipeline_by_name(name: str) -> None:
    """A pipeline has a prefetch or none; its registry is not the eleven tasks' pipelines'."""
    assert HSTUPipelineFactory.list() == NAMES
    assert not {*NAMES} & {*PipelineFactory.list()}
    model, optimizer = made("plain")
    with HSTUPipelineFactory.create(
        name, model=model, optimizer=optimizer, device=CPU, thread_map="by_stream"
    ) as pipe:
        assert isinstance(pipe, JaggedPipeline)
        assert len(pipe.schedule.all_tasks()) == (15 if "prefetch" in name else 14)
        assert len(to_the_end(pipe, batches(3))) == 3


def test_after_shutdown_nothing_runs() -> None:
    """A second call does nothing. Before it, a watchdog is called for each batch."""
    called: list[int] = []
    pipe = _pipeline(watchdog=lambda: called.append(1), thread_map=HSTU_DEFAULT_THREAD_MAP)
    to_the_end(pipe, batches(3))
    assert called == [1] * 3
    pipe.shutdown()
    pipe.shutdown()
    with pytest.raises(RuntimeError, match="clos"):
        pipe.progress(batches(2))


def test_what_is_wrong_is_refused_when_the_pipeline_is_made() -> None:
    """Examples are a depth, a shuffler, a task's name, and an unknown option."""
    with pytest.raises(ValueError, match="prefetch_depth is 0"):
        _pipeline(prefetch_depth=0)
    with pytest.raises(TypeError, match="batch_shuffler is a int"):
        _pipeline(batch_shuffler=3)
    with pytest.raises(PlanError, match="thread_map names task 'prefetch'"):
        _pipeline(thread_map={"prefetch": "io"})
    with pytest.raises(TypeError, match="lookahead"):
        _pipeline(lookahead=3)


# ------------------------------------------------------------------------------- the numbers

CASES = (
    Case("default", True, 3, True),
    Case("by_stream", True, 2),
    Case("io_prefetch_compute", True, 1, True),
    Case("io_data_dist_compute", False, 1),
    Case("io_data_dist_prefetch_compute", True, 1, wrapper="megatron"),
    Case("by_stream", False, 2, True, wrapper="plain"),
    Case(None, True, 1, True, config=json.dumps(GATED)),
)
"""Each preset; a model without sharded modules, within DDP; and six batches in flight."""


def _differences(cases: tuple[Case, ...], steps: int) -> dict[Case, list[str]]:
    """Return the differences of each case from the synchronous loop, if any."""
    wanted: dict[Any, Any] = {}
    found = {}
    for case in cases:
        loop = (case.balanced, case.wrapper)
        if loop not in wanted:
            wanted[loop] = by_hand(steps, *loop)
        if where := by_pipeline(case, steps).differences(wanted[loop]):
            found[case] = where
    return found


def test_each_preset_trains_the_loops_numbers(two_ranks: Ranks) -> None:
    """(loss, tokens, output) and parameters are equal, with delays of any task on any rank.

    Other combinations of options are proved by the tasks' declarations: test_hstu_schedule.
    """
    assert two_ranks.run(_differences, CASES, 6, deadline_s=200) == [{}, {}]


def _one_rank_exchanges_late() -> list[str]:
    """Return the differences with a thread per task, and a late exchange of ids on rank 0."""
    rank = dist.get_rank()
    outcome = by_pipeline(
        Case("per_task"), 6, lambda name: 0.1 * (name == "start_input_dist" and rank == 0)
    )
    return outcome.differences(by_hand(6))


def test_a_forwards_exchange_keeps_its_place_among_the_collectives(two_ranks: Ranks) -> None:
    """Each task may have a thread, and on one rank another exchange could come after it."""
    assert two_ranks.run(_one_rank_exchanges_late) == [[], []]


def test_no_process_group_is_needed_for_a_plain_model() -> None:
    """The model trains in this process."""
    assert _differences((Case(wrapper="plain"),), 6) == {}
