"""The click job (``swpipe.tasks.clicks``) as a workload of the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swpipe.core.progress import progress_bar
from swpipe.plans import clicks
from swpipe.plans.torchrec import sharded_clicks
from swpipe.tasks.workload import SEED, InputError, Job, Option, Workload, register


def cache_home() -> Path:
    """Where programs keep what they can make again; source: XDG Base Directory Specification."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


OPTIONS = (
    Option(
        "data",
        list,
        None,
        "Click logs in the Criteo TSV format; none: a log generated from a known model.",
    ),
    Option("held_out", list, None, "Click logs to evaluate on."),
    Option("batch_size", int, 2048, "Rows per step.", minimum=1),
    SEED,
    Option("strict", bool, False, "The first malformed row is an error."),
    Option("cache_dir", Path, cache_home() / "swpipe", "Where a generated log is kept."),
)


def configure(options: Mapping[str, Any]) -> Any:
    """The job's configuration; with a generated log where no data is named."""
    # Two threads, one core each: more within an operation would compete for the cores, and a sum
    # that is split among more threads rounds otherwise.
    torch.set_num_threads(1)
    try:
        import swpipe.tasks.clicks.job  # noqa: F401 - with all that it needs
        from swpipe.tasks.clicks import ClickConfig
        from swpipe.tasks.clicks.generate import click_logs
    except ModuleNotFoundError as error:
        raise InputError(
            f"the click job needs {error.name}: pip install 'swpipe[clicks]' torchrec, or on a CPU "
            "'swpipe[clicks]', and then --no-deps torchrec fbgemm-gpu-cpu. With torch alone there "
            "are --workload images, and swpipe demo"
        ) from error
    data, held_out = options["data"], options["held_out"]
    if data is None:
        # The bar appears only if there is something to wait for.
        with progress_bar("generating a click log", " rows", delay=0.3) as bar:
            cache = options["cache_dir"]
            try:
                logs = click_logs(cache, seed=options["seed"], progress=bar.update)
            except OSError as error:
                raise InputError(f"--cache-dir {cache}: {error.strerror or error}") from error
        data, held_out = [logs.train], held_out or [logs.held_out]
    return ClickConfig(
        data=tuple(data),
        held_out=tuple(held_out or ()),
        batch_size=options["batch_size"],
        device=options["device"] or "cpu",
        seed=options["seed"],
        strict=options["strict"],
    )


def open_job(config: Any) -> Job:
    """The job in one process."""
    from swpipe.tasks.clicks import ClickJob

    return ClickJob(config)


def open_sharded_job(config: Any) -> Job:
    """The job on all ranks of the process group.

    Raises:
        InputError: The sharded step was not written for this version of TorchRec.
    """
    try:
        from swpipe.tasks.clicks.sharded import ShardedClickJob
    except ImportError as error:
        raise InputError(str(error)) from error
    return ShardedClickJob(config)


_ONE = Workload(
    name="clicks",
    plans=clicks.PLANS,
    usual_plan="pipelined",
    configure=configure,
    open_job=open_job,
    options=OPTIONS,
)
_SHARDED = replace(
    _ONE, plans=sharded_clicks.PLANS, usual_plan="sparse_dist", open_job=open_sharded_job
)
register(replace(_ONE, on_ranks=_SHARDED))
