"""The text form of a program: two lines about all of it, then a line per lane.

    depth 3, ring 4, launch limit 1
    order: <admit>, copy, read, forward, <retire>
    default: <admit>@0 publish -> wait(io.copy) -> event(copy) -> forward@2 -> <retire>@2
    io: copy@1 [memcpy] record publish -> wait(default.<admit>) -> read@0

``name@stage`` is an instruction, with its stream in brackets; ``record`` and ``publish`` stand
after it. Its waits stand before it: ``wait`` keeps the lane until another lane has passed an
instruction, ``event`` makes the stream wait for a task's device work. ``lag`` counts periods back,
``distance`` iterations; both are 0 if left out. Names that are not plain words are quoted.
"""

from __future__ import annotations

import json
import re

from swpipe.core.drawing import stream_name
from swpipe.program.compiled import Instruction, Program


def format_program(program: Program) -> str:
    """Return a program as text."""
    groups = [lane.group for lane in program.lanes]
    limit = program.launch_limit
    lines = [
        f"depth {program.depth}, ring {program.ring}"
        + ("" if limit is None else f", launch limit {limit}"),
        f"order: {', '.join(map(_quoted, program.order))}",
    ]
    for lane in program.lanes:
        items = [item for ins in lane.instructions for item in _items(ins, groups)]
        workers = f" x {lane.workers}" if lane.workers > 1 else ""
        lines.append(f"{_quoted(lane.group)}{workers}: {' -> '.join(items)}")
    return "\n".join(lines)


def _items(ins: Instruction, groups: list[str]) -> list[str]:
    """Return the texts of an instruction's waits, followed by that of the instruction."""
    items = []
    for producer, wait in ((_quoted(wait.producer), wait) for wait in ins.host_waits):
        lag = f", lag {wait.lag}" if wait.lag else ""
        items.append(f"wait({_quoted(groups[wait.lane])}.{producer}{lag})")
    for event in ins.event_waits:
        distance = f", distance {event.distance}" if event.distance else ""
        items.append(f"event({_quoted(event.producer)}{distance})")
    stream = f" [{_quoted(stream_name(ins.stream))}]" if ins.stream is not None else ""
    marks = " record" * ins.record + " publish" * ins.publish
    return [*items, f"{_quoted(ins.task)}@{ins.stage}{stream}{marks}"]


def _quoted(name: str) -> str:
    # Anything but a word could look like an arrow, a comma or a mark.
    return name if re.fullmatch(r"<?\w+>?", name) else json.dumps(name)
