"""Waits of the host for the device, and copies that cannot overlap, by line of the user's code.

A dispatch mode sees every operator of a serial run (``swpipe.inference.operators``). An operator
waits if its result is a Python value, or has a shape that depends on values on the device. A copy
between host and device waits if it is not asynchronous. If torch has a sync debug mode for the
device, it reports further waits. Neither sees ``synchronize()``, nor the inside of a compiled
function.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from swpipe._engine.observers import Observer
from swpipe.device import Device, on_cpu
from swpipe.inference.operators import OperatorRecorder, tensors_of
from swpipe.program import Instruction
from swpipe.reporting.finding import Finding

SYNC = "host-sync"
SHAPE = "shape-from-data"
UNPINNED = "unpinned-copy"

_COPIES = ("copy_", "_to_copy")
_MASKED_WRITES = ("index_put_", "index_put", "_index_put_impl_")
_INDEXED = ("index", *_MASKED_WRITES)

_KEEP = "keep the value on the device, and read it every so many iterations"
_PIN = (
    "copy from pinned memory with non_blocking=True: DataLoader(pin_memory=True), or pin_memory()"
)
_FIXED = (
    "use a mask or a size that is known: torch.where, padding, nonzero_static, "
    "repeat_interleave(output_size=)"
)


class WaitRecorder(OperatorRecorder, Observer):  # type: ignore[no-untyped-call]
    """An observer of serial iterations that records waits and copies while a task runs.

    Attributes:
        task: The task that runs.
        findings: Each finding with the number of its occurrences.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.task = ""
        self.findings: Counter[Finding] = Counter()

    def start(self, ins: Instruction, iteration: int) -> None:
        self.task = ins.task
        self.__enter__()

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        self.__exit__()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and record a finding if it waits."""
        result = func(*args, **kwargs)
        # ``name()`` is "namespace::operator.overload".
        name = func.name().partition("::")[2].partition(".")[0]
        on_device = self._device.holds_work([*args, *kwargs.values()])
        if name in _COPIES:
            self._judge_copy(name, args, kwargs, result)
        # ``lift_fresh`` wraps a new constant.
        elif on_device and name == "lift_fresh":
            self.add(UNPINNED, "a tensor is made of Python values, by a copy that blocks", _MADE)
        # Tags are torch's own declaration of which operators read values from the device.
        elif on_device and torch.Tag.data_dependent_output in func.tags:
            self.add(SYNC, f"{_WAITS}, to read a value (item(), bool(), if): {name}", _KEEP)
        elif on_device and _shape_depends(func, name, args, kwargs):
            self.add(SHAPE, f"{_WAITS}, since a shape depends on values: {name}", _FIXED)
        return result

    def _judge_copy(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        # ``_to_copy`` takes only the source and returns the target; ``copy_`` takes target and
        # source.
        source, target = (args[0], result) if name == "_to_copy" else (args[1], args[0])
        given = args[2] if name == "copy_" and len(args) > 2 else False
        is_async = bool(kwargs.get("non_blocking", given))
        to_device = on_cpu(source) and self._device.holds_work(target)
        from_device = self._device.holds_work(source) and on_cpu(target)
        if not source.numel() or not (to_device or from_device):
            return
        # From memory that is not pinned, even a copy with ``non_blocking`` is staged by the host.
        if to_device and self._device.pins_memory and not source.is_pinned():
            self.add(UNPINNED, "a copy to the device from memory that is not pinned", _PIN)
        elif not is_async:
            self.add(SYNC, f"{_WAITS}: a copy that blocks", _PIN if to_device else _TO_HOST)
        elif from_device and self._device.pins_memory and not target.is_pinned():
            self.add(SYNC, f"{_WAITS}: a copy to memory that is not pinned", _TO_HOST)

    def add(self, rule: str, text: str, fix: str) -> None:
        """Record a finding at the line that runs."""
        self.findings[Finding(rule, self._place(), text, fix)] += 1

    def add_unseen(self) -> None:
        """Record a wait that torch reports, unless there is a finding for the same place."""
        if self._place() not in {finding.place for finding in self.findings}:
            self.add(SYNC, f"{_WAITS}, as torch reports", _KEEP)

    def _place(self) -> str:
        return f"{_line_of(sys._getframe())}task {self.task!r}"


_WAITS = "the host waits for all work that it has queued on the device"
_MADE = "make it once, before the loop, or in the loader"
_TO_HOST = f"{_KEEP}; copy it into pinned memory, with non_blocking=True, and wait for an event"


def _shape_depends(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _INDEXED:
        masks = [t for t in tensors_of(args[1]) if t.dtype in (torch.bool, torch.uint8)]
        # torch fills in a single value under a mask without reading the mask on the host.
        return bool(masks) and not (name in _MASKED_WRITES and args[2].numel() == 1)
    if kwargs.get("output_size") is not None:
        return False
    return torch.Tag.dynamic_output_shape in func.tags


@contextmanager
def sync_debug(device: Device, on_wait: Callable[[], object]) -> Iterator[None]:
    """Call ``on_wait`` at each wait that torch's sync debug mode reports inside the block.

    torch reports waits by warnings. Devices without this mode report none.
    """
    module = torch.get_device_module(device.type)
    if not hasattr(module, "set_sync_debug_mode"):
        yield
        return
    before = module.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Only ``showwarning`` is called at the time of the wait, with the stack still in place.
        show = warnings.showwarning

        def show_others(message: Warning | str, *rest: Any, **named: Any) -> None:
            if _TOLD in str(message):
                on_wait()
            else:
                show(message, *rest, **named)

        # Switching the mode on warns as well, once; that warning is no wait. The filters end with
        # the block, but ``set_sync_debug_mode`` is global and has to be reset.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        warnings.filterwarnings("always", message=f".*{_TOLD}")
        warnings.showwarning = show_others
        module.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            module.set_sync_debug_mode(before)


_TOLD = "called a synchronizing"


def _line_of(frame: FrameType | None) -> str:
    """Return ``file:line, `` of the user's code that runs, or else of a library; "" if neither."""
    line = ""
    # The walk goes outwards and ends at ``swpipe._engine.serial``, which called the task.
    while frame is not None and frame.f_globals.get("__name__") != "swpipe._engine.serial":
        module = frame.f_globals.get("__name__", "")
        path = Path(frame.f_code.co_filename)
        if _is_of_loop(module):
            own = "site-packages" not in path.parts
            # The innermost line of the user's own code is preferred. Without one, it is the
            # innermost line of an installed library.
            if own or not line:
                shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
                line = f"{shown}:{frame.f_lineno}, "
            if own:
                break
        frame = frame.f_back
    return line


def _is_of_loop(module: str) -> bool:
    """Return whether a module is none of torch, Python or swpipe, except for swpipe's workloads."""
    top = module.partition(".")[0]
    framework = top == "swpipe" and not module.startswith("swpipe.tasks.")
    return not (framework or top == "torch" or top in sys.stdlib_module_names)
