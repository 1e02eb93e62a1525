"""Modules of the model that compute inputs of sharded modules, ahead of the model's forward.

    InputPostproc       x = sample(batch)    ──> ctx.postproc
    EmbInputDistStart   exchanges x.ids             │
    DenseForward        sample(batch) returns x  <──┘    checks its argument, computes nothing

Its arguments may be changed in place, or get other tensors: the forward sees that from its begin
on, and is refused where it reads them before it calls the module (``EarlyReads``).

While the model is attached, the forward of such a module returns what was computed for the batch.
Its hooks run in the model's forward, as ever; a hook that changes the result is noticed where the
result is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from swpipe._values.walk import tensors_in
from swpipe.device import Device
from swpipe.tasks.torchrec.rewriting.exchanged import CallInputs, memory_of
from swpipe.tasks.torchrec.rewriting.inputs import BATCH, Found, RewriteError


@dataclass
class PostprocResults:
    """What modules have computed for one batch: ``values``, by name, under an ``autocast`` mode.

    ``iteration`` is another one's where a shortcut replays them. ``calls`` has each module's
    arguments, as all modules have left them, and ``changed`` the memory of what it has changed in
    these, until the forward calls it.
    """

    iteration: int
    values: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, CallInputs] = field(default_factory=dict)
    autocast: tuple[bool, torch.dtype] | None = None
    changed: dict[str, set[int]] = field(default_factory=dict)


class PostprocForward:
    """The forward of a module that is computed ahead.

    ``results`` are those of the batch that the model runs on, or None outside of its forward;
    ``checks`` is false for results that a shortcut replays.
    """

    results: PostprocResults | None = None
    checks = False

    def __init__(self, name: str, args: Any, module: nn.Module, device: Device) -> None:
        self.name = name
        self.args = args
        self._module = module
        self._compute = module.forward
        self._device = device
        self._left: list[Any] = []  # the module's state after its last run

    def compute(self, batch: Any, results: PostprocResults) -> None:
        """Compute and keep the result for one batch."""
        args, kwargs = self.args.build_args_kwargs({BATCH: batch, **results.values})
        call = CallInputs(args, kwargs)
        results.values[self.name] = self._compute(*args, **kwargs)
        results.calls[self.name] = call
        if changed := call.changes():
            results.changed[self.name] = changed
        self._left = self._state()

    def check_unchanged(self, in_flight: int) -> None:
        """Raise RuntimeError if anything else has changed a buffer or attribute of the module."""
        if self._state() != self._left:
            raise RuntimeError(
                f"a buffer or attribute of module {self.name!r} was changed from outside, and it "
                f"has run already for batches in flight ({in_flight}): call drain() before you "
                "change it, keep it out of the forward of other modules, or train without "
                "pipeline_postproc"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result for this batch; the arguments are checked."""
        results = self.results
        if results is None:
            raise RuntimeError(
                f"module {self.name!r} is called outside of its pipeline, which computes its "
                "results ahead of the forward: detach() the model first, attach() it after"
            )
        # the checks below may read it
        changed = results.changed
        results.changed = {}
        if self.checks:
            call = results.calls[self.name]
            if why := call.mismatch(args, kwargs):
                raise call.refusal(f"{self._ahead()} of the forward", why)
            if autocast_mode(self._device) != results.autocast:
                raise RewriteError(
                    f"{self._ahead()}, and the forward calls it in another autocast mode: enter "
                    "autocast around progress(), or within the module"
                )
        changed.pop(self.name, None)
        results.changed = changed
        return results.values[self.name]

    def _ahead(self) -> str:
        return f"module {self.name!r}: its result for {Found(self.args)} was computed ahead"

    def _state(self) -> list[Any]:
        """What the module holds: which buffers of which versions, and plain attributes."""
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
    """The results of all modules for one batch, each after those whose results it takes."""
    results = PostprocResults(iteration, autocast=autocast_mode(device))
    for forward in forwards:
        forward.compute(batch, results)
    for call in results.calls.values() if results.changed else ():
        call.note()
    return results


class EarlyReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While the model runs: refuses to read what a module has changed ahead of its call.

    Such a module runs before the forward, so what reads its input before the call, in the order of
    the forward, would see the change too early.
    """

    def __init__(self, results: PostprocResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Check the arguments of one operator."""
        if self._results.changed:
            memory = {memory_of(tensor) for tensor in tensors_in([args, kwargs])}
            for name, changed in self._results.changed.items():
                if memory & changed:
                    raise RewriteError(
                        f"module {name!r} changes its input, and runs ahead of the forward, which "
                        f"reads what it changes before it calls the module ({func}): let it change "
                        "and return a copy, or train without pipeline_postproc"
                    )
        return func(*args, **(kwargs or {}))


def autocast_mode(device: Device) -> tuple[bool, torch.dtype] | None:
    """Whether autocast is on for the device, and its type; None where there is none."""
    if not torch.amp.is_autocast_available(device.type):
        return None
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
