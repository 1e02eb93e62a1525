"""The figures of a profile, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from swpipe.core.task import ByTask
from swpipe.profiler.advice import Advice
from swpipe.profiler.other_load import OtherLoad
from swpipe.profiler.rank_times import RankTimes, RankWait, rank_waits
from swpipe.profiler.spread import Estimate
from swpipe.profiler.together import limiting

Mode = Literal["serial", "pipelined"]

MIN_BLOCKED_S = 1e-4
MIN_BLOCKED_SHARE = 0.25

_BY_TASK = (
    "exposed_s", "raw_s", "spread_s", "replay_s", "in_others_s", "host_s", "blocked_s", "device_s",
    "not_measured",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Joint:
    """Several tasks that were shortcut together. All times are seconds per iteration.

    Attributes:
        what: What they have in common, in words.
        tasks: Their names.
        raw_s: How much shorter an iteration is if all of them cost nothing.
        spread_s: Half-width of the 95% interval of ``raw_s``.
    """

    what: str
    tasks: tuple[str, ...]
    raw_s: float
    spread_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The fields of ``ProfileResult``, which says what each of them is."""

    batch: str
    mode: Mode
    baseline_s: float
    baseline_median_s: float
    baseline_spread_s: float
    exposed_s: Mapping[str, float]
    raw_s: Mapping[str, float]
    spread_s: Mapping[str, float]
    replay_s: Mapping[str, float]
    in_others_s: Mapping[str, Mapping[str, float]]
    host_s: Mapping[str, float]
    blocked_s: Mapping[str, float]
    device_s: Mapping[str, float]
    busy_s: Mapping[str, float]
    joint: tuple[Joint, ...]
    advice: tuple[Advice, ...]
    num_warmup: int
    num_measure: int
    num_rounds: int
    put_back: tuple[str, ...] = ()
    already_shortcut: tuple[str, ...] = ()
    not_measured: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False
    disturbed: int | None = None
    no_work: tuple[str, ...] = ()
    other_load: OtherLoad | None = None
    ranks: tuple[RankTimes, ...] = ()
    collectives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _BY_TASK:
            object.__setattr__(self, name, ByTask(getattr(self, name)))

    @property
    def tasks(self) -> tuple[str, ...]:
        """The measured tasks, in serial order."""
        return tuple(self.exposed_s)

    @property
    def own_s(self) -> Mapping[str, float]:
        """Task to the part of ``exposed_s`` that it takes itself, on its thread and its stream.

        The rest is what others take less without it (``in_others_s``), or do faster.
        """
        return {
            name: min(exposed_s, self.host_s[name] + self.device_s.get(name, 0.0))
            for name, exposed_s in self.exposed_s.items()
        }

    @property
    def rank_waits(self) -> tuple[RankWait, ...]:
        """Which ranks wait for another one, and how long; the longest comes first."""
        return rank_waits(self.ranks, self.collectives)

    @property
    def blocking(self) -> tuple[str, ...]:
        """Tasks that block the host: off the CPU for 25% of their time and at least 0.1 ms.

        The longest come first.
        """
        found = [
            name
            for name, blocked_s in self.blocked_s.items()
            if blocked_s >= max(MIN_BLOCKED_S, MIN_BLOCKED_SHARE * self.host_s[name])
        ]
        return tuple(sorted(found, key=lambda name: -self.blocked_s[name]))

    def exposed(self, name: str) -> Estimate | None:
        """The exposed time of a task as it was measured; None where it was not."""
        if name not in self.raw_s:
            return None
        return Estimate(self.raw_s[name], self.spread_s[name])

    @property
    def limiting(self) -> tuple[str, ...]:
        """Thread groups that are busy for 90% of an iteration; the busiest come first.

        If there are several, none of them alone makes iterations much shorter: the tasks of each
        have little exposed time, whatever they take.
        """
        return limiting(self.busy_s, self.baseline_s)
