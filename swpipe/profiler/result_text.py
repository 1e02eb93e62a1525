"""The results of a profile as text: disturbances, a summary, a table, and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from swpipe.core.messages import listed
from swpipe.core.tables import table, wrapped
from swpipe.profiler.figures import Figures
from swpipe.profiler.rank_times import rank_lines, rank_waits
from swpipe.profiler.spread import ms, short_ms

LEGEND = (
    "exposed: how much shorter a mean iteration is if the task costs nothing, with a\n"
    "95% interval; < x: not told apart from 0; own: what the task takes of that\n"
    "itself"
)
"""The explanation of a table's columns."""

_NO_ADVICE = (
    "no change is known that promises more than the measurement's error; measure longer, or on an "
    "idle machine, to reduce the error"
)
_SLOW = 0.05
_ABREAST = 2  # the most batches side by side
_MOST_PUT_BACK = 12


def one(result: Figures) -> str:
    """Return a summary, a table with one row per task, and notes."""
    times = ["exposed", "own", "host", "blocked"]
    # The device's column is left out where it would be empty.
    times += ["device"] if result.on_streams else []
    rows = []
    for name, task in result.measured.items():
        cells = [task.thread.host_s, task.thread.blocked_s]
        cells += [task.device_s or 0.0] if result.on_streams else []
        rows.append((name, *_exposed(result, name), *map(short_ms, cells)))
    titles = [f"{title}\nms" for title in times]
    # The share of the step has no unit of time, so it is not one of the titles above.
    titles.insert(1, "\n%")
    head = [*_busy([result]), wrapped(_summary(result))]
    return "\n".join([*head, table(["task", *titles], rows), *_notes(result)])


def several(results: Sequence[Figures]) -> str:
    """Return one result in full, or several side by side."""
    if not results:
        return "no batches were profiled"
    if len(results) == 1:
        return one(results[0])
    return "\n".join([*_busy(results), side_by_side(results)])


def side_by_side(results: Sequence[Figures]) -> str:
    """Return a line for each batch, and columns per batch, without notes."""
    names = list(dict.fromkeys(name for result in results for name in result.measured))
    tables = []
    # A table has the columns of ``_ABREAST`` batches at most, to fit into a terminal.
    for first in range(0, len(results), _ABREAST):
        some = results[first : first + _ABREAST]
        titles = ["task"]
        for result in some:
            titles += [f"{result.batch}\nexposed ms", "\nown ms"]
        rows = []
        for name in names:
            cells = (_exposed(result, name) for result in some)
            rows.append([name, *(cell for exposed, _, own in cells for cell in (exposed, own))])
        tables.append(table(titles, rows))
    return "\n".join([*map(wrapped, map(_summary, results)), "\n\n".join(tables)])


def _busy(results: Sequence[Figures]) -> list[str]:
    """Return the clause about other processes, if they used much of the machine."""
    # One clause suffices for several results.
    clauses = (result.measurement.disturbance for result in results)
    return [wrapped(clause) for clause in clauses if clause][:1]


def _summary(result: Figures) -> str:
    iteration = result.iteration
    visits = result.measurement
    mean_s = result.baseline_s
    # A median far below the mean shows that a few slow iterations take the time.
    slow = 1 - iteration.median_s / mean_s if mean_s else 0.0
    tail = f", so slow ones take {100 * slow:.0f}%" if slow >= _SLOW else ""
    return (
        f"{result.batch}, {result.mode}: {iteration.mean.exact} ms per "
        f"iteration, median {ms(iteration.median_s)}{tail} ({visits.num_rounds} rounds, "
        f"{visits.num_measure} iterations per visit)"
    )


# --------------------------------------------------------------------------------------- cells


def _exposed(result: Figures, name: str) -> tuple[str, str, str]:
    """Return a task's exposed time with its interval, its share of the step, and its own time.

    Of a time that cannot be told apart from 0, neither the share nor the own part is known.
    """
    exposed = result.exposures.get(name)
    if exposed is None:
        return "not measured" if name in result.measured else "", "", ""
    if exposed.spread_s and not exposed.is_clear:
        # An iteration cannot get shorter by more than its own time.
        most_s = min(exposed.value_s + exposed.spread_s, result.baseline_s)
        return f"< {short_ms(most_s)}", "", ""
    share = 100 * exposed.value_s / (result.baseline_s or 1.0)
    return exposed.text, f"{share:.1f}", short_ms(result.own_s[name])


# --------------------------------------------------------------------------------------- notes


def _notes(result: Figures) -> Iterator[str]:
    for name, task in result.tasks.items():
        if task.in_others_s:
            others = ", ".join(f"{other} {ms(s)}" for other, s in task.in_others_s.items())
            yield wrapped(f"without {name}, others take less: {others} ms")
    yield from map(wrapped, _lines(result))
    if result.ranks:
        yield from rank_lines(result.ranks, rank_waits(result.ranks, result.collectives))
    yield wrapped(f"restored afterwards: {put_back(result.measurement.put_back)}")


def _lines(result: Figures) -> Iterator[str]:
    if result.busy_s:
        yield f"limits iterations: {_limits(result)}"
    blocking = (f"{n} ({ms(result.tasks[n].thread.blocked_s)} ms)" for n in result.blocking)
    yield f"blocks the host: {', '.join(blocking) or 'no task'}"
    for name, task in result.tasks.items():
        if why := task.not_measured:
            yield f"not measured: {name}, since iterations with its shortcut fail: {why}"
    for number, advice in enumerate(result.advice, 1):
        yield f"do next, {number}: {advice.text}"
    if not result.advice:
        yield f"do next: {_NO_ADVICE}"
    if uncovered := result.measurement.uncovered:
        yield uncovered
    if result.measurement.interrupted:
        yield "interrupted: not all rounds were measured"
    if shortcut := result.measurement.already_shortcut:
        yield f"shortcut already, so not measured: {', '.join(shortcut)}"


def _limits(result: Figures) -> str:
    step = f"nearly all of {ms(result.baseline_s)} ms"
    busy = [f"{group} ({ms(result.busy_s[group])} ms)" for group in result.limiting]
    # Making the tasks of one busy group faster saves nothing while another group stays busy.
    if len(busy) > 1:
        return f"several thread groups are busy {step}, so all have to do less: {listed(busy)}"
    if busy:
        return f"one thread group is busy {step}: {busy[0]}"
    # No group is busy all the time, so something else limits iterations.
    longest = max(result.busy_s, key=lambda group: result.busy_s[group])
    return (
        f"no thread group is busy {step}, {longest} the longest with "
        f"{ms(result.busy_s[longest])} ms: iterations wait for dependences, a device or others"
    )


def put_back(owners: Collection[str]) -> str:
    """Return the restored objects in words; equal names are listed once, with their number."""
    counts = Counter(owners)
    names = [name if number == 1 else f"{number} x {name}" for name, number in counts.items()]
    return listed(names, _MOST_PUT_BACK) if names else "generators only; no other state was shown"
