"""Which random generators operators draw from."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from swpipe._tensors.pytree import map_tensors
from swpipe.device import Device
from swpipe.inference.operators import OperatorRecorder, tensors_of
from swpipe.inference.storages import Storages

_RANGE = torch.ops.profiler._record_function_enter_new.default


class DrawRecorder(OperatorRecorder):  # type: ignore[no-untyped-call]
    """An operator recorder that also tells which generators the operators drew from.

    Args:
        device: Whose default generators count.
        storages: All storages seen so far.

    Attributes:
        storages: With those that the operators used.
        draws: A generator's number to the generator; 0 to None for torch's default generators.
        clears: An optimizer's ``zero_grad`` was called.
    """

    clears = False

    def __init__(self, device: Device, storages: Storages | None = None) -> None:
        self.storages = Storages() if storages is None else storages
        super().__init__(self.storages)
        self.draws: dict[int, torch.Generator | None] = {}
        self._device = device

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and see whether it draws; dropout with a rate of 0 does not."""
        if 0 not in self.draws and _recomputes(sys._getframe()):
            self.draws[0] = None
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
        # Another thread may draw meanwhile; to make nothing draws nothing.
        if self._states() != before and any(one.numel() for one in tensors_of(result)):
            self.draws[0] = None
        return result

    def _states(self) -> list[bytes]:
        return [bytes(state.numpy()) for state in self._device.generator_states().values()]


def _recomputes(frame: FrameType | None) -> bool:
    """Whether activation checkpointing runs a forward again, in a backward.

    It sets the default generators, and sets them back: others would draw other numbers meanwhile,
    whether or not the forward draws.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    while frame is not None and frame.f_globals.get("__name__") != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None


_CHECKPOINT = "torch.utils.checkpoint"


def eager() -> AbstractContextManager[None]:
    """Runs compiled functions eagerly: their kernels do not go through the dispatcher."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def copied(batch: Any) -> Any:
    """The batch, with clones of the tensors in it."""
    return map_tensors(batch, _clone)


def _clone(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.clone().requires_grad_(tensor.requires_grad)
