"""Precautions for the first batch, with which torch's runtime finds the shapes of all tensors.

For that it runs each stage once more than the schedule says, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_POINT_TO_POINT = ("send", "recv_", "recv_any_source_")
_COLLECTIVES = ("c10d", "_c10d_functional")


@contextmanager
def no_collectives(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Refuse collectives: a rank is at another pass than the others, which would wait for ever.

    The runtime's own sends and receives pass, and all that it exchanges before a stage begins:
    every rank is at the same place then. Stage 0 makes no backward pass here: a collective in it is
    not seen.
    """
    mode: Any = _NoCollectives()  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        for stage in stages:
            hook = stage.register_forward_pre_hook(mode.begin, prepend=True)
            stack.callback(hook.remove)
        stack.enter_context(mode)
        yield


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    began = False

    def begin(self, *given: Any) -> None:
        self.began = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        packet = func.overloadpacket
        space, _, name = packet._qualified_op_name.partition("::")
        if self.began and space in _COLLECTIVES and name not in _POINT_TO_POINT:
            raise RuntimeError(
                f"a stage starts the collective {name} inside a pass, where each rank is at "
                "another one, and would wait for ever: reduce outside of the schedule's step"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give buffers, such as running means, the values back that they had before the block."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
