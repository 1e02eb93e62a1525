"""Races between the streams of a loop, found without a GPU, and however the streams are timed.

::

    operators            a dispatch mode on each thread ──┐  which bytes, read or written
    events, waits        torch's trace callbacks       ───┼──> stream_clocks ──> races
    tasks, iterations    an observer of all pipelines  ───┘

The simulated device reports to the same callbacks as CUDA, those of ``torch.cuda._sanitizer``. That
sanitizer compares tensors by their first byte, forgets memory that is freed, and does not see the
host's side of copies; so only its callbacks are used here.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import _has_storage as has_storage

import swpipe
from swpipe._engine.observers import Observer, Observers
from swpipe._values.storages import Storages, described, span_of
from swpipe._values.walk import parts_of
from swpipe.device import on_cpu, resolve
from swpipe.device.trace_callbacks import stream_number, trace_callbacks
from swpipe.inference.operators import ALIASED, OperatorRecorder, tensors_of
from swpipe.program import Instruction
from swpipe.testing.same_numbers import Loop, overlapped, pipeline_of, tasks_of
from swpipe.testing.stream_clocks import HOST, Bytes, MemoryHistory, StreamClocks, Use


@dataclass(frozen=True)
class Access:
    """One side of a race.

    Attributes:
        task: The task; "" outside swpipe's tasks.
        iteration: The number from 0; outside tasks, that of the items that the loop has returned.
        place: The line that launched it, "file.py:12"; "backward" for autograd's own work.
        operator: The name of the operator, such as ``aten::copy_``.
        stream: The plan's name for it, or "default stream", "stream 3", "host".
        writes: Whether it writes the memory.
    """

    task: str
    iteration: int
    place: str
    operator: str
    stream: str
    writes: bool

    def __str__(self) -> str:
        task = f"task {self.task!r}, " if self.task else ""
        return (
            f"{'write' if self.writes else 'read'} by {self.operator} on {self.stream} "
            f"({task}iteration {self.iteration}, {self.place})"
        )


@dataclass(frozen=True)
class Race:
    """Two accesses to the same memory that nothing orders.

    Attributes:
        memory: Data type and shape of the tensor: "float32 [64]".
        first: The access that was launched first.
        second: The other.
        reused: The first tensor was freed in between, and its memory given to a second one.
        count: In how many pairs of launches the two places raced.
    """

    memory: str
    first: Access
    second: Access
    reused: bool
    count: int = 1

    @property
    def missing(self) -> str:
        """The wait that would order the two."""
        if self.second.stream == "host":
            return f"the host waits for an event recorded on {self.first.stream} after the first"
        wait = f"{self.second.stream} waits for an event recorded on {self.first.stream} after it"
        if self.reused:
            return (
                f"tensor.record_stream({self.first.stream}) before the tensor is freed, or {wait}"
            )
        return wait

    def __str__(self) -> str:
        return f"{self.memory}: {self.first}, then {self.second}. Missing: {self.missing}"


def find_races(
    make_loop: Callable[[], Loop | Iterable[Any]], iterations: int = 20
) -> tuple[Race, ...]:
    """Run a loop, and find accesses to the same memory that no wait orders.

    In a test::

        def make_loop():
            device = torch.accelerator.current_accelerator()
            model = Model().to(device)
            for batch in MyPrefetcher(batches(), device):
                yield model(batch).sum()

        def test_the_prefetcher_has_no_race():
            assert find_races(make_loop) == ()

    The loop runs on this process's accelerator. Without one it runs on a simulated device, in
    another process, which makes a loop of its own: define ``make_loop`` at the top level of a
    module. The device is built on first use, which needs a C++ compiler. A race is found however
    the streams were timed. Operators of torch are seen, on threads that start while the loop
    runs; numpy and kernels that are launched without torch are not. Use few iterations: each
    operator is recorded.

    Args:
        make_loop: Makes a ``Loop``, which is run as overlapped, or under its plan; or anything
            that can be iterated over, each item being one iteration: a prefetcher, a generator that
            trains. It may use swpipe or not.
        iterations: How many to run at most.

    Returns:
        One race for each pair of places, in the order in which they were found.

    Raises:
        ValueError: ``iterations`` is below 1.
        RuntimeError: The simulated device cannot be built here, or this machine's accelerator has
            no trace callbacks.
        TypeError: ``make_loop`` cannot be sent to the other process.
        BaseException: What the loop raises.
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}: give at least 1")
    if torch.accelerator.is_available():
        return _Finder().run(make_loop, iterations)
    # Tried here, because the error of the process pool would not say what to do.
    try:
        pickle.dumps(make_loop)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"{make_loop!r} cannot be sent to the process with the simulated device: {error}; "
            "define it at the top level of a module"
        ) from error
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_on_simulated_device, make_loop, iterations).result()


def _on_simulated_device(make_loop: Callable[[], Any], iterations: int) -> tuple[Race, ...]:
    # In the other process only: a process that has loaded it sees an accelerator from then on.
    from swpipe.testing import simulated

    simulated.load()
    return _Finder().run(make_loop, iterations)


class _Finder(Observer):
    """An observer that records the device work of one loop, and the races in it.

    Its attributes are changed under a lock. The lock is reentrant: the garbage collector may delete
    an event, which is reported to a callback, at any allocation.
    """

    def __init__(self) -> None:
        self.iteration = 0
        self.local = threading.local()
        self._lock = threading.RLock()
        self._clocks = StreamClocks()
        self._memory = MemoryHistory(self._clocks)
        self._storages = Storages()
        self._names: dict[int, str] = {HOST: "host", 0: "default stream"}
        self._races: dict[tuple[Access, ...], Race] = {}
        self.device = resolve(None)

    def run(self, make_loop: Callable[[], Any], iterations: int) -> tuple[Race, ...]:
        """Run a loop under observation, and return its races."""
        with self._observing():
            with _Watch(self):
                # The loop is made under observation: it may launch work, and start threads.
                steps = iter(_steps(make_loop()))
                try:
                    for _ in islice(steps, iterations):
                        self.iteration += 1
                finally:
                    # Only generators can be closed: others are left as they are.
                    getattr(steps, "close", int)()
            self.device.synchronize()
        return tuple(self._races.values())

    @contextmanager
    def _observing(self) -> Iterator[None]:
        """Register all callbacks, hooks and observers within the block."""
        # A wait of the host is a wait of one more stream, so that it needs no clock of its own.
        clocks = self._clocks
        callbacks: dict[str, Callable[..., None]] = {
            "EventRecord": clocks.record,
            "EventWait": clocks.wait,
            "EventDeletion": clocks.forget,
            "EventSynchronization": clocks.wait,
            "StreamSynchronization": clocks.synchronize,
            "DeviceSynchronization": clocks.synchronize,
        }
        registries = trace_callbacks(self.device.type)
        added = []
        for name, callback in callbacks.items():
            registry = getattr(registries, f"{name}Callbacks")
            locked = self._locked(callback)
            registry.add_callback(locked)
            added.append((registry, locked))
        # Dispatch modes are per thread. The profile function is the only hook that runs first on
        # each new thread, no matter what starts it.
        profile = threading.getprofile()
        before = Observers.everywhere
        threading.setprofile(self._begin_thread)
        Observers.everywhere = (*before, self)
        try:
            yield
        finally:
            Observers.everywhere = before
            threading.setprofile(profile)
            for registry, locked in added:
                registry.callback_list.remove(locked)

    def _locked(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a callback that holds the lock: torch calls it on whatever thread launches."""

        def call(*numbers: int) -> None:
            with self._lock:
                callback(*numbers)

        return call

    def _begin_thread(self, frame: FrameType, event: str, argument: Any) -> None:
        """Watch a new thread from its first function on."""
        # The thread is not profiled any further, and ends with the watch still in place.
        sys.setprofile(None)
        _Watch(self).__enter__()

    def start(self, ins: Instruction, iteration: int) -> None:
        if ins.stream is not None:
            self._names[stream_number(self.device.current_stream())] = str(ins.stream)
        self._tasks.append((ins.task, iteration))

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        del self._tasks[-1:]

    @property
    def _tasks(self) -> list[tuple[str, int]]:
        """The tasks that run on this thread, innermost last; a new list if it is not watched."""
        return getattr(self.local, "tasks", [])

    def see(self, watch: _Watch, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator, and record what it reads and writes."""
        if func is torch.ops.aten.record_stream.default:
            with self._lock:
                for memory, _ in self._memory_of(args[0]):
                    self._memory.record_stream(memory.base, stream_number(args[1]))
            return func(*args, **kwargs)
        arguments = [
            (t, mode)
            for value, mode in watch.arguments(func, args, kwargs)
            for t in tensors_of(value)
        ]
        stream = stream_number(self.device.current_stream())
        with self._lock:
            # The launch is numbered before the call, in which the host may wait for it. Whether an
            # operator without tensor arguments runs on the device shows in its result only, so that
            # the stream and the host both take a number here.
            launch = self._clocks.launch(stream)
            host_launch = self._clocks.launch(HOST)
            located = [
                (t, mode, memory) for t, mode in arguments for memory, _ in self._memory_of(t)
            ]
        result = func(*args, **kwargs)
        # Such an operator changes sizes and strides, and touches no memory.
        if torch.Tag.inplace_view in func.tags:
            return result
        with self._lock:
            results = [(t, *each) for t in tensors_of(result) for each in self._memory_of(t)]
            bases = {memory.base for _, memory, _ in results}
            # A copy instead of a view reads its argument.
            uses = [
                (t, memory, "w" in mode)
                for t, mode, memory in located
                if mode and not (mode == ALIASED and memory.base in bases)
            ]
            # An operator writes the memory that it creates, unless it leaves it as it was.
            if not func.overloadpacket.__name__.startswith(_ONLY_ALLOCATE):
                uses += [(t, memory, True) for t, memory, new in results if new]
            if all(map(on_cpu, [*(t for t, _ in arguments), *tensors_of(result)])):
                launch = host_launch
                stream = HOST
            for tensor, memory, writes in uses:
                access = watch.access(func._schema.name, self._name(stream), writes)
                use = Use(memory, writes, stream, launch, access)
                for other in self._memory.add(use):
                    self._report(Race(described(tensor), other.access, access, other.freed))
        return result

    def _memory_of(self, tensor: Tensor) -> Iterator[tuple[Bytes, bool]]:
        """Yield the memory of a tensor, and whether it is seen for the first time.

        Host memory that is not pinned is left out: copies of it are done when they return.
        """
        for part in parts_of(tensor):
            on_host = on_cpu(part)
            if not has_storage(part) or not part.numel() or part.is_meta:
                continue
            if on_host and not part.is_pinned():
                continue
            base = part.untyped_storage().data_ptr()
            # A storage is new although its address is known if the allocator has given the memory
            # again.
            new = any(new for _, new in self._storages.add(part))
            if new:
                self._memory.allocate(base, on_host=on_host)
            yield Bytes(base, *span_of(part)), new

    def _report(self, race: Race) -> None:
        """Add a race, or count it if the same two places have raced before."""
        # Without the iteration: a loop repeats a race in every iteration.
        key = tuple(replace(access, iteration=0) for access in (race.first, race.second))
        known = self._races.get(key, replace(race, count=0))
        self._races[key] = replace(known, count=known.count + 1)

    def _name(self, stream: int) -> str:
        """Return a stream's name in the plan, or else "stream 1", "stream 2" and so on."""
        return self._names.setdefault(stream, f"stream {len(self._names) - 1}")


_ONLY_ALLOCATE = ("empty", "new_empty")
"""The beginnings of the names of operators that write nothing into the memory they create."""


class _Watch(OperatorRecorder):  # type: ignore[no-untyped-call]
    """A dispatch mode that watches one thread; autograd's threads inherit it."""

    def __init__(self, finder: _Finder) -> None:
        super().__init__(finder.device)
        self._finder = finder
        # The tasks that run on the thread, with their iterations; a task may run a pipeline.
        self._tasks: list[tuple[str, int]] = []
        finder.local.tasks = self._tasks

    def access(self, operator: str, stream: str, writes: bool) -> Access:
        """Return the description of an access by what runs now."""
        task, iteration = self._tasks[-1] if self._tasks else ("", self._finder.iteration)
        return Access(task, iteration, _place(), operator, stream, writes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._finder.see(self, func, args, kwargs or {})


_FOREIGN = tuple(path for module in (torch, swpipe) for path in module.__path__)


def _place() -> str:
    """Return the innermost line that is neither torch's nor swpipe's."""
    # Generated code, as of dataclasses, has a file name that begins with "<".
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith((*_FOREIGN, "<")):
        frame = frame.f_back
    if frame is None:
        return "backward or swpipe"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _steps(loop: Any) -> Iterable[Any]:
    """Run a loop, and yield after each of its iterations."""
    if not isinstance(loop, Loop):
        yield from loop
        return
    is_overlapped = loop.plan is None
    runner: Any = (
        overlapped(loop, check_effects=False)
        if is_overlapped
        else pipeline_of(loop, tasks_of(loop))
    )
    with runner:
        for ctx in runner if is_overlapped else runner.iterate(loop.loader):
            loop.body(ctx)
            yield
