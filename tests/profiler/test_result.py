"""Results print, are saved as JSON and loaded, and draw charts."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swpipe.profiler import Advice, ProfileResult, ProfileResults
from swpipe.profiler.figures import IterationTimes, Measurement
from swpipe.profiler.other_load import OtherLoad
from swpipe.profiler.spread import Estimate
from tests.profiler.results import changed, measured, of_step, tasks_of

RESULT = ProfileResult(
    batch="batch 0",
    mode="serial",
    iteration=IterationTimes(Estimate(0.0125, 0.00025), 0.012),
    tasks=tasks_of(
        raw_s={"read": 0.004, "forward": 0.008, "log": -0.0001},
        spread_s={"read": 0.0001, "forward": 0.0002, "log": 0.0001},
        replay_s={"read": 0.00001, "forward": 0.00002, "log": 0.00001},
        in_others_s={"forward": {"backward": 0.003, "step": 0.0005}},
        host_s={"read": 0.0041, "forward": 0.0045, "log": 0.00002},
        blocked_s={"read": 0.004, "forward": 0.0005, "log": 0.00001},
    ),
    advice=(Advice("make read take half as long", "read", Estimate(0.002, 0.0001), "thread 'io'"),),
    measurement=Measurement(
        num_warmup=2,
        num_measure=3,
        num_rounds=4,
        put_back=("model (Linear)", "self.optimizer (SGD)"),
    ),
)

OTHER = replace(
    of_step(measured(RESULT, already_shortcut=("forward",), interrupted=True), 0.02),
    batch="batch 1",
    tasks=tasks_of(
        raw_s={"read": 0.005, "step": -0.001},
        spread_s={"read": 0.0001, "step": 0.0002},
        host_s={"read": 0.006, "step": 0.001, "scale": 0.002},
        blocked_s={"read": 0.0, "step": 0.0009, "scale": 0.0},
        device_s={"read": 0.001},
        not_measured={"scale": "ValueError: no"},
    ),
    advice=(),
)

TABLE = """\
batch 0, serial: 12.500 ± 0.250 ms per iteration, median 12.000 (4 rounds, 3
  iterations per visit)
task         exposed          own    host    blocked
                  ms     %     ms      ms         ms
-------  -----------  ----  -----  ------  ---------
read     4.00 ± 0.10  32.0   4.00    4.10       4.00
forward  8.00 ± 0.20  64.0   4.50    4.50       0.50
log           < 0.10                 0.02       0.01
without forward, others take less: backward 3.000, step 0.500 ms
blocks the host: read (4.000 ms)
do next, 1: make read take half as long: saves 2.000 ± 0.100 ms; then limited by
  thread 'io'.
restored afterwards: model (Linear), self.optimizer (SGD)
exposed: how much shorter a mean iteration is if the task costs nothing, with a
95% interval; < x: not told apart from 0; own: what the task takes of that
itself
"""

SIDE_BY_SIDE = """\
batch 0, serial: 12.500 ± 0.250 ms per iteration, median 12.000 (4 rounds, 3
  iterations per visit)
batch 1, serial: 20.000 ± 0.250 ms per iteration, median 12.000, so slow ones
  take 40% (4 rounds, 3 iterations per visit)
task          batch 0                 batch 1
           exposed ms    own ms    exposed ms    own ms
-------  ------------  --------  ------------  --------
read      4.00 ± 0.10      4.00   5.00 ± 0.10      5.00
forward   8.00 ± 0.20      4.50
log            < 0.10
step                                   < 0.20
scale                            not measured
exposed: how much shorter a mean iteration is if the task costs nothing, with a
95% interval; < x: not told apart from 0; own: what the task takes of that
itself
"""


NOTES = """\
blocks the host: step (0.900 ms)
not measured: scale, since iterations with its shortcut fail: ValueError: no
do next: no change is known that promises more than the measurement's error;
  measure longer, or on an idle machine, to reduce the error
interrupted: not all rounds were measured
shortcut already, so not measured: forward
restored afterwards: model (Linear), self.optimizer (SGD)
"""


def stripped(text: str) -> list[str]:
    """Return lines without trailing spaces."""
    return [line.rstrip() for line in text.splitlines()]


def test_the_table_of_one_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """It has tasks in order, what blocks the host, and whose state was restored."""
    RESULT.print_report()
    assert stripped(capsys.readouterr().out) == stripped(TABLE)
    assert max(map(len, [*TABLE.splitlines(), *SIDE_BY_SIDE.splitlines()])) <= 80  # of a terminal
    assert ProfileResults([RESULT]).format_report() == RESULT.format_report()
    assert RESULT.own_s == {"read": 0.004, "forward": 0.0045, "log": 0.0}


def test_the_tables_side_by_side() -> None:
    """There are columns per batch, two at a time; a task without a measurement is empty."""
    out = io.StringIO()
    several = ProfileResults([RESULT, OTHER])
    several.print_report(out)
    assert (several[1], several[:1], len(several)) == (OTHER, ProfileResults([RESULT]), 2)
    assert stripped(out.getvalue()) == stripped(SIDE_BY_SIDE)
    assert OTHER.format_report().endswith(NOTES.rstrip())
    many = ProfileResults([replace(RESULT, batch=f"batch {number}") for number in range(5)])
    assert max(map(len, many.format_report().splitlines())) <= 80
    assert many.format_report().count("\ntask ") == 3


def test_no_share_is_above_100_percent() -> None:
    """An iteration cannot get shorter by more than its time, also within a wide interval."""
    wide = changed(
        RESULT,
        raw_s={"read": 0.016, "forward": 0.008, "log": 0.003},
        spread_s={"read": 0.005, "forward": 0.011, "log": 0.0001},
    )
    text = wide.format_report()
    shares = [float(line.split()[4]) for line in text.splitlines() if line.startswith("read ")]
    assert shares == [100.0]
    assert "< 12.5  " in text


def test_json_and_back(tmp_path: Path) -> None:
    """One result, and several, are equal when they are read from text and from files."""
    several = ProfileResults([RESULT, OTHER])
    assert ProfileResult.from_json(RESULT.to_json()) == RESULT
    assert ProfileResults.from_json(several.to_json()) == several
    assert ProfileResults.from_json(RESULT.to_json()) == ProfileResults([RESULT])
    RESULT.save(tmp_path / "one.json")
    several.save(tmp_path / "several.json")
    shorter = json.loads(RESULT.to_json())
    del shorter["measurement"]["other_load"]  # what is missing has its default
    assert ProfileResult.from_dict(shorter) == RESULT
    assert ProfileResult.load(tmp_path / "one.json") == RESULT
    assert ProfileResults.load(tmp_path / "several.json") == several


def test_a_busy_machine_is_told_before_all_else() -> None:
    """The message says how much of it others used; a small part does not count."""
    busy = measured(RESULT, other_load=OtherLoad(1.25, 2))
    for text in (busy.format_report(), ProfileResults([RESULT, busy]).format_report()):
        assert text.startswith("the machine is busy: other processes use 1.2 of 2 cores")
    assert ProfileResult.from_json(busy.to_json()) == busy
    idle = measured(RESULT, other_load=OtherLoad(0.1, 2))
    assert idle.format_report() == RESULT.format_report()


def test_rows_for_other_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a row per batch and task, as CSV, as a data frame and in a notebook."""
    several = ProfileResults([RESULT, OTHER])
    rows = list(csv.DictReader(io.StringIO(several.to_csv())))
    assert [(row["batch"], row["task"]) for row in rows] == [
        *(("batch 0", name) for name in ("read", "forward", "log")),
        *(("batch 1", name) for name in ("read", "step", "scale")),
    ]
    assert float(rows[1]["exposed_ms"]) == pytest.approx(8.0)
    assert float(rows[2]["raw_ms"]) == pytest.approx(-0.1)
    assert rows[0]["device_ms"] == ""
    assert rows[5]["exposed_ms"] == ""
    assert rows[5]["not_measured"] == "ValueError: no"
    assert "&lt; 0.10" in RESULT._repr_html_()
    if find_spec("matplotlib"):
        assert RESULT._repr_html_().startswith("<svg")
        assert "4.00 ± 0.10" in RESULT._repr_html_().partition("</svg>")[0]
    assert ProfileResults([]).to_csv() == "\n"
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert RESULT.to_dataframe() == RESULT.records()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs pandas: install it, or use records\(\)"):
        RESULT.to_dataframe()


@pytest.mark.parametrize(
    "change",
    [
        {"iteration": "long"},
        {"iteration": {"mean": {"value_s": float("nan"), "spread_s": 0.0}, "median_s": 0.0}},
        {"tasks": 3},
        {"tasks": {"read": {}}},
        {"tasks": {"read": {"thread": {"host_s": 0.1}, "in_others_s": {"step": None}}}},
        {"advice": [{"gone": 1}]},
        {"measurement": {"num_rounds": 2}},
        {"batch": 3},
        {"extra": 1},
    ],
)
def test_a_damaged_result_is_refused(change: dict[str, object]) -> None:
    """It is refused like a wrong value, before it is compared or printed."""
    for data in ({**json.loads(RESULT.to_json()), **change}, change, [change]):
        with pytest.raises(ValueError, match="profile result"):
            ProfileResult.from_dict(data)
    with pytest.raises(ValueError, match="a file of profile results has no loop"):
        ProfileResults.from_json('{"batches": []}')


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each part of a JSON value."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(part, (*path, key))


@pytest.mark.parametrize("wrong", [[], {}, "x", True, None, 1.5])
def test_a_value_of_another_json_kind_is_refused_or_is_a_result(wrong: object) -> None:
    """The value may be anywhere; reading, comparing and printing raise no other error."""
    whole = ProfileResults([measured(RESULT, other_load=OtherLoad(0.5, 2))]).to_json()
    refused = 0
    for path in _places(json.loads(whole)):
        data = json.loads(whole)
        at = data
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = wrong
        try:
            results = ProfileResults.from_json(json.dumps(data))
        except ValueError:
            refused += 1
            continue
        with suppress(ValueError):  # those of another batch
            results.diff(ProfileResults([RESULT]))
        assert results.format_report()
    assert refused > 20


def test_a_chart_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suffix of the path selects the format; without the library the extra is named."""
    if find_spec("matplotlib"):
        RESULT.plot(tmp_path / "one.png")
        assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ValueError, match="nothing to draw"):
            ProfileResults([]).plot(tmp_path / "none.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"swpipe\[plot\]"):
        RESULT.plot(tmp_path / "one.png")


@pytest.mark.parametrize(
    ("host_s", "blocked_s", "blocking"),
    [
        ({"read": 0.004}, {"read": 0.00099}, ()),  # less than a quarter is normal
        ({"read": 0.00009}, {"read": 0.00009}, ()),  # less than 0.1 ms is short
        ({"a": 0.004, "b": 0.002}, {"a": 0.001, "b": 0.002}, ("b", "a")),
    ],
)
def test_tasks_that_block_the_host(
    host_s: dict[str, float], blocked_s: dict[str, float], blocking: tuple[str, ...]
) -> None:
    """The longest come first."""
    tasks = tasks_of(raw_s=host_s, host_s=host_s, blocked_s=blocked_s)
    assert replace(RESULT, tasks=tasks).blocking == blocking


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (
            replace(RESULT, mode="pipelined", busy_s={"io": 0.012, "default": 0.007}),
            "one thread group is busy nearly all of 12.500 ms: io",
        ),
        (
            replace(RESULT, busy_s={"io": 0.0115, "net": 0.002, "default": 0.012}),
            "so all have to do less: default (12.000 ms), io (11.500 ms)",
        ),
        (
            replace(RESULT, busy_s={"io": 0.007, "default": 0.006}),
            "io the longest with 7.000 ms: iterations wait for",
        ),
        (
            measured(RESULT, put_back=()),
            "restored afterwards: generators only; no other state was shown",
        ),
        (
            measured(RESULT, put_back=("Sequential", *["leaf (float32 [3])"] * 1000, "SGD")),
            "restored afterwards: Sequential, 1000 x leaf (float32 [3]), SGD",
        ),
        (
            measured(RESULT, put_back=tuple(f"model_{i}" for i in range(1000))),
            "model_11 and 988 more",
        ),
        (changed(RESULT, blocked_s=dict.fromkeys(RESULT.tasks, 0.0)), "blocks the host: no task"),
        (measured(RESULT, coverage="2 of 9 batches were seen."), "2 of 9 batches were seen."),
        (
            replace(RESULT, advice=()),
            "do next: no change is known that promises more than the measurement's",
        ),
    ],
)
def test_lines_of_the_report(result: ProfileResult, says: str) -> None:
    """A line says so if there is nothing to report; lists are short."""
    assert says in " ".join(result.format_report().split())


@pytest.mark.parametrize(
    ("after_s", "verdict", "summary"),
    [
        (0.0135, "longer", "batch 0: iterations are 8.0% ± 2.8% longer"),
        (0.0115, "shorter", "batch 0: iterations are 8.0% ± 2.8% shorter"),
        (0.0128, "same", "batch 0: no difference of iterations beyond ± 2.8%"),
        (0.0122, "same", "batch 0: no difference of iterations beyond ± 2.8%"),
    ],
)
def test_a_change_counts_if_it_is_beyond_the_interval(
    after_s: float, verdict: str, summary: str
) -> None:
    """Both intervals count, since the measurements are independent."""
    diff = RESULT.diff(of_step(RESULT, after_s))
    assert diff.iteration.verdict == verdict
    assert diff.summary == summary


def test_profiles_of_several_batches_are_compared_batch_by_batch() -> None:
    """Batches are matched by name; profiles of other batches are an error."""
    several = ProfileResults([RESULT, OTHER])
    swapped = ProfileResults([OTHER, RESULT])
    assert [diff.of for diff in several.diff(swapped)] == ["batch 0", "batch 1"]
    assert all(diff.iteration.verdict == "same" for diff in several.diff(swapped))
    with pytest.raises(ValueError, match="different batches: batch 0, batch 1, and batch 0"):
        several.diff(ProfileResults([RESULT]))
    planned = ProfileResults([replace(RESULT, mode="pipelined")])
    assert ProfileResults([RESULT]).diff(planned)[0].of == "batch 0, serial to pipelined"


def test_two_profiles_are_compared() -> None:
    """The iteration comes first; a task that only one of them has measured has no change."""
    diff = RESULT.diff(OTHER)
    assert diff.iteration.saved is not None
    assert diff.iteration.saved.value_s == pytest.approx(-0.0075)
    assert diff.iteration.saved.spread_s == pytest.approx(0.00025 * 2**0.5)
    by_name = {change.name: change for change in diff.tasks}
    assert by_name["read"].saved is not None
    assert by_name["read"].saved.value_s == pytest.approx(-0.001)
    assert by_name["read"].saved.spread_s == pytest.approx(0.0001 * 2**0.5)
    assert by_name["forward"].saved is by_name["step"].saved is by_name["scale"].saved is None
    assert stripped(str(diff)) == stripped(DIFF)


DIFF = """\
batch 0: iterations are 60.0% ± 2.8% longer
             before ms    after ms    saved ms    ± ms    beyond ±
---------  -----------  ----------  ----------  ------  ----------
iteration       12.500      20.000      -7.500   0.354      longer
read             4.000       5.000      -1.000   0.141      longer
forward          8.000
log             -0.100
step                        -1.000
scale
"""
