r"""A program as text, and back: two lines about all of it, then a line per lane.

    depth 3, ring 4
    order: copy, read, forward
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
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from swpipe._engine.program import EventWait, HostWait, Instruction, Lane, Program

_NAME = r'<?\w+>?|"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(r"depth (\d+), ring (\d+)")
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
    lines = [
        f"depth {program.depth}, ring {program.ring}",
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


class _Wait(NamedTuple):
    lane: str
    producer: str
    lag: int


@dataclass(slots=True)
class _Read:
    """An instruction as it was read: the places that it waits for are not known yet."""

    task: str = ""
    stage: int = 0
    stream: str | None = None
    waits: list[_Wait] = field(default_factory=list)
    events: list[EventWait] = field(default_factory=list)
    record: bool = False
    publish: bool = False


def parse_program(text: str) -> Program:
    """The program that a text describes.

    Raises:
        ValueError: The text is no program; the message has the line.
    """
    lines = text.strip().split("\n")
    if (head := _HEAD.fullmatch(lines[0])) is None or not lines[1:]:
        raise ValueError(f"line 1: {lines[0]!r}: write 'depth N, ring N', then the order")
    order = _names(lines[1])
    read = [_lane(number, line) for number, line in enumerate(lines[2:], start=3)]
    place = {
        (group, each.task): (lane, position)
        for lane, (group, instructions) in enumerate(read)
        for position, each in enumerate(instructions)
    }

    def instruction(each: _Read, lane: int, position: int) -> Instruction:
        for group, producer, _ in each.waits:
            if (group, producer) not in place:
                raise ValueError(f"{each.task!r} waits for {producer!r}, which {group!r} lacks")
        waits = [HostWait(*place[w.lane, w.producer], w.lag, w.producer) for w in each.waits]
        return Instruction(
            each.task,
            each.stage,
            lane,
            position,
            each.stream,
            tuple(waits),
            tuple(each.events),
            each.record,
            each.publish,
        )

    lanes = [
        Lane(group, tuple(instruction(each, lane, k) for k, each in enumerate(instructions)))
        for lane, (group, instructions) in enumerate(read)
    ]
    return Program(tuple(lanes), int(head[1]), int(head[2]), order)


def _names(line: str) -> tuple[str, ...]:
    if not re.fullmatch(rf"order: (?:{_NAME})(?:, (?:{_NAME}))*", line):
        raise ValueError(f"line 2: {line!r}: write 'order: ' and the tasks")
    return tuple(map(_name, re.findall(_NAME, line.removeprefix("order: "))))


def _lane(number: int, line: str) -> tuple[str, list[_Read]]:
    """The group and the instructions of one line."""
    group = _GROUP.match(line)
    if group is None:
        raise ValueError(f"line {number}: {line!r}: begin with the thread group and a colon")
    at, done, each = group.end(), [], _Read()
    while at < len(line):
        item = _ITEM.match(line, at)
        if item is None:
            raise ValueError(f"line {number}, column {at + 1}: cannot read {line[at : at + 40]!r}")
        if item["lane"]:
            wait = _Wait(_name(item["lane"]), _name(item["producer"]), int(item["lag"] or 0))
            each.waits.append(wait)
        elif item["source"]:
            each.events.append(EventWait(_name(item["source"]), int(item["distance"] or 0)))
        else:
            each.task, each.stage = _name(item["task"]), int(item["stage"])
            each.stream = _name(item["stream"]) if item["stream"] else None
            each.record, each.publish = bool(item["record"]), bool(item["publish"])
            done.append(each)
            each = _Read()
        at = item.end()
        if line.startswith(" -> ", at) and at + 4 < len(line):
            at += 4
        elif at < len(line):
            raise ValueError(f"line {number}, column {at + 1}: write ' -> ' between two items")
    if each.waits or each.events or not done:
        raise ValueError(f"line {number}: the lane ends without an instruction")
    return _name(group[1]), done


def _name(text: str) -> str:
    name: str = json.loads(text) if text.startswith('"') else text
    return name
