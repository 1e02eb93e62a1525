"""The costs of a pipeline-parallel schedule's actions: time and memory."""

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
"""The costs that may be one number for all stages, or one number per stage."""


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """The times and the memory of one stage's passes over one microbatch, in any units.

    A cost is one number for all stages, or a sequence with one number per stage. (On torch's
    runtime stage 0 runs its whole backward pass in W, which costs per stage can express.)

    Attributes:
        forward: The time of F.
        backward: The time of I, the gradient of the input.
        weight: The time of W, the gradient of the weights. B takes the time of I and W.
        hop: The time from the end of an action to its result's arrival at another rank. It is pure
            latency, which occupies no rank; 0 for a free link.
        f_mem: The memory that F adds to its rank when it is issued.
        b_mem: The memory that I adds. It is negative or 0, or positive if I recomputes activations
            and keeps them for W.
        w_mem: The memory that W adds, negative or 0. B adds ``b_mem``, and then ``w_mem``.
        max_mem: The memory limit of each rank. None or 0 for the memory of one microbatch in each
            stage, which is 2 * n * f_mem on a V of n ranks; ``math.inf`` for no limit.
        pair: The time of a pair, by the stage of its F. A pair takes at least the time of the
            longer one of its passes. None for the time of F and B in sequence.
        unshard: The time for which gathering the parameters of a stage occupies the rank's link to
            the ranks that hold the other shards.
        reduce: The time for which reducing the gradients of a stage occupies this link.
        work_mem: The memory that a pass needs only while it runs, for example for activations that
            it recomputes.

    Raises:
        ScheduleError: A cost has no valid value, or memory grows from microbatch to microbatch.
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
                # A tuple, so that the caller cannot change the frozen object through its list.
                object.__setattr__(self, name, tuple(value))
                if not value or not all(map(holds, value)):
                    wrong.append(f"{name} is {shown(value)}: give for each stage {rule}")
            elif not holds(value) and (name, value) != ("pair", None):
                wrong.append(f"{name} is {shown(value)}: give {rule}")
        limit = self.max_mem
        if limit is not None and not (limit == math.inf or (is_number(limit) and limit >= 0)):
            wrong.append(f"max_mem is {shown(limit)}: give None, or a number above 0")
        # The sum over the three changes makes sense only if each of them is valid.
        if wrong := wrong or [*self._growth()]:
            raise ScheduleError("; ".join(wrong))

    def _growth(self) -> list[str]:
        """Return the error messages of the memory changes as a whole, none or one."""
        given = [getattr(self, name) for name in _MEMORY]
        sizes = {len(value) for value in given if isinstance(value, Sequence)}
        if len(sizes) > 1:
            return [f"{', '.join(_MEMORY)} have different lengths: give as many numbers of each"]
        # One number applies to each stage, if others are given as sequences.
        rows = (
            value if isinstance(value, Sequence) else [value] * max(sizes, default=1)
            for value in given
        )
        # The tolerance covers the rounding of sums of floats; one message is enough.
        return [
            f"f_mem + b_mem + w_mem is {shown(sum(changes))}: give a sum of at most 0, since "
            "memory would grow with each microbatch"
            for changes in zip(*rows, strict=True)
            if sum(changes) > 1e-9 * changes[0]
        ][:1]

    def limit(self, n_stages: int) -> float:
        """Return the memory limit of each rank, for ``n_stages`` stages on all ranks together."""
        # As in the published method: room for one microbatch's activations in each stage, by the
        # most expensive stage.
        forward, backward, work = (
            max(value) if isinstance(value, Sequence) else value
            for value in (self.f_mem, self.b_mem, self.work_mem)
        )
        return self.max_mem or (forward + max(0, backward)) * n_stages + work

    def widened_limit(self, n_stages: int) -> float:
        """Return the memory limit with a margin for the rounding of sums of floats."""
        return self.limit(n_stages) * (1 + 1e-9)

    def time(self, entry: Entry) -> float:
        """Return the time of an action, pair or communication in the unit of the costs."""
        if isinstance(entry, Communication):
            # A reshard only frees memory.
            value = {"UNSHARD": self.unshard, "REDUCE_GRAD": self.reduce}.get(entry.op, 0)
            return _of_stage(value, entry.stage)
        if isinstance(entry, Pair):
            # An overlapped pass does not get faster, whatever the measured time of the pair says.
            parts = [self.time(part) for part in entry]
            if self.pair is None:
                return sum(parts)
            return max(*parts, _of_stage(self.pair, entry.f.stage))
        # B has no costs of its own.
        if entry.op == "B":
            return self.time(entry._replace(op="I")) + self.time(entry._replace(op="W"))
        value = {"F": self.forward, "I": self.backward, "W": self.weight}[entry.op]
        return _of_stage(value, entry.stage)

    def memory(self, action: Action) -> float:
        """Return the memory that an F, I or W adds to its rank."""
        value = {"F": self.f_mem, "I": self.b_mem, "W": self.w_mem}[action.op]
        return _of_stage(value, action.stage)

    def need(self, action: Action) -> float:
        """Return the memory that must be free when an F, I or W is issued."""
        return max(0, self.memory(action)) + _of_stage(self.work_mem, action.stage)

    def require(self, n_stages: int) -> None:
        """Check that each sequence of costs has one number per stage.

        Raises:
            ScheduleError: A sequence has another length.
        """
        for name in OF_STAGES:
            value = getattr(self, name)
            if isinstance(value, Sequence) and len(value) != n_stages:
                raise ScheduleError(
                    f"{name} has {len(value)} numbers: give one, or one for each of {n_stages} "
                    "stages"
                )


def _of_stage(value: Values, stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value


class ActivationMemory(NamedTuple):
    """The bytes that F, I and W of one transformer layer add per token of a microbatch."""

    f_mem: float
    b_mem: float
    w_mem: float


def activation_memory(
    hidden_size: int, num_attention_heads: int, seq_length: int
) -> ActivationMemory:
    """Return the memory that F, I and W of one transformer layer add, in bytes per token.

    F adds 34 * h + 5 * a * s bytes, for the hidden size h, a attention heads and the sequence
    length s. W frees 32 * h of them, and I frees the rest.

    Source: V. Korthikanti et al., "Reducing activation recomputation in large transformer models"
    (2022).

    Raises:
        ScheduleError: A size is not an integer above 0.
    """
    sizes = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": seq_length,
    }
    require_counts(sizes)
    # In half precision, without recomputation or tensor parallelism; 5 * a * s is the attention's.
    f_mem = 34 * hidden_size + 5 * num_attention_heads * seq_length
    w_mem = -32 * hidden_size
    return ActivationMemory(f_mem, -f_mem - w_mem, w_mem)


def require_counts(sizes: dict[str, int]) -> None:
    """Check that all sizes are integers above 0.

    Raises:
        ScheduleError: The message names each wrong size, in one line.
    """
    wrong = [
        f"{name} is {shown(size)}: give an integer above 0"
        for name, size in sizes.items()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1
    ]
    if wrong:
        raise ScheduleError("; ".join(wrong))


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, which a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_positive(value: object) -> bool:
    """Return whether a value is a finite number above 0."""
    return is_number(value) and value > 0  # type: ignore[operator]


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(OF_STAGES[:5], (is_positive, "a number above 0")),
    "hop": (lambda value: is_number(value) and value >= 0, "0 for a free link, or a number above"),
    "b_mem": (is_number, "a number"),
    "w_mem": (lambda value: is_number(value) and value <= 0, "0 or a number below (freed memory)"),
    **dict.fromkeys(
        OF_STAGES[-3:], (lambda value: is_number(value) and value >= 0, "0 or a number above 0")
    ),
}
"""The rule for each cost, or each number of its sequence: a test, and its text for messages."""
