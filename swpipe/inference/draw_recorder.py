"""States of random number generators: a task that changes one has drawn from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swpipe._state.generators import TORCH
from swpipe.device import Device
from swpipe.inference.operators import OperatorRecorder
from swpipe.inference.storages import Storages


@contextmanager
def states_set() -> Iterator[set[str]]:
    """Collects the default generators whose states are set within the block, as draws.

    They may be as before in the end: activation checkpointing sets them, and sets them back.
    """
    found: set[str] = set()
    set_state = torch.set_rng_state

    def setting(new_state: torch.Tensor) -> None:
        found.add(TORCH)
        set_state(new_state)

    torch.set_rng_state = setting
    try:
        yield found
    finally:
        torch.set_rng_state = set_state


_RANGE = torch.ops.profiler._record_function_enter_new.default


class DrawRecorder(OperatorRecorder):  # type: ignore[no-untyped-call]
    """An operator recorder that also tells which generators the operators drew from.

    Attributes:
        storages: Those that the operators used.
        draws: A generator's number to the generator; 0 to None for torch's default generators.
        clears: An optimizer's ``zero_grad`` was called.
    """

    clears = False

    def __init__(self, device: Device) -> None:
        self.storages = Storages()
        super().__init__(self.storages)
        self.draws: dict[int, torch.Generator | None] = {}
        self._device = device

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and see whether it draws; dropout with a rate of 0 does not."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            # By the range that torch marks for profilers: clearing gradients is no operator.
            if func is _RANGE and str(args[0]).startswith("Optimizer.zero_grad"):
                self.clears = True
            return func(*args, **kwargs)
        if (generator := kwargs.get("generator")) is not None:
            self.draws[generator._cdata] = generator  # one may have several Python objects
            return func(*args, **kwargs)
        before = self._states()
        result = func(*args, **kwargs)
        if self._states() != before:
            self.draws[0] = None
        return result

    def _states(self) -> list[bytes]:
        return [bytes(state.numpy()) for state in self._device.generator_states().values()]
