"""Print the table of costs; exit with 1 where a bar is missed."""

from __future__ import annotations

import sys

import torch

from tests.bench import dispatch, extras, interval, memory, predict, serial, streams
from tests.bench.measure import Row, sharpen_timers, table


def main() -> int:
    torch.set_num_threads(1)
    sharpen_timers()
    rows: list[Row] = []
    for part in (dispatch, interval, predict, serial, memory, streams, extras):
        print(f"measuring: {(part.__doc__ or '').splitlines()[0]}", file=sys.stderr, flush=True)
        rows += part.rows()
    print(table(rows))
    missed = [row.what for row in rows if row.missed]
    if missed:
        print(f"\n{len(missed)} missed: {'; '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
