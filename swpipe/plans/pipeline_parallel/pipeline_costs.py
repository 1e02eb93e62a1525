"""What the actions of a pipeline-parallel schedule cost: time and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from swpipe.core.messages import shown
from swpipe.plans.pipeline_parallel.action import (
    Action,
    Communication,
    Entry,
    Pair,
    ScheduleError,
)

Values: TypeAlias = float | Sequence[float]

_MEMORY = ("f_mem", "b_mem", "w_mem")

OF_STAGES = ("forward", "backward", "weight", "pair", *_MEMORY, "work_mem", "unshard", "reduce")
"""What may be one number per rank or stage."""


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """Times and memory of one stage's passes over one microbatch, in any units.

    A time, or memory, is one number, or a sequence of one number per rank, or per stage. (On
    torch's runtime stage 0 does its whole backward pass in W: costs per stage can say so.)

    Attributes:
        forward: The time of F.
        backward: The time of I, the gradient of the input; the seed's B.
        weight: The time of W, the gradient of the weights; B takes both times.
        hop: How much later a result is on another rank: pure latency, which occupies nobody; 0 for
            a free link.
        f_mem: What F adds to the memory of its rank, when it is issued.
        b_mem: What I adds: 0 or below; above, where it keeps for W what it has computed once more.
        w_mem: What W adds, 0 or below; the op B does ``b_mem``, and then ``w_mem``.
        max_mem: The memory of each rank. None or 0: what a microbatch holds for each stage, 2·n·f
            on a V of n ranks; ``math.inf``: no limit.
        pair: The time of an F over a B, by the rank or the stage of the F; at least that of the
            longer one is counted. None: F and B in sequence.
        unshard: The time for which gathering the parameters of a stage takes the rank's link to the
            ranks that hold the other shards.
        reduce: The time for which reducing the gradients of a stage takes it.
        work_mem: What a pass needs only while it runs, as what is computed once more.

    Raises:
        ScheduleError: A pass takes no time, or memory grows from microbatch to microbatch.
    """

    forward: Values = 1
    backward: Values = 1
    weight: Values = 1
    hop: float = 1e-3
    f_mem: Values = 2
    b_mem: Values = -1
    w_mem: Values = -1
    max_mem: float | None = None
    pair: Values | None = None
    work_mem: Values = 0
    unshard: Values = 0
    reduce: Values = 0

    def __post_init__(self) -> None:
        wrong = []
        for name, (holds, rule) in _RULES.items():
            value = getattr(self, name)
            if name != "hop" and isinstance(value, Sequence) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
                if not value or not all(map(holds, value)):
                    wrong.append(f"{name} is {shown(value)}: each is {rule}")
            elif not holds(value) and (name, value) != ("pair", None):
                wrong.append(f"{name} is {shown(value)}: {rule}")
        limit = self.max_mem
        if limit is not None and not (limit == math.inf or (is_number(limit) and limit >= 0)):
            wrong.append(f"max_mem is {shown(limit)}: None, or a number above 0")
        if wrong := wrong or [*self._growth()]:
            raise ScheduleError("; ".join(wrong))

    def _growth(self) -> list[str]:
        """What is wrong with the changes of memory together."""
        given = [getattr(self, name) for name in _MEMORY]
        sizes = {len(one) for one in given if isinstance(one, Sequence)}
        if len(sizes) > 1:
            return [f"{', '.join(_MEMORY)} have different lengths: give as many numbers of each"]
        rows = (
            one if isinstance(one, Sequence) else [one] * max(sizes, default=1) for one in given
        )
        return [
            f"f_mem + b_mem + w_mem is {shown(sum(changes))}: at most 0, or memory grows with each "
            "microbatch"
            for changes in zip(*rows, strict=True)
            if sum(changes) > 1e-9 * changes[0]
        ][:1]

    def limit(self, n_stages: int) -> float:
        """The memory of each rank, where the ranks together have ``n_stages`` stages."""
        held, kept, work = (
            max(one) if isinstance(one, Sequence) else one
            for one in (self.f_mem, self.b_mem, self.work_mem)
        )
        return self.max_mem or (held + max(0, kept)) * n_stages + work

    def widened_limit(self, n_stages: int) -> float:
        """The limit for memory that was added up, where sums of floats are a little off."""
        return self.limit(n_stages) * (1 + 1e-9)

    def require_room(self, n_ranks: int) -> None:
        """Raise ScheduleError where the memory has no room for one microbatch on a V."""
        placement = [*range(n_ranks), *reversed(range(n_ranks))]
        for rank in range(n_ranks):
            up = 2 * n_ranks - 1 - rank
            (f_down, i_down), (f_up, i_up) = (
                [self.memory(Action(s, op, 0), placement) for op in "FI"]  # type: ignore[arg-type]
                for s in (rank, up)
            )
            work = max(_of_stage(self.work_mem, s, placement) for s in (rank, up))
            least = f_down + max(f_up + max(0, i_up), i_down) + work
            if least > self.widened_limit(2 * n_ranks):
                raise ScheduleError(
                    f"max_mem is {shown(self.max_mem)}: a V needs at least {shown(least)} on rank "
                    f"{rank}, for both chunks of one microbatch"
                )

    def time(self, action: Entry, placement: Sequence[int]) -> float:
        """How long an action, or a pair, takes.

        Args:
            action: Which one.
            placement: The rank of each stage.
        """
        if isinstance(action, Communication):
            value = {"UNSHARD": self.unshard, "REDUCE_GRAD": self.reduce}.get(action.op, 0)
            return _of_stage(value, action.stage, placement)
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

    def memory(self, action: Action, placement: Sequence[int]) -> float:
        """What an F, I or W adds to the memory of its rank."""
        value = {"F": self.f_mem, "I": self.b_mem, "W": self.w_mem}[action.op]
        return _of_stage(value, action.stage, placement)

    def need(self, action: Action, placement: Sequence[int]) -> float:
        """What must be free when an F, I or W is issued."""
        work = _of_stage(self.work_mem, action.stage, placement)
        return max(0, self.memory(action, placement)) + work

    def require(self, n_ranks: int, n_stages: int) -> None:
        """Raise ScheduleError where a sequence has another length than the job."""
        for name in OF_STAGES:
            value = getattr(self, name)
            if isinstance(value, Sequence) and len(value) not in (n_ranks, n_stages):
                raise ScheduleError(
                    f"{name} has {len(value)} numbers: give one, or one for each of "
                    f"{n_ranks} ranks, or one for each of {n_stages} stages"
                )


def _of_stage(value: Values, stage: int, placement: Sequence[int]) -> float:
    """Of values that are one number, or one per stage or rank."""
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


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(OF_STAGES[:5], (is_positive, "a number above 0")),
    "hop": (lambda one: is_number(one) and one >= 0, "0, for a free link, or a number above"),
    "b_mem": (is_number, "a number"),
    "w_mem": (lambda one: is_number(one) and one <= 0, "0 or a number below, what is freed"),
    **dict.fromkeys(
        OF_STAGES[-3:], (lambda one: is_number(one) and one >= 0, "0 or a number above")
    ),
}
"""What each value, or each of its numbers, has to be."""
