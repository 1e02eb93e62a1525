"""Findings about a loop, from its profile and serial iterations, without a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskProfiler
from swpipe.reporting import Finding
from swpipe.reporting.examination import examine
from swpipe.tuning.autotuning import Loop

_SEEN = 20  # batches of a loader

_PROFILE_S = 0.3
"""The limit in seconds for a profile; without it, visits grow on a busy machine."""


def examined(
    tasks: Sequence[PipelineTask],
    loader: Iterable[Any],
    *,
    plan: PipelinePlan | None = None,
    device: Any = None,
) -> tuple[Finding, ...]:
    """Return the findings about these tasks over batches, or over those of a loader."""
    called = None if isinstance(loader, Sequence) else loader
    batches = loader if isinstance(loader, Sequence) else [*islice(loader, _SEEN)]
    loop = Loop(tasks, batches, device, loader=called)
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device=device, check_effects=False) as pipe:
        profiler = TaskProfiler(pipe, loader=called)
        profile = profiler.profile_loop(loop.batches, 1, num_rounds=2, seconds=_PROFILE_S)
    return examine(loop, plan, profile)


def rules(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Return rule and place of each finding."""
    return [(finding.rule, finding.place) for finding in findings]
