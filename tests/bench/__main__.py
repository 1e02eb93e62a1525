"""Print the table of costs; exit with 1 where a bar is missed.

With the names of sections, measure only those: ``python -m tests.bench sparse_dist soak``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from tests.bench import (
    accelerator,
    data_bound,
    dispatch,
    exposed,
    extras,
    first_batch,
    interval,
    loader,
    make,
    memory,
    predict,
    predict_ranks,
    profiler,
    purity,
    serial,
    soak,
    sparse_dist,
    streams,
    v_schedule,
)
from tests.bench.measure import Row, report, sharpen_timers

PARTS = {
    part.__name__.rpartition(".")[2]: part
    for part in (
        dispatch,
        make,
        v_schedule,
        interval,
        data_bound,
        loader,
        first_batch,
        predict,
        profiler,
        exposed,
        purity,
        serial,
        memory,
        streams,
        extras,
        sparse_dist,
        predict_ranks,
        soak,
        accelerator,
    )
}
"""By name, in the order of measurement."""


def main(names: Sequence[str] = ()) -> int:
    """Measure the named sections, or all; return 2 if a name is unknown."""
    if unknown := [name for name in names if name not in PARTS]:
        print(f"no section is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
        return 2
    torch.set_num_threads(1)
    sharpen_timers()
    rows: list[Row] = []
    for part in (PARTS[name] for name in names or PARTS):
        print(f"measuring: {(part.__doc__ or '').splitlines()[0]}", file=sys.stderr, flush=True)
        rows += part.rows()
    return report(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
