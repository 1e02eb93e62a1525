"""Print the table of costs; exit with 1 where a bar is missed.

With the names of sections, measure only those: ``python -m bench sparse_dist memory``.
``--save`` appends the table to ``bench.jsonl``; ``--since REVISION`` measures swpipe as it was then
and as it is, in turn, and shows what has moved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import torch

from bench import saved
from bench.measure import Row, report, sharpen_timers

PARTS = (
    "dispatch",
    "importing",
    "v_schedule",
    "interval",
    "gains",
    "loader",
    "turns",
    "ahead",
    "workers",
    "behind",
    "first_batch",
    "profiler",
    "exposed",
    "verdicts",
    "promises",
    "schedules",
    "serial",
    "memory",
    "extras",
    "sparse_dist",
    "torchrec_classes",
    "torchrec_links",
    "pec",
    "pipeline_parallel",
    "predicted_schedules",
    "sharded_stages",
    "many_ranks",
    "layer_overlap",
    "paired_passes",
    "device",
    "offload",
    "accelerator",
)
"""The parts in the order of measurement. Each is imported when it runs, for older versions."""


def main(arguments: Sequence[str] = ()) -> int:
    """Measure the named sections, or all; return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Costs of swpipe.")
    parser.add_argument("names", nargs="*", metavar="section", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--save", action="store_true", help=f"append the table to {saved.FILE}")
    parser.add_argument("--since", metavar="REVISION", help="compare with swpipe as it was then")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each of these two")
    options = parser.parse_args(arguments)
    names: list[str] = options.names
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no section is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.since is not None:
        return report(saved.since(options.since, names, options.rounds))
    torch.set_num_threads(1)
    sharpen_timers()
    rows: list[Row] = []
    for part in (import_module(f"bench.{name}") for name in names or PARTS):
        print(f"measuring: {(part.__doc__ or '').splitlines()[0]}", file=sys.stderr, flush=True)
        rows += part.rows()
    if options.save:
        saved.save(rows)
    return report(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
