"""The exposed time of the tasks of a pipeline that stands for TorchRec's or recsys-examples'."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from swpipe.profiler.profiler import TaskProfiler
from swpipe.profiler.result import ProfileResults


def pipeline_breakdown(pipeline: Any, batches: Iterable[Any], **options: Any) -> ProfileResults:
    """Profile a pipeline's tasks on several batches, and print the report on rank 0.

    As the function of that name in recsys-examples.

    Args:
        pipeline: One with a ``drop_in``, or with a ``pipe``; no batch may be in flight. On several
            ranks, call it on all.
        batches: On the host, as the data loader gives them; at least one.
        options: Of ``TaskProfiler.profile_many``.

    Returns:
        One result for each batch.
    """
    results = TaskProfiler(getattr(pipeline, "drop_in", pipeline).pipe).profile_many(
        batches, **options
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        results.print_report()
    return results
