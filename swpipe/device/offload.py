"""Offload of memory: one task moves it to the host, a second task restores it before its use.

    compute   forward 1   forward 2 (1) forward 3   ...   backward 3   backward 2 (3) backward 1
    stash                 [ 1 to the host ][ 2 ...
    restore                                                        (2)[ 1 to the device ]

Guarantees
    - The compute stream waits for the copy to the host before memory is freed (1). Memory is
      allocated on that stream again, and the copy back waits for it (2). So later work of this
      stream can use the memory, and the peak does not depend on how far the host is ahead.
    - Memory is back before it is used: the plan orders the restore before its user (3). A tensor
      that autograd has saved is refused if it was modified before it was copied.
    - Memory that outlives an iteration is back at the iteration's end, also after a failure, so
      that the loop's body and a checkpoint find it.

Assumptions
    - The two tasks are in the same thread group as the tasks between which they run.
    - Only tasks that name the pair's state use memory that outlives an iteration.

Without streams, as on a CPU, the two tasks do nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from swpipe.core.messages import shown
from swpipe.core.plan import PipelinePlan, TaskSchedule
from swpipe.core.resolved import resolve_plan
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.core.task_memory import Block
from swpipe.device.choose import resolve
from swpipe.device.protocol import Device, Event, Stream
from swpipe.errors import PlanError, Problem

__all__ = ["Offload", "offloaded", "with_offload"]

# Private: the number of references to a storage, which tells whether freeing it has an effect.
_uses = torch._C._storage_Use_Count

STASH = "stash"
RESTORE = "restore"
"""The names of the streams, and the first words of the tasks' names."""

HELD = "stashed"
"""The attribute of the context that has what autograd has saved in an iteration."""

LEAST_BYTES = 2**16
"""The smallest tensor that is offloaded; copies of smaller tensors cost more than they save."""


class _Memory:
    """The bytes of one storage, on the device or on the host.

    Attributes:
        storage: None while the bytes are on the host, unless the storage is emptied in place.
        home: The stream that uses the memory.
        saved: The tensors in the memory that autograd has saved, with their versions at that time.
        on_host: Whether the bytes are on the host only.
    """

    def __init__(self, storage: torch.UntypedStorage, home: Stream, *, in_place: bool) -> None:
        self.storage: Any = storage
        self.home = home
        self.saved: list[tuple[Tensor, int]] = []
        self.on_host = False
        self._size = storage.nbytes()
        self._in_place = in_place
        self._host: Any = None

    @property
    def copied(self) -> bool:
        """Whether the host has a copy."""
        return self._host is not None and not self._in_place

    def copy_out(self, device: Device) -> None:
        """Copy the bytes to the host on the current stream."""
        # Backward would get the modified values, and autograd could not tell.
        for tensor, version in self.saved:
            _check_version(tensor, version)
        # Memory that outlives iterations keeps its buffer: pinning memory is slow.
        if self._host is None:
            pinned = device.pins_memory
            self._host = torch.empty(self._size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._host.copy_(self.bytes(), non_blocking=device.pins_memory)

    def free(self) -> None:
        """Release the device's memory, after the home stream was made to wait for the copy."""
        if self._in_place:
            self.storage.resize_(0)  # parameters and optimizer state keep their storage
        # One reference is this object's, and each saved tensor has one.
        elif _uses(self.storage._cdata) > 1 + len(self.saved):
            self.forget_copy()  # other references remain, so that nothing would be freed
            return
        else:
            self.storage = None
            self.saved.clear()
        self.on_host = True

    def copy_in(self, device: Device) -> None:
        """Copy the bytes back on the current stream, into memory of the home stream."""
        # Allocated on the home stream: the allocator reuses such memory in that stream's order, so
        # that nothing has to be recorded for the stream that copies.
        with device.on(self.home):
            if self.storage is None:
                whole = torch.empty(self._size, dtype=torch.uint8, device=device.name)
                self.storage = whole.untyped_storage()
            else:
                self.storage.resize_(self._size)
            event = device.new_event()
            event.record(self.home)
        event.wait(device.current_stream())  # (2) earlier work of that stream may use the memory
        with _unwatched():
            self.bytes().copy_(self._host, non_blocking=device.pins_memory)
        self.on_host = False
        self.forget_copy()

    def forget_copy(self) -> None:
        """Drop the host copy, unless the memory outlives iterations and reuses its buffer."""
        if not self._in_place:
            self._host = None

    def bytes(self) -> Tensor:
        """Return a tensor of the storage, with a version counter of its own."""
        device = self.storage.device
        with _unwatched(), torch.no_grad():
            return torch.empty(0, dtype=torch.uint8, device=device).set_(self.storage)


class _Saved:
    """A tensor that autograd has saved, described as a view of a ``_Memory``."""

    def __init__(self, memory: _Memory, tensor: Tensor) -> None:
        self._memory = memory
        self._number = len(memory.saved)
        self._dtype = tensor.dtype
        self._place = tensor.storage_offset()
        self._size = tensor.size()
        self._stride = tensor.stride()
        memory.saved.append((tensor.detach(), tensor._version))

    def unpack(self) -> Tensor:
        """Return the saved tensor for the backward pass."""
        memory = self._memory
        # Memory that was never freed still has the tensor itself.
        if memory.saved:
            tensor, version = memory.saved[self._number]
            _check_version(tensor, version)
            return tensor
        if memory.on_host:
            raise RuntimeError(
                "backward needs a tensor that is on the host: the plan must run the pair's task "
                f"{RESTORE!r} before it, as with_offload(plan, pairs) does"
            )
        whole = memory.bytes()
        # A view needs a whole number of elements; a storage may have a few bytes more.
        values = whole[: len(whole) // self._dtype.itemsize * self._dtype.itemsize]
        return values.view(self._dtype).as_strided(self._size, self._stride, self._place)


def _check_version(tensor: Tensor, version: int) -> None:
    """Raise an error if a tensor was modified in place since autograd saved it."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor that backward needs was modified in place ({tensor.dtype}, "
            f"{list(tensor.shape)}): it is at version {tensor._version}, and was saved at {version}"
        )


class _Stashes:
    """The memories that one iteration or one pair has moved to the host.

    Attributes:
        of_pair: Pair's name to the memories that autograd has saved for it.
    """

    def __init__(self) -> None:
        self.of_pair: dict[str, list[_Memory]] = {}
        # The memory at the address of a storage, with the version of its first tensor.
        self._known: dict[int, tuple[_Memory, int]] = {}
        # Copies to the host, oldest first: their memory is freed later, so that the stream that
        # frees it need not wait for a copy that has just begun.
        self._copying: deque[tuple[Event, list[_Memory]]] = deque()

    def memory_of(self, tensor: Tensor, home: Stream) -> _Memory:
        """Return the memory of a tensor; layers may save one storage several times."""
        storage = tensor.untyped_storage()
        known, version = self._known.get(storage._cdata, (None, 0))
        # Memory that was freed, or copied with other values, does not hold this tensor's values.
        if known is None or known.on_host or (known.copied and version != tensor._version):
            known = _Memory(storage, home, in_place=False)
            self._known[storage._cdata] = known, tensor._version
        return known

    def copy_out(self, memories: Iterable[_Memory], device: Device) -> None:
        """Copy memories to the host on the current stream."""
        memories = [*memories]
        with _unwatched():  # copies on the host are not counted among what iterations hold
            for memory in memories:
                memory.copy_out(device)
        event = device.new_event()
        event.record(device.current_stream())
        self._copying.append((event, memories))

    def free(self, all_but: int = 0) -> None:
        """Free the device's memory of all copies but the latest ``all_but`` ones."""
        while len(self._copying) > all_but:
            event, memories = self._copying.popleft()
            for home in {memory.home for memory in memories}:
                event.wait(home)  # (1)
            for memory in memories:
                memory.free()

    def copy_in(self, memories: Iterable[_Memory], device: Device) -> None:
        """Copy memories back on the current stream; memories that were not freed stay in place."""
        memories = [*memories]
        # From here on, backward frees memories, and others may get their addresses.
        self._known.clear()
        # Memories that are needed again must not be freed by the copies that still wait.
        for _, copying in self._copying:
            for memory in [each for each in copying if each in memories]:
                copying.remove(memory)
                memory.forget_copy()
        self.free()
        for memory in memories:
            if memory.on_host:
                memory.copy_in(device)


class Offload:
    """Two tasks, ``stash`` and ``restore``, that keep memory on the host between two other tasks.

    Without ``tensors``, the memory is what autograd saves in the task ``after`` for the backward in
    the task ``before``. With it, the memory outlives iterations, as an optimizer's state does. Add
    the tasks by ``offloaded``, and schedule them by ``with_offload``.

    Args:
        name: The name of the pair, as in "stash layer3".
        after: The task after which the memory goes to the host.
        before: The task that uses it again.
        device: The pipeline's device.
        tensors: Returns the tensors whose memory it is, each time it is stashed.
        freed: The task before which the device's memory goes, for work between the two. None, for
            what autograd saves: the task ``after`` of the pair after the next.
        during: The task that the copy back overlaps; None for the one directly before ``before``.
        state: The state's name, for memory that outlives iterations. The tasks of the pair,
            ``freed`` and ``before`` then declare it; all others that use the memory have to.
        least_bytes: Smaller tensors stay on the device.

    Raises:
        ValueError: ``tensors`` are given without ``freed`` and ``state``, or a state without them.
    """

    def __init__(
        self,
        name: str,
        after: str,
        before: str,
        device: Device | torch.device | str | None = None,
        *,
        tensors: Callable[[], Iterable[Tensor]] | None = None,
        freed: str | None = None,
        during: str | None = None,
        state: str | None = None,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        if (tensors is None) != (state is None) or (freed is None and state is not None):
            raise ValueError(
                f"offload {name!r}: tensors, freed and state say that the memory outlives an "
                "iteration: give all three, or none for what autograd saves"
            )
        self.name = name
        self.after = after
        self.before = before
        self.freed = freed
        self.during = during
        self._device = resolve(device)
        self._tensors = tensors
        self._least = least_bytes
        self._place = torch.device(self._device.name)
        self._own = _Stashes()
        self._kept: dict[int, _Memory] = {}
        self.io: tuple[DeclaredIO, ...] = ()
        if state is not None:
            # All other code, such as the loop's body, uses the state between iterations only.
            self.io = (DeclaredIO(state=state, others="", reset=self._bring_back),)
        pure = not self.io
        reads = () if self.io else (HELD,)
        self.stash, self.restore = (
            PipelineTask(f"{what} {name}", run, self.io, pure=pure, reads=reads)
            for what, run in ((STASH, self._stash), (RESTORE, self._restore))
        )

    def watching(self, task: PipelineTask) -> PipelineTask:
        """Return a task that hands over what autograd saves, or that frees memory before it runs.

        Any other task is returned as it is.
        """
        saves = not self.io and task.name == self.after
        frees = task.name == self.freed
        if self.io and (frees or task.name == self.before):
            task = replace(task, io=(*task.io, *self.io), pure=False)
        if not self._device.has_streams or not (saves or frees):
            return task

        def save(ctx: Any) -> None:
            if not hasattr(ctx, HELD):
                setattr(ctx, HELD, _Stashes())
            stashes: _Stashes = getattr(ctx, HELD)
            # The pair before this one is still being copied, and overlaps this task.
            stashes.free(all_but=1)
            memories = stashes.of_pair.setdefault(self.name, [])
            home = self._device.current_stream()

            def pack(tensor: Tensor) -> Any:
                if not self._takes(tensor):
                    return tensor
                memory = stashes.memory_of(tensor, home)
                if memory not in memories:
                    memories.append(memory)
                return _Saved(memory, tensor)

            with saved_tensors_hooks(pack, _unpacked):
                task.fn(ctx)

        def free(ctx: Any) -> None:
            # This task's stream works in the freed memory, so that it is the one to wait.
            for memory in self._kept.values():
                memory.home = self._device.current_stream()
            stashes = self._own if self.io else getattr(ctx, HELD, self._own)
            stashes.free()
            task.fn(ctx)

        reads = None if task.reads is None else (*task.reads, HELD)
        return replace(task, fn=save if saves else free, reads=reads)

    def resident(self) -> Block | None:
        """Return the memory that outlives iterations, as a block; None of activations."""
        if self._tensors is None:
            return None
        size = sum(storage.nbytes() for storage in self._storages())
        return Block(self.restore.name, str(self.freed), size, self.name, later=1)

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return the storages on the device that outlive iterations, each once."""
        storages = [
            tensor.untyped_storage()
            for tensor in (self._tensors or tuple)()
            if tensor.device == self._place and tensor.nbytes >= self._least
        ]
        return [*{storage._cdata: storage for storage in storages}.values()]

    def _takes(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor goes to the host."""
        return (
            type(tensor) is Tensor  # no parameter, nor a view of one
            and not isinstance(tensor._base, nn.Parameter)
            and tensor.device == self._place
            and tensor.layout is torch.strided
            and tensor.nbytes >= self._least
        )

    def _stash(self, ctx: Any) -> None:
        """Begin to copy the memory to the host."""
        if not self._device.has_streams:
            return
        if self._tensors is None:
            stashes: _Stashes | None = getattr(ctx, HELD, None)
            if stashes is not None:  # else the task before was replayed, and has saved nothing
                memories = stashes.of_pair[self.name]
                # Layers share memory: another pair may have copied it already.
                stashes.copy_out([each for each in memories if not each.copied], self._device)
            return
        home = self._device.current_stream()
        before = self._kept
        # An optimizer may have made further state since, or dropped some of it.
        self._kept = {
            storage._cdata: before.get(storage._cdata) or _Memory(storage, home, in_place=True)
            for storage in self._storages()
        }
        self._own.copy_out(self._kept.values(), self._device)

    def _restore(self, ctx: Any) -> None:
        """Begin to copy the memory back to the device."""
        if not self._device.has_streams:
            return
        if self._tensors is None:
            stashes: _Stashes | None = getattr(ctx, HELD, None)
            if stashes is not None:
                stashes.copy_in(stashes.of_pair.pop(self.name), self._device)
        else:
            self._own.copy_in(self._kept.values(), self._device)

    def _bring_back(self) -> None:
        """Restore the memory that a failure has left on the host."""
        # The streams' order is unknown after a failure, so that the host waits before and after.
        self._device.synchronize()
        self._own.copy_in(self._kept.values(), self._device)
        self._device.synchronize()


def _unpacked(saved: Any) -> Any:
    """Return a saved tensor, whether it was offloaded or not."""
    return saved.unpack() if isinstance(saved, _Saved) else saved


@contextmanager
def _unwatched() -> Iterator[None]:
    """Hide operators in this block from dispatch modes that record the effects of tasks."""
    # _DisableTorchDispatch (private) acts as long as the object lives.
    guard = torch._C._DisableTorchDispatch()
    try:
        yield
    finally:
        del guard


def offloaded(tasks: Iterable[PipelineTask], pairs: Iterable[Offload]) -> tuple[PipelineTask, ...]:
    """Return the tasks in serial order, with those of the pairs among them.

    Raises:
        PlanError: A pair names a task that is not there.
    """
    ordered = list(tasks)
    for pair in pairs:
        _check_names(pair, [task.name for task in ordered])
        ordered = [pair.watching(task) for task in ordered]
        names = [task.name for task in ordered]
        # The later one first: it does not move the place of the other one.
        ordered.insert(names.index(pair.before), pair.restore)
        ordered.insert(names.index(pair.after) + 1, pair.stash)
    return tuple(ordered)


def with_offload(plan: PipelinePlan, pairs: Sequence[Offload]) -> PipelinePlan:
    """Return the plan with the tasks of the pairs, on two streams.

    A restore begins one task before its user, or ``during``, and overlaps it. Memory goes before
    the task ``freed``, or else before the task ``after`` of the pair after the next.

    Args:
        plan: A plan for the tasks without those of the pairs.
        pairs: In the order of ``after``.

    Raises:
        PlanError: A pair names a task that the plan does not have, or nothing runs between the two.
    """
    resolved = resolve_plan(plan)
    names = resolved.period_order
    order = [*resolved.period_order]
    schedule = dict(plan.schedule)
    deps = [*plan.deps]
    # The copy of one pair overlaps the next task that saves, so that its memory is freed before the
    # task after that one. Memory that outlives iterations names its task instead.
    saving = [pair for pair in pairs if not pair.io]
    frees = {pair.name: later.after for pair, later in zip(saving, saving[2:], strict=False)}
    for pair in pairs:
        _check_names(pair, names)
        stash = pair.stash.name
        restore = pair.restore.name
        first = schedule[pair.after]
        last = schedule[pair.before]
        schedule[stash] = TaskSchedule(first.stage, STASH, first.thread_group)
        schedule[restore] = TaskSchedule(last.stage, RESTORE, last.thread_group)
        # The restore moves among the tasks of its user's stage, which work on the same iteration.
        alike = [n for n in names if plan.schedule[n].stage == last.stage]
        begin = max(0, alike.index(pair.before) - 1)
        begin = begin if pair.during is None else alike.index(pair.during)
        if first.stage == last.stage and alike.index(pair.after) >= begin:
            raise PlanError(
                [
                    Problem(
                        f"offload {pair.name!r}: no task runs between {pair.after!r} and "
                        f"{pair.before!r}, so the memory would be back at once: leave the pair out"
                    )
                ]
            )
        deps += [(stash, pair.after), (restore, stash), (pair.before, restore)]
        deps += [(restore, alike[begin - 1])] if begin else []
        freeing = pair.freed or frees.get(pair.name)
        deps += [(freeing, stash)] if freeing else []
        order.insert(order.index(pair.after) + 1, stash)
        order.insert(order.index(alike[begin]), restore)
    tasks = offloaded(plan.tasks, pairs) if plan.tasks else ()
    return replace(plan, schedule=schedule, deps=deps, order=order, tasks=tasks)


def _check_names(pair: Offload, names: Sequence[str]) -> None:
    """Raise an error if a pair names a task that is not among the names."""
    named = (pair.after, pair.before, pair.freed, pair.during)
    unknown = [name for name in named if name not in (None, *names)]
    if unknown:
        text = f"offload {pair.name!r} names {shown(unknown[0])}, which is none of the tasks"
        raise PlanError([Problem(f"{text}: {', '.join(names)}")])
