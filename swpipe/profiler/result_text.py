"""The results of a profile as text: what disturbed it, a summary, a table, and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from swpipe.core.messages import listed
from swpipe.core.tables import table
from swpipe.profiler.figures import Figures
from swpipe.profiler.rank_times import rank_lines
from swpipe.profiler.spread import ms

_READ = (
    "exposed: how much shorter a mean iteration is if the task costs nothing; ±: 95 of 100\n"
    "such intervals contain the true value; < x: not told apart from 0; own: what the task takes\n"
    "of that itself; in others: what these take less without it, as a backward does if its\n"
    "forward is replayed; no work: it takes no time, and iterations are no shorter without it"
)
_NO_ADVICE = (
    "no change is known that promises more than the measurement's error; more seconds, and an idle "
    "machine, make that smaller"
)
_SLOW = 0.05
_MOST_PUT_BACK = 12


def one(result: Figures) -> str:
    """A table with one row per task."""
    times = {"host ms": result.host_s, "blocked ms": result.blocked_s}
    if result.device_s:
        times["device ms"] = result.device_s
    times["replay ms"] = result.replay_s
    rows = []
    for name in result.host_s:
        less_s = {} if name in result.no_work else result.in_others_s.get(name, {})
        others = ", ".join(f"{other} {ms(s)}" for other, s in less_s.items())
        exposed, spread, share, own = _exposed(result, name)
        cells = (ms(of[name]) if name in of else "" for of in times.values())
        rows.append((name, exposed, spread, share, own, *cells, others))
    titles = ("task", "exposed ms", "± ms", "% of baseline", "own ms", *times, "in others ms")
    return _with_notes([result], table(titles, rows))


def several(results: Sequence[Figures]) -> str:
    """A table with one row per task, and columns per batch."""
    if not results:
        return "no batches were profiled"
    if len(results) == 1:
        return one(results[0])
    titles = ["task"]
    for result in results:
        titles += [f"{result.batch}\nexposed ms", "\n± ms", "\nown ms"]
    rows = []
    for name in dict.fromkeys(name for result in results for name in result.host_s):
        cells = (_exposed(result, name) for result in results)
        rows.append([name, *(c for value, spread, _, own in cells for c in (value, spread, own))])
    return _with_notes(results, table(titles, rows))


def _with_notes(results: Sequence[Figures], rows: str) -> str:
    loads = [r.other_load for r in results if r.other_load is not None and r.other_load.is_busy]
    busy = [max(loads, key=lambda load: load.used).text] if loads else []
    on = [f" on {result.batch}" if len(results) > 1 else "" for result in results]
    notes = (
        note for result, batch in zip(results, on, strict=True) for note in _notes(result, batch)
    )
    back = (f"put back: {put_back(result.put_back)}" for result in results)
    said = dict.fromkeys([*notes, *back])
    return "\n".join([*busy, *map(_summary, results), rows, *said, _READ])


def _summary(result: Figures) -> str:
    slow = 1 - result.baseline_median_s / result.baseline_s if result.baseline_s else 0.0
    tail = f", so slow ones take {100 * slow:.0f}%" if slow >= _SLOW else ""
    return (
        f"{result.batch}, {result.mode}: {ms(result.baseline_s)} ± "
        f"{ms(result.baseline_spread_s)} ms per iteration, median "
        f"{ms(result.baseline_median_s)}{tail} "
        f"({result.num_rounds} rounds, {result.num_measure} iterations per visit)"
    )


# --------------------------------------------------------------------------------------- cells


def _exposed(result: Figures, name: str) -> tuple[str, str, str, str]:
    """Exposed time, its spread, its share, and the task's own; "<": not told apart from 0."""
    exposed = result.exposed(name)
    if exposed is None:
        return "not measured" if name in result.host_s else "", "", "", ""
    if name in result.no_work:
        return "no work", "", "", ""
    value_s, spread_s = exposed
    below = 0 < spread_s >= abs(value_s)
    shown_s = max(0.0, value_s) + spread_s if below else value_s
    shown_s = min(shown_s, result.baseline_s)  # an iteration cannot get shorter by more
    share = shown_s / result.baseline_s if result.baseline_s else 0.0
    sign, own = ("< ", "") if below else ("", ms(result.own_s[name]))
    return f"{sign}{ms(shown_s)}", ms(spread_s), f"{sign}{100 * share:.1f}", own


# --------------------------------------------------------------------------------------- notes


def _notes(result: Figures, on_batch: str) -> Iterator[str]:
    if result.busy_s:
        yield f"limits iterations{on_batch}: {_limits(result)}"
    blocking = [f"{name} ({ms(result.blocked_s[name])} ms)" for name in result.blocking]
    yield f"blocks the host{on_batch}: {', '.join(blocking) or 'no task'}"
    for name, why in result.not_measured.items():
        yield f"not measured{on_batch}: {name}, since iterations with its shortcut fail: {why}"
    for number, advice in enumerate(result.advice, 1):
        yield f"do next{on_batch}, {number}: {advice.text}"
    if not result.advice:
        yield f"do next{on_batch}: {_NO_ADVICE}"
    if result.ranks:
        yield from rank_lines(result.ranks, result.rank_waits)
    if result.interrupted:
        yield f"interrupted{on_batch}: not all rounds were measured"
    if result.already_shortcut:
        yield f"shortcut already, so not measured: {', '.join(result.already_shortcut)}"


def _limits(result: Figures) -> str:
    step = f"nearly all of {ms(result.baseline_s)} ms"
    busy = [f"{group} ({ms(result.busy_s[group])} ms)" for group in result.limiting]
    if len(busy) > 1:
        return f"several thread groups are busy {step}, so all have to do less: {listed(busy)}"
    if busy:
        return f"one thread group is busy {step}: {busy[0]}"
    longest = max(result.busy_s, key=lambda group: result.busy_s[group])
    return (
        f"no thread group is busy {step}, {longest} the longest with "
        f"{ms(result.busy_s[longest])} ms: iterations wait for dependences, a device or others"
    )


def put_back(found: Collection[str]) -> str:
    """The objects whose state was restored, in words; those of one name once, with their number."""
    counts = Counter(found)
    told = [name if number == 1 else f"{number} x {name}" for name, number in counts.items()]
    return listed(told, _MOST_PUT_BACK) if told else "generators only; no other state was shown"
