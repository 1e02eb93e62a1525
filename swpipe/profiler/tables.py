"""Results as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swpipe.profiler.result import ProfileResult

SUM = "SUM"


def format_one(result: ProfileResult) -> str:
    """A head line, one row per task and a sum, and what else there is to say."""
    headers = ("task", *_EXPOSED, "host ms", "blocked ms")
    rows = [
        (
            name,
            *_exposed_cells(result, [name]),
            _ms(result.host_s[name]),
            _ms(result.blocked_s[name]),
        )
        for name in result.tasks
    ]
    rows.append(
        (
            SUM,
            *_exposed_cells(result, result.tasks),
            _ms(sum(result.host_s.values())),
            _ms(sum(result.blocked_s.values())),
        )
    )
    return "\n".join([_head(result), _table(headers, rows), *_notes(result)])


def format_side_by_side(results: Sequence[ProfileResult]) -> str:
    """One row per task, one group of columns per batch; the batches' head lines above."""
    if not results:
        return "no batches were profiled"
    tasks = list(dict.fromkeys(name for result in results for name in result.tasks))
    headers = ["task"]
    for result in results:
        headers += [f"{result.batch}\n{_EXPOSED[0]}", *(f"\n{title}" for title in _EXPOSED[1:])]
    rows = [
        [
            name,
            *_flat(_exposed_cells(r, [name]) if name in r.exposed_s else _NOTHING for r in results),
        ]
        for name in tasks
    ]
    rows.append([SUM, *_flat(_exposed_cells(result, result.tasks) for result in results)])
    heads = [_head(result) for result in results]
    notes = dict.fromkeys(line for result in results for line in _notes(result, of_batch=True))
    return "\n".join([*heads, _table(headers, rows), *notes])


_EXPOSED = ("exposed ms", "spread ms", "% of baseline")
_NOTHING = ("", "", "")


def _exposed_cells(result: ProfileResult, names: Sequence[str]) -> tuple[str, str, str]:
    """The cells below ``_EXPOSED`` for one task, or for the sum of several.

    Errors share the baseline's, so those of a sum may add up in full.
    """
    exposed_s = sum(result.exposed_s[name] for name in names)
    spread_s = sum(result.spread_s[name] for name in names)
    share = exposed_s / result.baseline_s if result.baseline_s else 0.0
    return _ms(exposed_s), _ms(spread_s), f"{100 * share:.1f}"


def _head(result: ProfileResult) -> str:
    return (
        f"{result.batch}, {result.mode}: {_ms(result.baseline_s)} ± "
        f"{_ms(result.baseline_spread_s)} ms per iteration "
        f"({result.num_rounds} rounds of {result.num_measure})"
    )


def _notes(result: ProfileResult, *, of_batch: bool = False) -> Iterable[str]:
    of = f" on {result.batch}" if of_batch else ""
    blocking = [f"{name} ({_ms(result.blocked_s[name])} ms)" for name in result.blocking]
    yield f"blocks the host{of}: {', '.join(blocking) or 'no task'}"
    if result.already_shortcut:
        yield f"shortcut already, so not measured: {', '.join(result.already_shortcut)}"
    yield f"put back: {', '.join(result.put_back) or 'generators only; no other state was found'}"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    from tabulate import tabulate

    return tabulate(
        list(rows),
        headers=list(headers),
        disable_numparse=True,
        colalign=("left", *("right",) * (len(headers) - 1)),
    )


def _flat(groups: Iterable[Iterable[str]]) -> list[str]:
    return [cell for group in groups for cell in group]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
