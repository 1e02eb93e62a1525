"""Two models on two ranks, compared with TorchRec's train pipelines on links of several latencies.

All contenders train the same model on the same batches with one torch thread per rank, and
alternate within each round. At the end, all exact ones must have the same parameters, bit for bit.
The emulated link delays DDP's all-reduces, too: TorchRec's contenders get a communication hook for
that, except on the plain link.

The best of swpipe's exact plans is compared with the best of TorchRec's exact pipelines and with
the lower bound (``bench.sparse_bound``). The stale plan is compared with the best exact one,
TorchRec's stale pipeline and its own bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING

from bench.measure import Row, compared
from bench.sparse_bound import bounds

if TYPE_CHECKING:
    from bench.contest import Contest
    from bench.dlrm import Size

LATENCIES = (0.0, 2.0, 5.0, 20.0)
"""Latencies of the link in ms."""

THEIRS_BAR, BOUND_BAR, STALE_BOUND_BAR, STALE_BAR = 1.0, 1.1, 1.2, 0.8
STALE_FROM = 20.0
"""The latency from which the stale plan has a bar compared with the best exact plan."""


def rows(rounds: int = 9, steps: int = 10, size: Size | None = None) -> list[Row]:
    """Return, for each model, the contenders' times and then their ratios."""
    if find_spec("torchrec") is None:
        return [Row("DLRM on two ranks", "skipped: there is no torchrec")]
    from bench.contest import MODELS, contest, on_ranks
    from bench.dlrm import Size

    table = []
    for model in MODELS:
        found: list[Contest] = on_ranks(contest, model, LATENCIES, rounds, steps, size or Size())
        if any(of_rank.differ for of_rank in found):
            raise ValueError(f"{model}: not the numbers of TorchRec's base: {found[0].differ}")
        table += [*figures(model, found[0]), *verdicts(model, found[0])]
    return table


def figures(model: str, found: Contest) -> Iterator[Row]:
    """Yield a row per contender: ms per step on each link."""
    issued = ", ".join(f"{count:g} {name}" for name, count in found.per_step.items())
    yield Row(f"{model} on two ranks: collectives per step on the link", issued)
    links = ", ".join(f"{latency:g}" for latency in found.ms)
    for name in next(iter(found.ms.values())):
        each = ", ".join(f"{median(by_name[name]):.1f}" for by_name in found.ms.values())
        yield Row(f"{model}, {name}: at L = {links} ms", f"{each} ms")


def verdicts(model: str, found: Contest) -> Iterator[Row]:
    """Return, for each link, ours over TorchRec's best and over the bound, exact and stale."""
    for latency, by_name in found.ms.items():
        where = f"{model}, L = {latency:g} ms"
        ours, theirs = _best(by_name, ours=True), _best(by_name, ours=False)
        yield _row(f"{where}: {ours} over {theirs}", by_name[ours], by_name[theirs], THEIRS_BAR)
        yield _over_bound(where, found, latency, ours, 0)
        stale, beside = (_best(by_name, ours=whose, stale=True) for whose in (True, False))
        yield _row(f"{where}: {stale} over {beside}", by_name[stale], by_name[beside], THEIRS_BAR)
        yield _row(
            f"{where}: {stale} over {ours}",
            by_name[stale],
            by_name[ours],
            STALE_BAR if latency >= STALE_FROM else None,
        )
        yield _over_bound(where, found, latency, stale, 1)


def _over_bound(where: str, found: Contest, latency: float, name: str, staleness: int) -> Row:
    """Compare with the bound, which is measured in each round."""
    each = [bounds(parts, latency, staleness) for parts in found.parts[latency]]
    least_ms = [bound.ii_us / 1e3 for bound in each]
    by_cycle = sum(bound.rec_mii_us > bound.res_mii_us for bound in each) > len(each) / 2
    return _row(
        f"{where}: {name} over its bound, {'a cycle' if by_cycle else 'the work'}",
        found.ms[latency][name],
        least_ms,
        STALE_BOUND_BAR if staleness else BOUND_BAR,
    )


def _row(what: str, ours: Sequence[float], theirs: Sequence[float], bar: float | None) -> Row:
    return compared(what, ours, theirs, "ms", "", bar, digits=1)


def _best(by_name: Mapping[str, Sequence[float]], *, ours: bool, stale: bool = False) -> str:
    from bench.contenders import CONTENDERS

    names = [c.name for c in CONTENDERS if c.name in by_name and (c.ours, c.stale) == (ours, stale)]
    return min(names, key=lambda name: median(by_name[name]))
