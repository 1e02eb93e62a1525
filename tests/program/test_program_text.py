"""A program prints as text, a line per lane."""

from __future__ import annotations

import pytest
import torch

from swpipe import PipelinePlan, SWPipeline, TaskSchedule
from swpipe.core.resolved import resolve_plan
from swpipe.plans import prefetch_plan
from swpipe.plans.torchrec import sparse_dist
from swpipe.program import compile_plan
from swpipe.program.program_text import format_program
from tests.support.plans_for_tests import piped, tasks

PREFETCH = """
depth 3, ring 3, launch limit 1
order: read, copy, forward, step, <admit>, <retire>
default: wait(io.copy, lag 1) -> event(copy) -> forward@2 -> step@2 -> <admit>@0 publish -> \
<retire>@2
io: wait(default.<admit>, lag 1) -> read@1 record -> event(read) -> copy@1 [memcpy] record \
publish
"""
THREE_STAGES = """
depth 3, ring 4, launch limit 1
order: dist, <admit>, h2d, forward, backward, step, <retire>
default: <admit>@0 record publish -> event(dist) -> forward@2 -> wait(io.dist) -> backward@2 \
publish -> step@2 -> <retire>@2
io: wait(default.backward, lag 1) -> event(h2d) -> dist@1 [dist] record publish -> \
wait(default.<admit>) -> event(<admit>) -> h2d@0 [memcpy] record
"""
THREE_STAGES_ON_CPU = """
depth 3, ring 4
order: <admit>, dist, h2d, forward, backward, step, <retire>
default: <admit>@0 publish -> forward@2 -> wait(io.dist) -> backward@2 publish -> step@2 -> \
<retire>@2
io: wait(default.backward, lag 1) -> dist@1 publish -> wait(default.<admit>) -> h2d@0
"""
SPARSE_DIST = """
depth 3, ring 4, launch limit 1
order: EmbInputDistStart, <admit>, H2DAndShuffle, EmbPrefetch, EmbForward, DenseForward, \
EmbInputDistWait, LossPostprocess, DenseBackward, EmbBackward, FinalizeGrads, OptimStep, <retire>
default: event(H2DAndShuffle) -> EmbInputDistStart@1 [data_dist] -> <admit>@0 record -> \
event(<admit>) -> H2DAndShuffle@0 [memcpy] record -> event(EmbInputDistWait) -> EmbPrefetch@2 -> \
EmbForward@2 -> DenseForward@2 -> EmbInputDistWait@1 [data_dist] record -> LossPostprocess@2 -> \
DenseBackward@2 -> EmbBackward@2 -> FinalizeGrads@2 -> OptimStep@2 -> <retire>@2
"""

FEED, COMPUTE = ["read", "copy"], ["forward", "step"]
GOLDEN = {
    "prefetch": (
        prefetch_plan(FEED, COMPUTE, streams={"copy": "memcpy"}, pull_group=None),
        True,
        PREFETCH,
    ),
    "design": (piped(), True, THREE_STAGES),
    "design on a CPU": (piped(), False, THREE_STAGES_ON_CPU),
    "sparse dist": (sparse_dist.sparse_dist(), True, SPARSE_DIST),
}


def text_of(plan: PipelinePlan, *, streams: bool) -> str:
    """Return the program of a plan as text."""
    return format_program(compile_plan(resolve_plan(plan), streams=streams))


@pytest.mark.parametrize("name", GOLDEN)
def test_a_program_prints_as_expected(name: str) -> None:
    """The plans are known to the reader."""
    plan, streams, expected = GOLDEN[name]
    assert text_of(plan, streams=streams) == expected.strip()


def test_names_other_than_words_are_quoted() -> None:
    """A stream object has its number."""
    schedule = {"a b": TaskSchedule(stream=torch.Stream(device="cpu"), thread_group="x: y")}
    text = text_of(PipelinePlan(schedule), streams=True)
    assert '"a b"@0 ["torch.Stream(' in text
    assert '\n"x: y": ' in text


def test_a_pipeline_prints_its_program() -> None:
    """It is that of its own device, or of another kind."""
    with SWPipeline(piped(), tasks(), device="cpu") as pipe:
        assert pipe.format_program() == THREE_STAGES_ON_CPU.strip()
        assert pipe.format_program(streams=True) == THREE_STAGES.strip()
