"""Modules of the model that compute inputs of sharded modules, ahead of the model's forward.

    InputPostproc       x = sample(batch)    ──> ctx.postproc
    EmbInputDistStart   exchanges x.ids             │
    DenseForward        sample(batch) returns x  <──┘    checks its argument, computes nothing

A module may change its arguments in place, or replace tensors in them. The model's forward then
sees the change from its beginning, so such a module is refused if the forward computes anything
before it calls the module.

While the model is attached, the forward of such a module returns the result that was computed for
the batch. The module's hooks run in the model's forward, as always. A hook that changes the result
is noticed where the result is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swpipe.device import Device
from swpipe.tasks.torchrec.rewriting.exchanged import CallInputs
from swpipe.tasks.torchrec.rewriting.inputs import BATCH, RewriteError, TracedArguments


@dataclass
class PostprocResults:
    """The results of modules for one batch: ``values``, by name, under an ``autocast`` mode.

    ``iteration`` is that of another batch if a shortcut replays them. ``calls`` has each module's
    arguments, as all modules have left them.
    """

    iteration: int
    values: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, CallInputs] = field(default_factory=dict)
    autocast: tuple[bool, torch.dtype] | None = None


class PostprocForward:
    """The replaced forward of a module that is computed ahead.

    ``results`` are those for the batch of ``iteration``, on which the model runs; they are None
    outside of the model's forward.
    """

    results: PostprocResults | None = None
    iteration = 0

    def __init__(self, name: str, args: TracedArguments, module: nn.Module, device: Device) -> None:
        self.name = name
        self.args = args
        self._module = module
        self._compute = module.forward
        self._device = device
        # The module's state after its last run. If it differs later, other code has changed it.
        self._left: list[Any] = []

    def compute(self, batch: Any, results: PostprocResults) -> None:
        """Compute and keep the result for one batch."""
        args, kwargs = self.args.values({BATCH: batch, **results.values})
        # Noted before the call, so that changes show what the call itself has changed.
        call = CallInputs(args, kwargs)
        results.values[self.name] = self._compute(*args, **kwargs)
        results.calls[self.name] = call
        if self.args.late and call.changed():
            raise RewriteError(
                f"module {self.name!r} changes its input, and runs ahead of the forward, which may "
                "read what it changes before it calls the module: let it change and return a copy, "
                "call it first, or train without pipeline_postproc"
            )
        self._left = self._state()

    def check_unchanged(self, in_flight: int) -> None:
        """Raise RuntimeError if other code has changed a buffer or attribute of the module."""
        # The module has run ahead with a state that the serial run would not have had.
        if self._state() != self._left:
            raise RuntimeError(
                f"a buffer or attribute of module {self.name!r} was changed from outside, and it "
                f"has run already for batches in flight ({in_flight}): call drain() before you "
                "change it, keep it out of the forward of other modules, or train without "
                "pipeline_postproc"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result for this batch, after checking the arguments."""
        results = self.results
        if results is None:
            raise RuntimeError(
                f"module {self.name!r} is called outside of its pipeline, which computes its "
                "results ahead of the forward: detach() the model first, attach() it after"
            )
        if results.iteration == self.iteration:  # otherwise a shortcut replays the results
            call = results.calls[self.name]
            if why := call.mismatch(args, kwargs):
                raise call.refusal(f"{self._ahead()} of the forward", why)
            # The result was computed under the mode of InputPostproc, and would differ from the
            # forward's.
            if autocast_mode(self._device) != results.autocast:
                raise RewriteError(
                    f"{self._ahead()}, and the forward calls it in another autocast mode: enter "
                    "autocast around progress(), or within the module"
                )
        return results.values[self.name]

    def _ahead(self) -> str:
        return f"module {self.name!r}: its result for {self.args} was computed ahead"

    def _state(self) -> list[Any]:
        """Return the module's state: its buffers with their versions, and plain attributes."""
        # Versions (torch's private _version) show in-place writes without reading device memory.
        buffers = [(id(b), b._version) for b in self._module.buffers() if not b.is_inference()]
        plain = [
            (name, repr(value))
            for part in self._module.modules()
            for name, value in vars(part).items()
            if isinstance(value, bool | int | float | str)
        ]
        return [buffers, plain]


def compute_ahead(
    forwards: Iterable[PostprocForward], batch: Any, iteration: int, device: Device
) -> PostprocResults:
    """Return the results of all modules for one batch, computed in the order of the forward."""
    results = PostprocResults(iteration, autocast=autocast_mode(device))
    for forward in forwards:
        forward.compute(batch, results)
    # A later module may have changed the input of an earlier one; the forward sees the last state.
    for call in results.calls.values():
        call.note()
    return results


def autocast_mode(device: Device) -> tuple[bool, torch.dtype] | None:
    """Return whether autocast is on for the device, and its type; None if it has no autocast."""
    if not torch.amp.is_autocast_available(device.type):
        return None
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
