"""From what the user said to a job and a plan."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from swpipe.cli.user_errors import UserError, about_plan
from swpipe.core.plan import PipelinePlan
from swpipe.plans import sharded_clicks
from swpipe.plans.clicks import PLANS

if TYPE_CHECKING:
    from swpipe.tasks.clicks import ClickConfig
    from swpipe.tasks.clicks.feed import AnyClickJob

Plans: TypeAlias = Mapping[str, Callable[[], PipelinePlan]]


def make_config(
    data: list[Path] | None,
    held_out: list[Path] | None,
    batch_size: int,
    device: str,
    seed: int,
    strict: bool,
    cache_dir: Path,
) -> ClickConfig:
    """The job; with a made-up log where no data is named."""
    _check_device(device)
    # Two threads, one core each: more within an operation would make them fight, and a sum that is
    # split among more threads rounds otherwise.
    torch.set_num_threads(1)
    try:
        from swpipe.tasks.clicks import ClickConfig
        from swpipe.tasks.clicks.generate import click_logs
    except ModuleNotFoundError as error:
        raise UserError(
            f"the click job needs {error.name}: install swpipe[clicks] and TorchRec, see README.md"
        ) from error
    if data is None:
        from tqdm import tqdm

        # The bar appears only if there is something to wait for.
        with tqdm(desc="making up a click log", unit=" rows", delay=0.3) as bar:
            logs = click_logs(cache_dir, seed=seed, progress=bar.update)
        data, held_out = [logs.train], held_out or [logs.held_out]
    return ClickConfig(
        data=tuple(data),
        held_out=tuple(held_out or ()),
        batch_size=batch_size,
        device=device,
        seed=seed,
        strict=strict,
    )


def job_class(ranked: bool) -> type[AnyClickJob[Any]]:
    """The click job of one process, or of all ranks.

    Raises:
        UserError: TorchRec is of a version that the sharded step was not written for.
    """
    if ranked:
        try:
            from swpipe.tasks.clicks.sharded import ShardedClickJob
        except ImportError as error:
            raise UserError(str(error)) from error
        return ShardedClickJob
    from swpipe.tasks.clicks import ClickJob

    return ClickJob


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from error


def load_plan(name: str, plans: Plans = PLANS) -> PipelinePlan:
    """A ready-made plan by its name, or one from a file."""
    if name in plans:
        return plans[name]()
    _check_job(name, plans)
    try:
        with about_plan(name):
            return PipelinePlan.load(name)
    except OSError as error:
        raise UserError(
            f"plan {name}: {error.strerror}; name a file, or one of {', '.join(plans)}"
        ) from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"plan {name}: {error}") from error


def _check_job(name: str, plans: Plans) -> None:
    """Refuse a name that only the other click job's plans have."""
    jobs = {"in one process": PLANS, "under torchrun": sharded_clicks.PLANS}
    if name == "auto":
        raise UserError(
            "plan auto: only train makes one; elsewhere name a file that `swpipe plan auto` has "
            f"written; here there are {', '.join(plans)}"
        )
    other = next((where for where, there in jobs.items() if name in there), None)
    if other is not None and plans in jobs.values():
        raise UserError(
            f"plan {name}: it is for the job {other}; here there are {', '.join(plans)}"
        )
