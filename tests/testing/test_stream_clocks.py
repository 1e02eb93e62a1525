"""Vector clocks give the order of a graph of all launches and waits."""

from __future__ import annotations

import random

import pytest

from swpipe.testing.stream_clocks import HOST, Bytes, MemoryHistory, StreamClocks, Use
from tests.support.budget import seeds

STREAMS = (0, 1, 2)


class Graph:
    """A graph of launches, each with its direct predecessors, whose paths are searched."""

    def __init__(self) -> None:
        self.before: dict[int, set[int]] = {}
        self.last: dict[int, set[int]] = {stream: set() for stream in (*STREAMS, HOST)}
        self.events: dict[int, set[int]] = {}

    def launch(self, number: int, stream: int) -> None:
        self.before[number] = self.last[stream] | self.last[HOST]
        self.last[stream] = {number}

    def reaches(self, node: int, start: set[int]) -> bool:
        return node in start or any(self.reaches(node, self.before[other]) for other in start)


@pytest.mark.examples
def test_clocks_are_the_closure_of_launches_and_waits() -> None:
    """Random programs agree for each pair of a launch and a stream."""
    for seed in seeds("stream clocks", 30):
        compare(seed)


def compare(seed: int) -> None:
    """Compare the clocks with the graph for one program."""
    draw, clocks, graph = random.Random(seed), StreamClocks(), Graph()
    launches: list[tuple[int, int]] = []
    for _ in range(40):
        stream, event = draw.choice((*STREAMS, HOST)), draw.randrange(3)
        act = draw.choice(("launch", "launch", "record", "wait", "synchronize", "device", "forget"))
        if act == "launch":
            number = clocks.launch(stream)
            graph.launch(number, stream)
            launches.append((number, stream))
        elif act == "record":
            clocks.record(event, stream)
            graph.events[event] = set(graph.last[stream])
        elif act == "wait":
            clocks.wait(event, stream)
            graph.last[stream] |= graph.events.get(event, set())
        elif act == "synchronize":
            clocks.synchronize(stream)
            graph.last[HOST] |= graph.last[stream]
        elif act == "device":
            clocks.synchronize()
            graph.last[HOST] = set().union(*graph.last.values())
        else:
            clocks.forget(event)
            graph.events.pop(event, None)
        for other in STREAMS:
            for number, of in launches:
                expected = graph.reaches(number, graph.last[other])
                assert clocks.includes(other, of, number) == expected


def history() -> tuple[StreamClocks, MemoryHistory]:
    clocks = StreamClocks()
    return clocks, MemoryHistory(clocks)


def use(clocks: StreamClocks, stream: int, name: str, writes: bool, part: Bytes) -> Use:
    return Use(part, writes, stream, clocks.launch(stream), name)


ALL, LEFT, RIGHT = Bytes(100, 100, 200), Bytes(100, 100, 150), Bytes(100, 150, 200)


def test_a_write_races_with_all_reads_that_it_is_not_after() -> None:
    """Reads on two streams are both kept, and reads do not race with one another."""
    clocks, memory = history()
    assert memory.add(use(clocks, 1, "a", False, ALL)) == []
    assert memory.add(use(clocks, 2, "b", False, LEFT)) == []
    raced = memory.add(use(clocks, 0, "c", True, ALL))
    assert [each.access for each in raced] == ["a", "b"]
    assert memory.add(use(clocks, 0, "d", True, RIGHT))[0].access == "a"


def test_memory_given_again_keeps_its_history_but_for_recorded_streams() -> None:
    """What ``record_stream`` named is done before the memory is reused; nothing else is."""
    clocks, memory = history()
    memory.add(use(clocks, 1, "recorded", False, ALL))
    memory.add(use(clocks, 2, "not recorded", False, ALL))
    memory.record_stream(ALL.base, 1)
    memory.allocate(ALL.base, on_host=False)
    (other,) = memory.add(use(clocks, 0, "new", True, ALL))
    assert (other.access, other.freed) == ("not recorded", True)
    assert memory.add(use(clocks, 1, "other half", False, Bytes(100, 200, 300))) == []
    memory.allocate(ALL.base, on_host=True)
    assert memory.add(use(clocks, 1, "newer", True, ALL)) == []


def test_a_read_does_not_hide_the_write_before_it() -> None:
    """A third stream that waited for neither races with both."""
    clocks, memory = history()
    memory.add(use(clocks, 1, "write", True, ALL))
    memory.add(use(clocks, 1, "read", False, ALL))
    raced = memory.add(use(clocks, 2, "other read", False, ALL))
    assert [each.access for each in raced] == ["write"]
