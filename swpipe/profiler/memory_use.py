"""Memory of tasks: which task allocates it and which task frees it, seen in serial iterations.

Memory is counted by storage: what an operator allocates while a task runs, what the context
reaches, and the batch. Any owner of a storage counts: an attribute, an object of the user, or
autograd, which saves tensors for the backward. Among other values, objects with ``nbytes``, such as
arrays, count if the context reaches them. An array in the memory of a tensor counts as that tensor.

Memory that outlives its iteration is followed through the next one: gradients may be freed when
that iteration sets them to None. Not counted are: memory that outlives the next iteration as well;
memory that existed before, such as parameters and an optimizer's state; memory that a kernel
allocates and frees within itself; and memory that a compiled function keeps for its backward. The
size of a storage is the one that it had when it was first seen.

Weak references show whether a storage still exists. They are checked after each task, and within a
task whenever the memory may exceed the largest amount found so far by the factor ``_STEP``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from swpipe._state.loop import LoopState
from swpipe._values.stateful import Owners
from swpipe._values.storages import nbytes
from swpipe._values.walk import leaves_in, map_tensors, tensors_held, unsharded
from swpipe.analysis.last_readers import users_of, uses_of
from swpipe.core.context import TypedContext
from swpipe.core.effects import EffectTable
from swpipe.core.plan import PULL, PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.core.task_memory import KEPT, Block, TaskMemory, joined
from swpipe.device import CpuDevice, Device
from swpipe.inference.operators import OperatorRecorder, tensors_of
from swpipe.pipeline import SWPipeline
from swpipe.profiler.trial import trial_state

Key: TypeAlias = int
"""The identity of memory: the number of a storage, or the inverted id, below 0, of an array."""

ITERATIONS = 3
"""The number of iterations that run on each batch."""

_STEP = 1.01
_LEAST = 2**12


def measure_memory(
    tasks: Iterable[PipelineTask],
    batches: Iterable[Any],
    *,
    device: Device | torch.device | str | None = None,
    context: type[TypedContext] | None = None,
    state: Any = None,
    keep: Sequence[str] | None = None,
    effects: EffectTable | None = None,
) -> TaskMemory:
    """Run a few serial iterations, find what tasks hold, and restore all state afterwards.

    Args:
        tasks: The tasks in serial order.
        batches: At least one. Each iteration gets a copy, in which the tensors are cloned.
        device: See ``SWPipeline``.
        context: See ``SWPipeline``.
        state: The state to restore; see ``TaskProfiler``.
        keep: ``PipelinePlan.keep`` of the plans for which this is measured.
        effects: The recorded effects, for the uses that tasks do not declare.

    Returns:
        The memory of the tasks, for the batch with which a serial loop holds most.

    Raises:
        ValueError: There are no batches.
        BaseException: Any exception of a task.
    """
    memories: list[TaskMemory] = []
    tasks = tuple(tasks)
    names = [task.name for task in tasks]
    users = users_of(uses_of(tasks, effects))
    for batch in batches:
        # The state is determined once, from the first batch, and holds for all batches.
        if state is None:
            serial = PipelinePlan.serial(tasks)
            with SWPipeline(serial, tasks, device=device, context=context) as pipe:
                state = Owners(trial_state(pipe, batch, None).owners)
        log = _MemoryLog(names, users, keep)
        watched = [replace(task, fn=log.watch(task)) for task in tasks]
        with (
            SWPipeline(
                replace(PipelinePlan.serial(watched), keep=keep),
                device=device,
                context=context,
                check_effects=False,
                effects=None if keep is None else effects,
            ) as pipe,
            LoopState(tasks, state, pipe.device).trial(),
        ):
            # Batches are pulled by the pipeline, as under any plan: a serial run would hold the
            # batch until its end.
            copies = (map_tensors(batch, _copy) for _ in log.iterations())
            for _ in range(ITERATIONS):
                pipe.progress(copies)
                log.end_iteration()
        memories.append(log.memory())
    if not memories:
        raise ValueError("batches is empty: give at least one batch to measure on")
    return max(memories, key=lambda memory: memory.serial_peak(names))


@dataclass(eq=False, slots=True)
class _Piece:
    """Memory, from the task that allocates it to the task that frees it; -1 is the pull."""

    bytes: int
    iteration: int
    begin: int
    name: str = ""
    end: int = -1
    removed: bool = False
    users: tuple[str, ...] = ()


class _Event(NamedTuple):
    """An amount of memory, seen at a task: allocated, or freed if negative."""

    piece: _Piece
    task: int
    bytes: int


class _MemoryLog(OperatorRecorder):  # type: ignore[no-untyped-call]
    """A log of the memory of successive iterations of tasks with these names.

    While a task runs, the log is the dispatch mode that sees the results of operators. ``users``
    maps an attribute to the tasks that use it, for attributes that are dropped because they are not
    in ``keep``. If ``keep`` is None, all attributes stay.
    """

    def __init__(
        self,
        tasks: list[str],
        users: Mapping[str, tuple[str, ...]],
        keep: Sequence[str] | None,
    ) -> None:
        super().__init__(CpuDevice())
        self._tasks = tasks
        self._users = users
        self._keep = keep
        self._left: dict[str, set[Key]] = {}  # what the context reached after the last task
        self._before: set[Key] = set()  # what the context reached when the task began
        self._live: dict[Key, _Piece] = {}
        self._events: list[_Event] = []
        self._iteration = -1
        self._task = -1
        self._may_hold = self._most = 0

    def iterations(self) -> Iterator[int]:
        """Yield iteration numbers; each iteration begins with the memory left by earlier ones."""
        for self._iteration in range(ITERATIONS):
            self._task = -1
            self._events = [_Event(piece, -1, piece.bytes) for piece in self._live.values()]
            yield self._iteration

    def end_iteration(self) -> None:
        """Record what is freed together with the iteration's context."""
        self._task = len(self._tasks)
        # First what the plan does not keep, so that it counts as gone at its last use, then the
        # rest.
        keeps = self._keep or ()
        self._look_between({name: keys for name, keys in self._left.items() if name in keeps})
        self._look(set())
        if any(piece.iteration == self._iteration for piece in self._live.values()):
            gc.collect()  # memory kept only by reference cycles counts as freed
            self._look(set())

    def watch(self, task: PipelineTask) -> Callable[[Any], None]:
        """Return the task's function, wrapped so that its memory is followed."""

        def run(ctx: Any) -> None:
            # Identities of the values show afterwards which attributes the task replaced.
            values = {name: id(value) for name, value in vars(ctx).items()}
            before = self._find(ctx)
            self._look_between(before)
            self._before = set().union(*before.values())
            self._task += 1
            self._may_hold = self._most = sum(piece.bytes for piece in self._live.values())
            with self:
                task.fn(ctx)
            # An attribute that was deleted or replaced no longer reaches what it reached before the
            # task.
            after = self._find(ctx)
            unchanged = {name for name, value in vars(ctx).items() if id(value) == values.get(name)}
            gone = (keys for name, keys in before.items() if name not in unchanged)
            self._look(set().union(*after.values()), set().union(*gone))
            self._left = after

        return run

    def _look_between(self, there: Mapping[str, set[Key]]) -> None:
        """Record what was dropped after the last task because the plan does not keep it."""
        went = {name: keys for name, keys in self._left.items() if name not in there}
        if went and self._keep is not None:
            live = dict(self._live)
            stays = set().union(*there.values())
            self._look(stays)
            # At the end, everything is gone. What is kept under another name was not freed by the
            # drop.
            for key in live.keys() - self._live.keys() - stays:
                names = (name for name, keys in went.items() if key in keys)
                users = {user: None for name in names for user in self._users.get(name, ())}
                live[key].users = tuple(users)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [*tensors_of(result)]
        if tensors:
            # Only new storages count: an operator may return its argument, or a view of it.
            old = {number for tensor in tensors_of((args, kwargs)) for number in nbytes(tensor)}
            for tensor in tensors:
                if not nbytes(tensor).keys() <= old:
                    self._made(tensor)
        return result

    def _made(self, tensor: Tensor) -> None:
        """Record the memory of a tensor that an operator allocated."""
        size = sum(size for key, size in nbytes(tensor).items() if key not in self._live)
        # Checking all weak references for each operator would be slow. They are checked only if the
        # total may have reached a new maximum; what was freed unnoticed makes it an overestimate.
        if self._may_hold + size > _STEP * self._most + _LEAST:
            self._look(removed=self._before)
            self._most = max(self._most, self._may_hold + size)
        self._add_tensor(tensor)

    def _add_tensor(self, tensor: Tensor, name: str = "") -> set[Key]:
        [*self.storages.add(tensor)]
        return self._add(nbytes(tensor), name)

    def _add(self, sizes: Mapping[Key, int], name: str = "") -> set[Key]:
        # The first name that reaches the memory is its name.
        for key, size in sizes.items():
            if key not in self._live and size:
                self._live[key] = piece = _Piece(size, self._iteration, self._task)
                self._events.append(_Event(piece, self._task, size))
                self._may_hold += size
            if key in self._live:
                self._live[key].name = self._live[key].name or name
        return {*sizes}

    def _find(self, ctx: Any) -> dict[str, set[Key]]:
        """Return the memory that each attribute of the context reaches."""
        reached: dict[str, set[Key]] = {}
        places = set()  # addresses of tensors, whose memory arrays may share
        for name, value in vars(ctx).items():
            reached[name] = set()
            for tensor in (part for whole in tensors_held(value) for part in unsharded(whole)):
                reached[name] |= self._add_tensor(tensor, name)
                if type(tensor) is Tensor and tensor.layout is torch.strided:
                    places.add(tensor.untyped_storage().data_ptr())
        # Arrays come after all tensors, so that an array in the memory of a tensor is recognized.
        for name, value in vars(ctx).items():
            for leaf in leaves_in(value):
                whole = leaf
                while isinstance(
                    getattr(base := getattr(whole, "base", None), "nbytes", None), int
                ):
                    whole = base  # a view counts as its base
                # The address identifies memory that an array shares with a tensor, as by
                # ``Tensor.numpy``.
                place = getattr(whole, "__array_interface__", {}).get("data", (0,))[0]
                if isinstance(whole, Tensor):
                    reached[name] |= self._add_tensor(whole, name)
                elif isinstance(getattr(whole, "nbytes", None), int) and place not in places:
                    reached[name] |= self._add({~id(whole): whole.nbytes}, name)
        return reached

    def _look(self, reached: Set[Key] | None = None, removed: Set[Key] = frozenset()) -> None:
        """Record which memory was freed; an array is freed if nothing reaches it.

        ``reached`` is None within a task, where it is not known.
        """
        for key, piece in [*self._live.items()]:
            there = reached is None or key in reached
            if not (self.storages.alive(key) if key >= 0 else there):
                piece.end = self._task
                piece.removed = key in removed
                self._events.append(_Event(piece, self._task, -piece.bytes))
                del self._live[key]
        self._may_hold = sum(piece.bytes for piece in self._live.values())

    def memory(self) -> TaskMemory:
        """Return the memory of the last iteration, and what it freed of the iteration before."""
        pieces = [*dict.fromkeys(event.piece for event in self._events)]
        carried = [p for p in pieces if p.iteration < self._iteration and p.end >= 0]
        carrying = {piece.begin for piece in carried}
        # What this iteration leaves behind will be freed like that of the iteration before, or
        # stay.
        stay = [p for p in pieces if p.end < 0]
        left = {p for p in stay if p.iteration < self._iteration or p.begin not in carrying}
        names = (*self._tasks, KEPT, PULL)
        # Pieces that begin and end in the same task are part of that task's working memory.
        blocks = joined(
            Block(names[p.begin], names[p.end], p.bytes, p.name, p.removed, int(p in carried))
            if not p.users
            else Block(names[p.begin], KEPT, p.bytes, p.name, users=p.users)
            for p in pieces
            if p.end >= 0 and (p.begin != p.end or p in carried or p.users)
        )
        # Working memory is the maximum within a task, beyond what the blocks explain.
        held = TaskMemory(blocks).held(self._tasks)
        most = [0] * len(self._tasks)
        events = [event for event in self._events if event.piece not in left]
        for event, total in zip(events, accumulate(e.bytes for e in events), strict=True):
            if 0 <= event.task < len(most):
                most[event.task] = max(most[event.task], total, total - event.bytes)
        active = {event.task for event in events}
        working = {
            name: most[k] - held[k]
            for k, name in enumerate(self._tasks)
            if k in active and most[k] != held[k]
        }
        return TaskMemory(blocks, working)


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.clone().requires_grad_(tensor.requires_grad)
