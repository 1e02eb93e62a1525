"""Every plan and TorchRec's best exact class: DLRM on two ranks, links of 0, 5 and 20 ms.

    python -m bench torchrec_links      about 13 minutes on an idle machine with two cores

Two gloo ranks with one torch thread each train the DLRM of ``bench.dlrm`` with batches of 16 and
256 rows per rank. All contenders take turns within each round (``bench.contest``), and all exact
ones must end with the same parameters, bit for bit. Each row is a plan of swpipe over the class of
TorchRec's that is best on that link; the best exact plan has a bar. A row of the lower bound, which
no exact plan can be below (``bench.sparse_bound``), says how far a plan could get. "Uncut" plans
run one backward for the dense part and the tables, which the host does sooner, and which overlaps
less. "pipeline_forward" is ``TrainPipelineBase`` with that option, and is also compared with
TorchRec's own base pipeline, which has no more batches in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING

from bench.measure import Row, compared
from bench.sparse_bound import bounds

if TYPE_CHECKING:
    from bench.contest import Contest

BARS: Mapping[float, float] = {0.0: 1.0, 5.0: 0.95, 20.0: 0.9}
"""The bars of the best exact plan by the link's latency in ms."""

BATCHES = (16, 256)
BASE, FORWARD = "TorchRec base", "pipeline_forward"
FORWARD_BAR = 1.0
"""The option must not be slower than TorchRec's class without it."""


def rows(rounds: int = 9, steps: int = 6) -> list[Row]:
    """Return a row per plan, for each batch size and link."""
    if find_spec("torchrec") is None:
        return [Row("TorchRec's classes over links", "skipped: there is no torchrec")]
    from bench.contest import contest, on_ranks
    from bench.dlrm import Size

    table: list[Row] = []
    for model in ("DLRM", "towers"):
        for batch in BATCHES:
            size = replace(Size(), batch=batch)
            measured: Contest = on_ranks(contest, model, [*BARS], rounds, steps, size)[0]
            if measured.differ:
                raise ValueError(f"batch {batch}: not the numbers of TorchRec's: {measured.differ}")
            table += _rows(f"{model}, batch {batch}", measured)
    return table


def _rows(what: str, measured: Contest) -> Iterator[Row]:
    from bench.contenders import CONTENDERS

    exact = [c for c in CONTENDERS if not c.stale]
    stale = [c.name for c in CONTENDERS if c.ours and c.stale]
    for latency, by_name in measured.ms.items():
        medians = {name: median(ms) for name, ms in by_name.items()}
        theirs = min((c.name for c in exact if not c.ours), key=medians.__getitem__)
        ours = sorted((c.name for c in exact if c.ours), key=medians.__getitem__)
        where = f"{what}, L = {latency:g} ms"
        for name in (*ours, *stale):
            bar = BARS[latency] if name == ours[0] else None
            yield _row(f"{where}: {name} over {theirs}", by_name, name, theirs, bar)
        bound_ms = [bounds(parts, latency).ii_us / 1e3 for parts in measured.parts[latency]]
        least = f"{where}: the bound over {theirs}"
        yield compared(least, bound_ms, by_name[theirs], "ms", theirs)
        yield _row(f"{where}: {FORWARD} over {BASE}", by_name, FORWARD, BASE, FORWARD_BAR)


def _row(
    what: str, by_name: Mapping[str, list[float]], ours: str, theirs: str, bar: float | None
) -> Row:
    return compared(what, by_name[ours], by_name[theirs], "ms", theirs, bar, digits=2)
