"""Pipeline-parallel schedules: the order of actions on each rank."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from swpipe.core.files import read_text
from swpipe.plans.pipeline_parallel.action import (
    Action,
    Communication,
    Entry,
    Pair,
    ScheduleError,
    actions_of,
    parse_entry,
    parts_of,
)
from swpipe.plans.pipeline_parallel.order_check import check_order, placement_of
from swpipe.plans.pipeline_parallel.pipeline_graph import ScheduledNode


@dataclass(frozen=True)
class PipelineSchedule:
    """The order in which each rank runs its actions, pairs and communication.

    Any rows are accepted; ``check_schedule`` checks whether they can run.

    Attributes:
        rows: One row of actions, pairs and communication per rank, from rank 0. If there is no
            communication, the runtime adds it; sends and receives are always the runtime's own.
        n_micro: The number of microbatches.
    """

    rows: tuple[tuple[Entry, ...], ...]
    n_micro: int

    def __post_init__(self) -> None:
        # Plain tuples, as of (stage, op, micro), become actions; rows may be any sequences.
        rows = tuple(
            tuple(
                entry if isinstance(entry, Pair | Communication) else Action(*entry)
                for entry in row
            )
            for row in self.rows
        )
        # The dataclass is frozen, which only its own initialization may circumvent.
        object.__setattr__(self, "rows", rows)
        if isinstance(self.n_micro, bool) or not isinstance(self.n_micro, int) or self.n_micro < 1:
            raise ScheduleError(
                f"n_micro is {self.n_micro!r}: a schedule has at least 1 microbatch"
            )

    def __str__(self) -> str:
        return self.to_csv().rstrip("\n")

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage, derived from the rows.

        Raises:
            ScheduleError: A stage has no action, or has actions on two ranks.
        """
        return placement_of(self.rows)

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The passes of each rank without communication, each pair as its F and then its B."""
        return tuple(map(actions_of, self.rows))

    @property
    def in_sequence(self) -> PipelineSchedule:
        """This schedule with each pair replaced by its F and then its B."""
        return PipelineSchedule(tuple(map(parts_of, self.rows)), self.n_micro)

    @property
    def passes(self) -> PipelineSchedule:
        """This schedule without communication."""
        rows = (tuple(e for e in row if not isinstance(e, Communication)) for row in self.rows)
        return PipelineSchedule(tuple(rows), self.n_micro)

    @property
    def n_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def n_stages(self) -> int:
        """The number of stages on all ranks together."""
        return len(self.placement)

    @classmethod
    def from_nodes(cls, nodes: Sequence[Iterable[ScheduledNode]]) -> PipelineSchedule:
        """Return the schedule of the passes in the result of ``PipelineGraph.get_v_schedule``.

        Chunk 0 of rank r is stage r, and chunk 1 is stage 2n - 1 - r. The type B of a node is the
        op I. Nodes for communication, and for the validation of the optimizer's step, are left out:
        torch's runtime adds its own communication, and has no such validation.

        Args:
            nodes: The nodes of each rank, from rank 0.
        """
        last = 2 * len(nodes) - 1
        ops = {"F": "F", "B": "I", "W": "W"}
        rows = tuple(
            tuple(
                Action(last - rank if node.chunk else rank, ops[node.type], node.minibatch)  # type: ignore[arg-type]
                for node in row
                if node.type in ops
            )
            for rank, row in enumerate(nodes)
        )
        return cls(rows, 1 + max((action.micro for row in rows for action in row), default=0))

    @classmethod
    def from_csv(
        cls,
        source: str | os.PathLike[str],
        *,
        n_ranks: int | None = None,
        n_micro: int | None = None,
        renumbered: bool = False,
    ) -> PipelineSchedule:
        """Read a schedule from CSV text or from a file, as ``to_csv`` or torch's runtime writes it.

        There is one line per rank, with cells such as ``2F0``. Empty cells, in which a rank idles,
        are skipped. The other cells are passes; pairs, ``(0F1;3B0)OVERLAP_F_B``; or ``UNSHARD``,
        ``RESHARD`` and ``REDUCE_GRAD`` of a stage. Sends and receives are refused: the runtime
        places them.

        Args:
            source: The CSV text, or a path-like object that names a file of CSV text.
            n_ranks: The number of ranks that the schedule must have; None for any.
            n_micro: The number of microbatches that the schedule must have; None for any.
            renumbered: Whether to number the microbatches again, from 0, in the order in which each
                stage takes them. Torch's GPipe and LoopedBFS run the backward passes from the last
                microbatch to the first, so that gradients would be added up in reverse order.
                Renumbering keeps all dependences.

        Raises:
            ScheduleError: The text is not a schedule, or its order cannot run; see
                ``check_schedule``. The message names the line and cell, or the action.
            OSError: The file cannot be read.
        """
        try:
            text = source if isinstance(source, str) else read_text(Path(source))
        except UnicodeDecodeError as error:
            raise ScheduleError(f"{source} is no CSV file: it is not UTF-8 text") from error
        rows = tuple(_row(number, cells) for number, cells in _lines(text))
        if renumbered:
            rows = tuple(tuple(in_order_of_stages(row)) for row in rows)
        # The file does not say how many microbatches there are. A missing last one cannot be
        # detected here, only by n_micro.
        micros = 1 + max((a.micro for row in rows for a in actions_of(row)), default=-1)
        if not micros:
            raise ScheduleError("there is no action: a schedule has a line of actions per rank")
        for what, expected, count in (
            ("ranks", n_ranks, len(rows)),
            ("microbatches", n_micro, micros),
        ):
            if expected is not None and expected != count:
                raise ScheduleError(
                    f"the number of {what} is {count} in the schedule, {expected} in the job: "
                    "use a schedule made for this job"
                )
        # A file comes from elsewhere, so its order is checked at once. Schedules that are made in
        # Python are checked where they are used.
        check_order(rows, micros)
        return cls(rows, micros)

    def to_csv(self) -> str:
        """Return CSV text for torch's runtime: one line per rank, with cells such as ``2F0``."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(map(str, row) for row in self.rows)
        return text.getvalue()


def in_order_of_stages(row: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the parts of a row with the microbatches of each stage and op renumbered from 0."""
    # Pairs are taken apart: their two passes may change their order relative to other microbatches.
    counts: Counter[tuple[int, str]] = Counter()
    for part in parts_of(row):
        number = counts[part.stage, part.op]
        counts[part.stage, part.op] += 1
        yield part if isinstance(part, Communication) else part._replace(micro=number)


def _lines(text: str) -> list[tuple[int, list[str]]]:
    try:
        lines = list(enumerate(csv.reader(io.StringIO(text), strict=True), start=1))
    except csv.Error as error:
        raise ScheduleError(f"the text is no CSV: {error}") from error
    # Empty lines at the end are no ranks; an empty line in between is a rank without actions, which
    # the checker names.
    while lines and not any(lines[-1][1]):
        lines.pop()
    return lines


def _row(number: int, cells: list[str]) -> tuple[Entry, ...]:
    entries = []
    for position, cell in enumerate(map(str.strip, cells), start=1):
        try:
            if cell:  # else the rank idles in this clock cycle of torch's
                entries.append(parse_entry(cell))
        except ScheduleError as error:
            # A new error, because the original one does not know its place.
            raise ScheduleError(f"line {number}, cell {position}: {error}") from None
    return tuple(entries)
