"""A DLRM on two ranks beside TorchRec's train pipelines, on links of several latencies.

All contenders train the same model on the same batches with one torch thread per rank, and take
turns within each round. At the end, all exact ones must have the same parameters, bit for bit. The
emulated link does not delay DDP's all-reduces, which C++ issues, for any contender.

The best of swpipe's exact plans is compared with the best of TorchRec's pipelines and with the
lower bound (``tests.bench.sparse_bound``); the stale plan, with the best exact one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING

from tests.bench.measure import Row, compared
from tests.bench.sparse_bound import bounds

if TYPE_CHECKING:
    from tests.bench.contest import Contest
    from tests.bench.dlrm import Size

LATENCIES = (0.0, 2.0, 5.0, 20.0)
"""Milliseconds."""

PLAIN_BAR, LINK_BAR, BOUND_BAR, STALE_BAR = 1.02, 1.0, 1.1, 0.8
STALE_FROM = 20.0
"""The stale plan has a bar from this latency on."""


def rows(rounds: int = 9, steps: int = 10, size: Size | None = None) -> list[Row]:
    """The contenders' times, then their ratios."""
    if find_spec("torchrec") is None:
        return [Row("DLRM on two ranks", "skipped: there is no torchrec")]
    from tests.bench.contest import contest, on_ranks
    from tests.bench.dlrm import Size

    found: list[Contest] = on_ranks(contest, LATENCIES, rounds, steps, size or Size())
    if any(of_rank.differ for of_rank in found):
        raise ValueError(f"not the numbers of TorchRec's base pipeline: {found[0].differ}")
    return [*figures(found[0]), *verdicts(found[0])]


def figures(found: Contest) -> Iterator[Row]:
    """A row per contender: ms per step on each link."""
    issued = ", ".join(f"{count:g} {name}" for name, count in found.per_step.items())
    yield Row("DLRM on two ranks: collectives per step on the link", issued)
    links = ", ".join(f"{latency:g}" for latency in found.ms)
    for name in next(iter(found.ms.values())):
        each = ", ".join(f"{median(by_name[name]):.1f}" for by_name in found.ms.values())
        yield Row(f"{name}: at L = {links} ms", f"{each} ms")


def verdicts(found: Contest) -> Iterator[Row]:
    """For each link: ours over TorchRec's, over the bound; the stale plan over ours."""
    from tests.bench.contenders import CONTENDERS

    kinds = {contender.name: contender.kind for contender in CONTENDERS}
    for latency, by_name in found.ms.items():
        ours = _best(by_name, [name for name in by_name if kinds[name] == "exact"])
        theirs = _best(by_name, [name for name in by_name if kinds[name] == "torchrec"])
        yield _row(
            f"L = {latency:g} ms: {ours} over {theirs}",
            by_name[ours],
            by_name[theirs],
            LINK_BAR if latency else PLAIN_BAR,
        )
        yield _over_bound(found, latency, ours, 0)
        for stale in (name for name in by_name if kinds[name] == "stale"):
            yield _row(
                f"L = {latency:g} ms: {stale} over {ours}",
                by_name[stale],
                by_name[ours],
                STALE_BAR if latency >= STALE_FROM else None,
            )
            yield _over_bound(found, latency, stale, 1)


def _over_bound(found: Contest, latency: float, name: str, staleness: int) -> Row:
    """Compare with the bound, which is measured in each round."""
    each = [bounds(parts, latency, staleness) for parts in found.parts[latency]]
    least_ms = [bound.ii_us / 1e3 for bound in each]
    by_cycle = sum(bound.rec_mii_us > bound.res_mii_us for bound in each) > len(each) / 2
    return _row(
        f"L = {latency:g} ms: {name} over its bound, {'a cycle' if by_cycle else 'the work'}",
        found.ms[latency][name],
        least_ms,
        None if staleness else BOUND_BAR,
    )


def _row(what: str, ours: Sequence[float], theirs: Sequence[float], bar: float | None) -> Row:
    return compared(what, ours, theirs, "ms", "", bar, digits=1)


def _best(by_name: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    return min(names, key=lambda name: median(by_name[name]))
