"""What the actions of a pipeline-parallel schedule cost: time and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swpipe.core.messages import shown
from swpipe.plans.pipeline_parallel.action import Action, Entry, Pair, ScheduleError

_TIMES = ("forward", "backward", "weight", "pair")


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """Times and memory of one stage's passes over one microbatch, in any units.

    A time is one number, or a sequence of one number per rank, or per stage. (On torch's runtime
    stage 0 does its whole backward pass in W: costs per stage can say so.)

    Attributes:
        forward: The time of F.
        backward: The time of I, the gradient of the input; the seed's B.
        weight: The time of W, the gradient of the weights; B takes both times.
        hop: How much later a result is on another rank: pure latency, which occupies nobody; 0 for
            a free link.
        f_mem: What F adds to the memory of its rank, when it is issued.
        b_mem: What I adds, 0 or below.
        w_mem: What W adds, 0 or below; the op B adds ``b_mem`` + ``w_mem``.
        max_mem: The memory of each rank. None or 0: ``f_mem`` for each stage, 2·n·f on a V of n
            ranks; ``math.inf``: no limit.
        pair: The time of an F over a B, by the rank or the stage of the F; at least that of the
            longer one is counted. None: F and B in sequence.

    Raises:
        ScheduleError: A pass takes no time, or memory grows from microbatch to microbatch.
    """

    forward: float | Sequence[float] = 1
    backward: float | Sequence[float] = 1
    weight: float | Sequence[float] = 1
    hop: float = 1e-3
    f_mem: float = 2
    b_mem: float = -1
    w_mem: float = -1
    max_mem: float | None = None
    pair: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        wrong = []
        for name in _TIMES[: 3 if self.pair is None else 4]:
            value = getattr(self, name)
            if not isinstance(value, str) and isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(value))
                if not value or not all(map(is_positive, value)):
                    wrong.append(f"{name} is {shown(value)}: each is a number above 0")
            elif not is_positive(value):
                wrong.append(f"{name} is {shown(value)}: a number above 0")
        if not is_positive(self.f_mem):
            wrong.append(f"f_mem is {shown(self.f_mem)}: a number above 0")
        if not is_number(self.hop) or self.hop < 0:
            wrong.append(f"hop is {shown(self.hop)}: 0, for a free link, or a number above")
        for name in ("b_mem", "w_mem"):
            value = getattr(self, name)
            if not is_number(value) or value > 0:
                wrong.append(f"{name} is {shown(value)}: 0 or a number below, what is freed")
        limit = self.max_mem
        if limit is not None and not (limit == math.inf or (is_number(limit) and limit >= 0)):
            wrong.append(f"max_mem is {shown(limit)}: None, or a number above 0")
        if not wrong and self.f_mem + self.b_mem + self.w_mem > 1e-9 * self.f_mem:
            grown = self.f_mem + self.b_mem + self.w_mem
            wrong.append(
                f"f_mem + b_mem + w_mem is {shown(grown)}: at most 0, or memory grows with each "
                "microbatch"
            )
        if wrong:
            raise ScheduleError("; ".join(wrong))

    def limit(self, n_stages: int) -> float:
        """The memory of each rank, where the ranks together have ``n_stages`` stages."""
        return self.max_mem or self.f_mem * n_stages

    def widened_limit(self, n_stages: int) -> float:
        """The limit for memory that was added up, where sums of floats are a little off."""
        return self.limit(n_stages) * (1 + 1e-9)

    def require_room(self) -> None:
        """Raise ScheduleError where the memory has no room for one microbatch on a V."""
        if self.max_mem and self.max_mem < 2 * self.f_mem:
            raise ScheduleError(
                f"max_mem is {shown(self.max_mem)}: a V needs at least 2 * f_mem = "
                f"{shown(2 * self.f_mem)}, for both chunks of one microbatch"
            )

    def time(self, action: Entry, placement: Sequence[int]) -> float:
        """How long an action, or a pair, takes.

        Args:
            action: Which one.
            placement: The rank of each stage.
        """
        if isinstance(action, Pair):
            parts = [self.time(part, placement) for part in action]
            if self.pair is None:
                return sum(parts)
            return max(*parts, _of_stage(self.pair, action.f.stage, placement))
        if action.op == "B":
            both = (action._replace(op="I"), action._replace(op="W"))
            return self.time(both[0], placement) + self.time(both[1], placement)
        value = {"F": self.forward, "I": self.backward, "W": self.weight}[action.op]
        return _of_stage(value, action.stage, placement)

    def memory(self, action: Action) -> float:
        """What an action adds to the memory of its rank."""
        both = self.b_mem + self.w_mem
        return {"F": self.f_mem, "I": self.b_mem, "W": self.w_mem, "B": both}[action.op]

    def require(self, n_ranks: int, n_stages: int) -> None:
        """Raise ScheduleError where a sequence of times has another length than the job."""
        for name in _TIMES:
            value = getattr(self, name)
            if isinstance(value, Sequence) and len(value) not in (n_ranks, n_stages):
                raise ScheduleError(
                    f"{name} has {len(value)} numbers: give one, or one for each of "
                    f"{n_ranks} ranks, or one for each of {n_stages} stages"
                )


def _of_stage(value: float | Sequence[float], stage: int, placement: Sequence[int]) -> float:
    """Of times that are one number, or one per stage or rank."""
    if not isinstance(value, Sequence):
        return value
    return value[stage if len(value) == len(placement) else placement[stage]]


class ActivationMemory(NamedTuple):
    """Bytes per token and transformer layer that the passes over a microbatch add."""

    f_mem: float
    b_mem: float
    w_mem: float


def activation_memory(
    hidden_size: int, num_attention_heads: int, seq_length: int
) -> ActivationMemory:
    """What F, B and W of one transformer layer add to the memory, in bytes per token.

    F keeps 34·h + 5·a·s; of these W frees 32·h and B the rest.

    Source: V. Korthikanti et al., "Reducing activation recomputation in large transformer models"
    (2022); seed 003 names what it is for.

    Raises:
        ScheduleError: A size is not an integer above 0.
    """
    sizes = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": seq_length,
    }
    require_counts(sizes)
    f_mem = 34 * hidden_size + 5 * num_attention_heads * seq_length
    w_mem = -32 * hidden_size
    return ActivationMemory(f_mem, -f_mem - w_mem, w_mem)


def require_counts(sizes: dict[str, int]) -> None:
    """Raise ScheduleError for each size that is not an integer above 0, in one line."""
    wrong = [
        f"{name} is {shown(size)}: an integer above 0"
        for name, size in sizes.items()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1
    ]
    if wrong:
        raise ScheduleError("; ".join(wrong))


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_positive(value: object) -> bool:
    """Whether a value is a finite number above 0."""
    return is_number(value) and value > 0  # type: ignore[operator]
