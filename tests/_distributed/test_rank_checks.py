"""Ranks with different plans refuse to start; errors of ranks whose store is gone."""

from __future__ import annotations

import datetime as dt
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import swpipe.pipeline
from swpipe import PipelinePlan, PipelineTask, SWPipeline
from tests.support.plans_for_tests import NOBODY_ELSE, piped, tasks
from tests.support.ranks import Ranks
from tests.support.scripts import Script, Scripts, as_torchrun


def _depths(depths: tuple[int, int]) -> str:
    """Return the number of iterations that ran, or the error message."""
    with SWPipeline(piped(depths[dist.get_rank()]), tasks()) as pipe:
        try:
            return str(pipe.run(range(4)).iterations)
        except RuntimeError as error:
            return str(error)


def test_ranks_with_different_plans_refuse_to_start(two_ranks: Ranks) -> None:
    """Both ranks say which ranks have which plan; with equal plans they run."""
    assert two_ranks.run(_depths, (3, 3)) == ["4", "4"]
    for refused in two_ranks.run(_depths, (3, 4)):
        assert "the ranks hold different plans" in refused
        assert f"forever: digest: {piped(3).digest()[:12]} on rank 0, " in refused
        assert "; pipeline_depth: 3 on rank 0, 4 on rank 1. Give every rank" in refused


def _seeds(seeds: tuple[int, int], random: bool) -> list[str]:
    """Return the warnings on this rank."""
    draw = PipelineTask("draw", lambda ctx: None, io=[NOBODY_ELSE], random=random)
    with (
        warnings.catch_warnings(record=True) as caught,
        SWPipeline(PipelinePlan.serial([draw]), [draw], seed=seeds[dist.get_rank()]) as pipe,
    ):
        warnings.simplefilter("always")
        pipe.run(range(2))
        pipe.run(range(2))
    ours = Path(swpipe.__file__).parent
    assert all(Path(warning.filename).is_relative_to(ours) for warning in caught)
    return [str(warning.message) for warning in caught]


def test_ranks_with_different_seeds_are_warned(two_ranks: Ranks) -> None:
    """Each rank warns once if there are random tasks."""
    for told in two_ranks.run(_seeds, (5, 6), True):
        assert len(told) == 1
        assert "seed: 5 on rank 0, 6 on rank 1. Give every rank the same" in told[0]
    assert two_ranks.run(_seeds, (5, 5), True) == [[], []]
    assert two_ranks.run(_seeds, (5, 6), False) == [[], []]


def outlives() -> None:
    """End rank 0, which has the store, between two steps; print when and how rank 1 fails."""
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=40))
    meet = PipelineTask("meet", lambda ctx: dist.all_reduce(torch.ones(1)))
    with SWPipeline(PipelinePlan.serial([meet]), [meet]) as pipe:
        batches = iter(range(3))
        pipe.progress(batches)
        if dist.get_rank() == 0:
            os._exit(0)
        begun_s = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            pipe.progress(batches)
        print(time.monotonic() - begun_s, *caught.value.__notes__, sep="\n")


def test_a_failure_is_told_at_once_where_the_store_is_gone_with_its_rank(scripts: Scripts) -> None:
    """It is reported before the time-out of a connection to the store."""
    code = "from tests._distributed.test_rank_checks import outlives; outlives()"
    ranks = [Script(code, environment=one, is_torn_down=False) for one in as_torchrun(2)]
    _, told = scripts.run_together(ranks)
    took_s, *notes = told.stdout.splitlines()
    assert float(took_s) < 30.0
    assert any("it is not known whether another rank had failed before" in note for note in notes)
