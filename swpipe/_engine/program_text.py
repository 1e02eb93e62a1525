r"""A program as text, and back: two lines about all of it, then a line per lane.

    depth 3, ring 4, launch limit 1
    order: <admit>, copy, read, forward, <retire>
    default: <admit>@0 publish -> wait(io.copy) -> event(copy) -> forward@2 -> <retire>@2
    io: copy@1 [memcpy] record publish -> wait(default.<admit>) -> read@0

``name@stage`` is an instruction, with its stream in brackets; ``record`` and ``publish`` stand
after it. What it waits for stands before it: ``wait`` keeps the lane until another lane has passed
an instruction, ``event`` makes the stream wait for a task's device work. ``lag`` counts periods
back, ``distance`` iterations; both are 0 where left out. Names other than words are quoted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import torch

from swpipe._engine.program import EventWait, HostWait, Instruction, Lane, Program

_NAME = r'<?\w+>?|"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(r"depth (\d+), ring (\d+)(?:, launch limit (\d+))?")
_GROUP = re.compile(rf"({_NAME}): ")
_ITEM = re.compile(
    rf"wait\((?P<lane>{_NAME})\.(?P<producer>{_NAME})(?:, lag (?P<lag>\d+))?\)"
    rf"|event\((?P<source>{_NAME})(?:, distance (?P<distance>-?\d+))?\)"
    rf"|(?P<task>{_NAME})@(?P<stage>\d+)(?: \[(?P<stream>{_NAME})\])?"
    r"(?P<record> record)?(?P<publish> publish)?"
)


def format_program(program: Program) -> str:
    """A program as text. ``parse_program`` reads it unless a stream is a ``torch.Stream``."""
    groups = [lane.group for lane in program.lanes]
    limit = program.launch_limit
    lines = [
        f"depth {program.depth}, ring {program.ring}"
        + ("" if limit is None else f", launch limit {limit}"),
        f"order: {', '.join(map(_quoted, program.order))}",
    ]
    for lane in program.lanes:
        items = [item for ins in lane.instructions for item in _items(ins, groups)]
        lines.append(f"{_quoted(lane.group)}: {' -> '.join(items)}")
    return "\n".join(lines)


def _items(ins: Instruction, groups: list[str]) -> list[str]:
    """An instruction, after what it waits for."""
    items = []
    for producer, wait in ((_quoted(wait.producer), wait) for wait in ins.host_waits):
        lag = f", lag {wait.lag}" if wait.lag else ""
        items.append(f"wait({_quoted(groups[wait.lane])}.{producer}{lag})")
    for event in ins.event_waits:
        distance = f", distance {event.distance}" if event.distance else ""
        items.append(f"event({_quoted(event.producer)}{distance})")
    stream = f" [{_stream(ins)}]" if ins.stream is not None else ""
    marks = " record" * ins.record + " publish" * ins.publish
    return [*items, f"{_quoted(ins.task)}@{ins.stage}{stream}{marks}"]


def _stream(ins: Instruction) -> str:
    if isinstance(ins.stream, torch.Stream):
        return f"torch.Stream {ins.stream.stream_id}"
    return _quoted(str(ins.stream))


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"<?\w+>?", name) else json.dumps(name)


# ----------------------------------------------------------------------------------------- parsing


def parse_program(text: str) -> Program:
    """The program that a text describes.

    Raises:
        ValueError: The text is no program; the message has the line.
    """
    lines = text.strip().split("\n")
    if (head := _HEAD.fullmatch(lines[0])) is None or not lines[1:]:
        raise ValueError(f"line 1: {lines[0]!r}: write 'depth N, ring N', then the order")
    if not re.fullmatch(rf"order: (?:{_NAME})(?:, (?:{_NAME}))*", lines[1]):
        raise ValueError(f"line 2: {lines[1]!r}: write 'order: ' and the tasks")
    order = map(_name, re.findall(_NAME, lines[1].removeprefix("order: ")))
    read = [_Line(number, line) for number, line in enumerate(lines[2:], start=3)]
    lane_of = {line.group: lane for lane, line in enumerate(read)}
    lanes = tuple(Lane(line.group, line.instructions(lane_of, read)) for line in read)
    limit = None if head[3] is None else int(head[3])
    return Program(lanes, int(head[1]), int(head[2]), tuple(order), limit)


class _Line:
    """One lane's line. Where other lanes stand is not known until all lines are read."""

    def __init__(self, number: int, line: str) -> None:
        group = _GROUP.match(line)
        if group is None:
            raise ValueError(f"line {number}: {line!r}: begin with the thread group and a colon")
        self.group = _name(group[1])
        self._items: list[re.Match[str]] = []
        at = group.end()
        while at < len(line):
            item = _ITEM.match(line, at)
            if item is None:
                where = f"line {number}, column {at + 1}"
                raise ValueError(f"{where}: cannot read {line[at : at + 40]!r}")
            self._items.append(item)
            at = item.end()
            if at < len(line) and not line.startswith(" -> ", at):
                raise ValueError(f"line {number}, column {at + 1}: write ' -> ' between two items")
            at += len(" -> ")
        if not self._items or not self._items[-1]["task"]:
            raise ValueError(f"line {number}: the lane ends without an instruction")
        self.tasks = [_name(item["task"]) for item in self._items if item["task"]]

    def instructions(
        self, lane_of: Mapping[str, int], lines: Sequence[_Line]
    ) -> tuple[Instruction, ...]:
        """The instructions of this lane, with the places of those that it waits for."""
        done: list[Instruction] = []
        waits: list[HostWait] = []
        events: list[EventWait] = []
        for item in self._items:
            if item["lane"]:
                group, producer = _name(item["lane"]), _name(item["producer"])
                lane = lane_of.get(group)
                if lane is None or producer not in lines[lane].tasks:
                    raise ValueError(
                        f"{self.group!r} waits for {producer!r}, which {group!r} lacks"
                    )
                position = lines[lane].tasks.index(producer)
                waits.append(HostWait(lane, position, int(item["lag"] or 0), producer))
            elif item["source"]:
                events.append(EventWait(_name(item["source"]), int(item["distance"] or 0)))
            else:
                done.append(
                    Instruction(
                        task=_name(item["task"]),
                        stage=int(item["stage"]),
                        lane=lane_of[self.group],
                        position=len(done),
                        stream=_name(item["stream"]) if item["stream"] else None,
                        host_waits=tuple(waits),
                        event_waits=tuple(events),
                        record=bool(item["record"]),
                        publish=bool(item["publish"]),
                    )
                )
                waits, events = [], []
        return tuple(done)


def _name(text: str) -> str:
    name: str = json.loads(text) if text.startswith('"') else text
    return name
