"""Modules of the model that compute inputs of sharded modules, ahead of the model's forward.

    InputPostproc       x = sample(batch)    ──> ctx.postproc
    EmbInputDistStart   exchanges x.ids             │
    DenseForward        sample(batch) returns x  <──┘    checks its argument, computes nothing

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

from swpipe.device import Device
from swpipe.tasks.sparse_dist.exchanged import CallInputs, check_call
from swpipe.tasks.sparse_dist.inputs import Found, RewriteError, Source


@dataclass
class PostprocResults:
    """What modules have computed for one batch.

    Attributes:
        iteration: Of the batch; another one's where a shortcut replays the results.
        values: The results, by module name.
        calls: The arguments of each module.
        autocast: In which autocast mode the modules ran.
    """

    iteration: int
    values: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, CallInputs] = field(default_factory=dict)
    autocast: tuple[bool, torch.dtype] | None = None


class PostprocForward:
    """The forward of a module that is computed ahead.

    ``results`` are those of the batch that the model runs on, or None outside of its forward.
    """

    def __init__(self, name: str, args: Any, module: nn.Module, device: Device) -> None:
        self.name = name
        self.args = args
        self.results: PostprocResults | None = None
        self.checks = False
        self._module = module
        self._compute = module.forward
        self._device = device
        self._left: list[Any] = []  # the module's state after its last run

    def compute(self, batch: Any, results: PostprocResults) -> None:
        """Compute and keep the result for one batch.

        Raises:
            RewriteError: The module has changed its input.
        """
        args, kwargs = self.args.build_args_kwargs(Source(batch, results.values))
        call = CallInputs(args, kwargs)
        result = self._compute(*args, **kwargs)
        if call.changed():
            raise RewriteError(
                f"module {self.name!r} changes its input {Found(self.args)}, and runs ahead of the "
                "forward, whose other parts would see the change too early: let it change and "
                "return a copy, or train without pipeline_postproc"
            )
        results.calls[self.name] = call
        results.values[self.name] = result
        self._left = self._state()

    def check_unchanged(self, in_flight: int) -> None:
        """Refuse that anything else has changed the module, with batches in flight.

        Raises:
            RuntimeError: A buffer or an attribute is not as the module's last run has left it.
        """
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
        if self.checks:
            what = f"module {self.name!r}: its result for {Found(self.args)} was computed ahead"
            check_call(f"{what} of the forward", results.calls[self.name], args, kwargs)
            if autocast_mode(self._device) != results.autocast:
                raise RewriteError(
                    f"{what}, and the forward calls it in another autocast mode: enter autocast "
                    "around progress(), or within the module"
                )
        return results.values[self.name]

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
    return results


def autocast_mode(device: Device) -> tuple[bool, torch.dtype] | None:
    """Whether autocast is on for the device, and its type; None where there is none."""
    if not torch.amp.is_autocast_available(device.type):
        return None
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
