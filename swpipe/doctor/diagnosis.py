"""The result of an examination: findings, and the headroom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from swpipe.core.messages import counted, listed
from swpipe.core.tables import wrapped
from swpipe.profiler.figures import LoaderPace
from swpipe.profiler.spread import Estimate, ms, within

_SHOWN = 0.01  # of a step


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that keeps work from overlapping.

    Attributes:
        rule: Which kind it is, such as "host-sync"; the guide lists them.
        place: ``file:line`` and the task; or a variable, a setting, "plan", "loader" or "machine".
        text: What is the case, and what it prevents.
        mend: What to do about it.
    """

    rule: str
    place: str
    text: str
    mend: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text} [{self.rule}]\n  mend: {self.mend}"


@dataclass(frozen=True, slots=True)
class Headroom:
    """What overlap can gain at most, by the times of the serial loop: no plan is needed.

    Attributes:
        step: An iteration, the call of the loader included, and its part of the start of a pass.
        left_s: The time of ``stays`` or of the loader, whichever is longer: all else may overlap.
        overlappable: What may overlap: ``"<pull>"``, the call of the loader, and tasks.
        stays: The other tasks. By what is declared, each has to wait for the others of the
            iteration before, so that their times add up under every plan.
        loader: What the loader does in the long run: no overlap makes a step shorter than a batch
            takes it. None where batches are there already.
    """

    step: Estimate
    left_s: float
    overlappable: tuple[str, ...]
    stays: tuple[str, ...]
    loader: LoaderPace | None = None

    @property
    def ceiling(self) -> float:
        """The part of the step that any overlap can gain at most: 0 to 1."""
        gain = Estimate(self.step.value_s - self.left_s, self.step.spread_s)
        return gain.value_s / self.step.value_s if gain.is_clear else 0.0

    def __str__(self) -> str:
        return "\n".join(map(wrapped, self._lines()))

    def _lines(self) -> Iterator[str]:
        wide = within(self.step.spread_s, ms)
        yield f"headroom: a step takes {ms(self.step.value_s)} ms{wide}{' ms' if wide else ''}"
        if self.overlappable:
            gain = f"{-self.ceiling:.0%}" if self.ceiling else "not told apart from that"
            free = listed(self.overlappable)
            yield f"  with all that may overlap hidden ({free}): {ms(self.left_s)} ms, {gain}"
        if self.loader is not None:
            pace = self.loader
            passes = f", and {ms(pace.start_s)} ms a step for the start of passes" * (
                pace.start_s >= _SHOWN * self.step.value_s
            )
            yield f"  the loader makes a batch in {ms(pace.rate_s)} ms{passes}: no plan is faster"
        if self.stays:
            yield f"  stays, under every plan that keeps what is declared: {listed(self.stays)}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What an examination found.

    Attributes:
        findings: Those of the machine and the settings first, then by task.
        headroom: What overlap can gain; None where there was no loop to measure.
        examined: What was looked at, in words.
    """

    findings: tuple[Finding, ...]
    headroom: Headroom | None
    examined: str

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for tools; times in milliseconds.

        Keys: ``version`` (1), ``examined``, ``findings`` (each with ``rule``, ``place``, ``text``,
        ``mend``), and ``headroom``: None, or ``step_ms``, ``spread_ms``, ``ceiling`` (0 to 1),
        ``overlappable``, ``stays``.
        """
        room = self.headroom
        return {
            "version": 1,
            "examined": self.examined,
            "findings": [asdict(one) for one in self.findings],
            "headroom": room
            and {
                "step_ms": round(1e3 * room.step.value_s, 3),
                "spread_ms": round(1e3 * room.step.spread_s, 3),
                "ceiling": round(room.ceiling, 4),
                "overlappable": [*room.overlappable],
                "stays": [*room.stays],
            },
        }

    def __str__(self) -> str:
        found = [wrapped(f"{number}. {one}") for number, one in enumerate(self.findings, start=1)]
        head = f"{counted(len(found), 'finding') if found else 'no findings'}: {self.examined}"
        return "\n".join([wrapped(head), *found, *([str(self.headroom)] if self.headroom else [])])
