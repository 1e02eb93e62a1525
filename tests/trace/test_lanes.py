"""The times of threads and streams, and the causes of spans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swpipe import PipelineTask, SWPipeline
from swpipe.plans.prefetch import prefetch_plan
from swpipe.trace import LaneTimes, Row, Span, Trace
from swpipe.trace.causes import Cause, Causes
from swpipe.trace.lanes import ELSE, lanes
from swpipe.trace.perfetto import Arrow
from swpipe.trace.span import extent_ns
from tests.support.budget import examples
from tests.support.virtual_clock import TimedHost

IO = Row("thread", "io")
DEFAULT = Row("thread", "default")
MEMCPY = Row("stream", "memcpy")

# us    0    1    2    3    4    5    6    7    8
# io    [read 0 ] [read 1 ]..[read 2 ]
# def.            [ train 0   ]  . [ train 1 ]
READ_0 = Span("read", 0, IO, 0, 2)
READ_1 = Span("read", 1, IO, 2, 4)
READ_2 = Span("read", 2, IO, 5, 7, wait_ns=1)
TRAIN_0 = Span("train", 0, DEFAULT, 2, 5, wait_ns=2)
TRAIN_1 = Span("train", 1, DEFAULT, 6, 8)
SPANS = (READ_0, READ_1, READ_2, TRAIN_0, TRAIN_1)
ARROWS = (Arrow("read", "train"), Arrow("train", "read", 2))


def test_a_lane_is_busy_waits_and_is_idle() -> None:
    """It waits for the task whose end let it start; before and between, it has nothing to do."""
    assert lanes(SPANS, ARROWS) == (
        LaneTimes(IO, busy_ns=6, waiting_ns={"train": 1}, idle_ns=1),
        LaneTimes(DEFAULT, busy_ns=5, waiting_ns={"read": 2}, idle_ns=1),
    )


def test_a_wait_that_nothing_explains_is_told_too() -> None:
    """It lasts from the end of the other task until the thread wakes up."""
    late = Span("train", 0, DEFAULT, 3, 6, wait_ns=3)
    assert lanes((READ_0, late), ARROWS)[1].waiting_ns == {"read": 2, ELSE: 1}
    alone = Span("train", 5, DEFAULT, 3, 6, wait_ns=3)
    assert lanes((READ_0, alone), ARROWS)[1].waiting_ns == {ELSE: 3}


def test_the_caller_waits_for_a_slow_loader(host: TimedHost, tmp_path: Path) -> None:
    """Another thread pulls, and the first task of the batch waits for the pull."""

    def loader() -> Iterator[int]:
        for batch in range(20):
            host.sleep(0.005)
            yield batch

    plan = prefetch_plan(["read"], ["train"])
    assert plan.pull_group is not None
    both = [PipelineTask(name, lambda ctx: None) for name in ("read", "train")]
    with SWPipeline(plan, both, device="cpu") as pipe, pipe.trace() as trace:
        pipe.run(loader())
    trace.save(tmp_path / "trace.json")
    for found in (trace, Trace.load(tmp_path / "trace.json")):
        (caller,) = (lane for lane in found.lanes() if lane.row == DEFAULT)
        assert caller.waiting_ns == {"read": 20 * 5_000_000}
        path = {link.span.task for link in found.critical_path().links}
        assert "<pull>" in path


ROWS = (IO, DEFAULT, MEMCPY)
ANY_SPANS = st.lists(
    st.builds(
        lambda task, i, row, start, length, wait: Span(task, i, row, start, start + length, wait),
        st.sampled_from(["read", "train", "<admit>", "<retire>"]),
        st.integers(0, 3),
        st.sampled_from(ROWS),
        st.integers(0, 50),
        st.integers(0, 10),
        st.integers(0, 10),
    ),
    min_size=1,
    max_size=12,
)


@examples("timelines", 100)
@given(spans=ANY_SPANS)
def test_the_parts_of_a_lane_add_up(spans: list[Span]) -> None:
    """They do so exactly, for any overlap, and none is negative."""
    begin_ns, end_ns = extent_ns(spans)
    for lane in lanes(spans, ARROWS):
        assert lane.length_ns == end_ns - begin_ns
        assert min(lane.busy_ns, lane.idle_ns, *lane.waiting_ns.values(), 0) == 0


def test_the_causes_of_starts() -> None:
    """The last end counts; a dependence comes before the row, if both ended together."""
    causes = Causes(SPANS, ARROWS)
    assert causes.of(READ_0) == Cause("begin", None, 0)
    assert causes.of(READ_1) == Cause("row", READ_0, 2)
    assert causes.of(TRAIN_0) == Cause("dependence", READ_0, 2)
    assert causes.of(READ_2) == Cause("dependence", TRAIN_0, 5)
    assert causes.of(TRAIN_1) == Cause("row", TRAIN_0, 5)


def test_work_on_a_stream_starts_once_it_is_queued() -> None:
    """It starts after other work on streams, if any, and not after the host that queued that."""
    copy = Span("copy", 0, IO, 1, 2)
    copying = Span("copy", 0, MEMCPY, 2, 9)
    forward = Span("forward", 0, DEFAULT, 3, 4)
    compute = Row("stream", "compute")
    early, late = Span("forward", 0, compute, 4, 6), Span("forward", 0, compute, 9, 12)
    arrows = [Arrow("copy", "forward")]
    assert Causes([copy, copying], arrows).of(copying) == Cause("queued", copy, 1)
    assert Causes([forward, early], arrows).of(early) == Cause("queued", forward, 3)
    spans = [copy, copying, forward, late]
    assert Causes(spans, arrows).of(late) == Cause("dependence", copying, 9)


def test_swpipes_own_tasks_are_causes_too() -> None:
    """Nothing of an iteration starts before it is admitted; it is retired after all of it."""
    admit, retire = Span("<admit>", 0, DEFAULT, 0, 3), Span("<retire>", 0, DEFAULT, 6, 6)
    read = Span("read", 0, IO, 3, 6)
    causes = Causes([admit, read, retire], [])
    assert causes.of(read) == Cause("dependence", admit, 3)
    assert causes.of(retire) == Cause("dependence", read, 6)


@pytest.mark.parametrize(
    ("tasks", "share"), [(("read",), 4 / 6), (("train",), 4 / 6), (("read", "train"), 0.0)]
)
def test_what_is_hidden(tasks: tuple[str, ...], share: float) -> None:
    """It is the part of the tasks' time in which others run, too."""
    trace = Trace((*SPANS[:-1], Span("train", 1, DEFAULT, 5, 8)), arrows=ARROWS)
    assert trace.hidden(*tasks) == pytest.approx(share)


def test_communication_on_a_stream_is_hidden_behind_work_on_streams() -> None:
    """The threads that queue it do not count."""
    spans = [
        Span("dist", 0, IO, 0, 1),
        Span("dist", 0, MEMCPY, 1, 11),
        Span("forward", 0, DEFAULT, 0, 20),
        Span("forward", 0, Row("stream", "compute"), 6, 14),
    ]
    assert Trace(spans).hidden("dist") == 0.5
    assert Trace(spans).hidden("gone") is None
