"""Checks of pure tasks, as far as torch's operators show what the tasks do.

    iteration    3              4              5
    task T       reads table    reads table    reads table      memory that T used in an earlier
                 reads batch    reads batch    reads batch      iteration as well is outside of its
                                writes mean    writes mean      contexts: here the table, the mean

Guarantees
    - In a watched iteration, PlanError is raised for a pure task that draws without
      ``random=True``. It is also raised for a pure task that uses memory which pure tasks used or
      made in an earlier watched iteration, if the task writes the memory, finds it changed, or
      finds that it belongs to a tensor that training changes (a leaf that requires grad). The same
      applies to a task that runs a module whose mode is switched, unless something is compiled in
      the process.
    - A task's own tensors and its batch's tensors may be anything; a task may read what a cache
      gives it.

Assumptions
    - The author's word is trusted for everything outside torch's operators: Python values, numpy,
      files, kernels launched directly, and compiled functions.
    - A change through ``tensor.data`` does not show in a version counter. It shows in a sample of
      the content, for some of the tensors that a task reads
      (``swpipe.inference.sampled_contents``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._values.context_log import attributes
from swpipe._values.fingerprint import version_of
from swpipe._values.storages import StorageId, span_of
from swpipe._values.walk import tensors_in
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import Problem
from swpipe.inference.operators import CREATED, OperatorRecorder, tensors_of
from swpipe.inference.pruned_dict import PrunedDict
from swpipe.inference.sampled_contents import SampledContents, UsedMemory
from swpipe.inference.watched_gradients import Gradient, accumulating
from swpipe.inference.watched_modes import ModuleModes

_MOST_SPANS = 256
"""The maximum number of uses kept per storage, such as a dataset's whose batches are slices."""


@dataclass(slots=True)
class _MemoryUse:
    """A task's use of some memory in one iteration.

    Attributes:
        span: The range of bytes: the first one, and the one after the last.
        tensor: The tensor whose version counter stands for the memory: the first one that the task
            met there, or its base. A weak reference once the task has ended.
        version: The counter's value when the task began to use the memory; once the task has ended,
            the value then. None for a tensor without a counter.
        trains: Whether it is a leaf that requires grad.
        writes: Whether the task wrote the memory.
    """

    span: tuple[int, int]
    tensor: Any
    version: int | None
    trains: bool
    writes: bool = False

    def meets(self, other: _MemoryUse) -> bool:
        """Return whether two uses share bytes."""
        return self.span[0] < other.span[1] and other.span[0] < self.span[1]


class UseRecorder(OperatorRecorder):  # type: ignore[no-untyped-call]
    """A recorder that also notes how a task uses memory, and which gradients it accumulates.

    Attributes:
        uses: Storage to its uses.
        accumulated: Id of a parameter to its gradient, where autograd has accumulated it.
        given: The storages that the context had when the task began.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.uses: dict[StorageId, list[_MemoryUse]] = {}
        self.accumulated: dict[int, Gradient] = {}
        self._owners: dict[StorageId, Tensor] = {}
        self._made: dict[StorageId, weakref.ref[Tensor]] = {}
        self.given: set[StorageId] = set()
        self._may_train = True

    def begin(self, ctx: Any) -> None:
        """Note the memory of the context: the loader may write it anew for each batch."""
        self.given = self._memory_of(ctx)
        self._may_train = torch.is_grad_enabled()  # under no_grad nobody does, or it is seen

    def _memory_of(self, ctx: Any) -> set[StorageId]:
        """Return the storages of all tensors in a context."""
        values = attributes(ctx).values()
        return set[StorageId]().union(*map(self.storages.of, tensors_in([*values])))

    def _record(self, value: Any, mode: str, replays: bool = False) -> None:
        super()._record(value, mode, replays)
        if mode == CREATED and replays and (parameter := accumulating()) is not None:
            self._accumulate(parameter, value)
        for tensor in tensors_of(value) if mode else ():
            if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
                self._use(tensor, mode)

    def _accumulate(self, parameter: Tensor, value: Any) -> None:
        """Note the result of an operator that runs where a parameter's gradient is accumulated.

        The first such result is the gradient; it may be copied on, as into the buckets that ranks
        exchange.
        """
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            new = Gradient.of(parameter, value, self.storages)
            old = self.accumulated.get(id(parameter), new)
            gradient = new if old.tensor() is None else old
            memory = {**old.memory, **new.memory}
            self.accumulated[id(parameter)] = Gradient(parameter, gradient.tensor, memory)

    def _use(self, tensor: Tensor, mode: str) -> None:
        base = tensor if tensor._base is None else tensor._base
        for number in self.storages.of(tensor):
            if number in self.accesses.created:
                self._made[number] = weakref.ref(base)  # weak: watching must not prolong its life
                continue
            # The owner is the first tensor met: detach() gives a tensor with the same version
            # counter that does not lead back to the original.
            owner = self._owners.setdefault(number, base)
            if mode not in ("r", "w", "rw"):
                continue
            span = span_of(tensor)
            uses = self.uses.setdefault(number, [])
            # One use per range of bytes: slices of a storage are separate unless they overlap
            # (meets).
            use = next((use for use in uses if use.span == span), None)
            if use is None:
                trains = self._may_train and owner.is_leaf and owner.requires_grad
                use = _MemoryUse(span, owner, version_of(owner), trains)
                uses.append(use)
            use.writes |= mode != "r"

    def outside(self, ctx: Any) -> Iterator[UsedMemory]:
        """Yield the memory that the task has read and that is not part of its context."""
        own = self.given | self._memory_of(ctx)
        for number in (number for number in self.uses if number not in own):
            name = self.storages.description(number)
            reference = self.storages.reference(number)
            yield UsedMemory(number, name, self._owners[number], reference)

    def left(self) -> Iterator[tuple[StorageId, _MemoryUse]]:
        """Yield the memory that the task has made and that still exists, as used in whole."""
        for number, reference in self._made.items():
            if (tensor := reference()) is not None:
                yield number, _MemoryUse((0, sys.maxsize), tensor, None, trains=False)


class _BesideCompiler(UseRecorder):  # type: ignore[no-untyped-call]
    """A recorder whose own code torch's compiler does not compile."""

    __torch_dispatch__ = OperatorRecorder.__torch_dispatch__

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Private in torch 2.13. This class is used only once the compiler is loaded anyway.
        return True


def use_recorder(device: Device) -> UseRecorder:
    """Return a recorder for one task."""
    kind = _BesideCompiler if "torch._dynamo" in sys.modules else UseRecorder
    return kind(device)


class Fault(NamedTuple):
    """A violation of ``pure=True`` by a task in an iteration.

    Attributes:
        text: The description, which may have a placeholder for what was touched.
        number: The number of the storage; 0 for anything else.
        name: The name of what was touched; of a storage, if there is no better one.
    """

    iteration: int
    text: str
    number: StorageId = 0
    name: str = ""


class PureRuns:
    """The successive runs of one pure task, which show what others change under it."""

    def __init__(self, device: Device) -> None:
        self.modes = ModuleModes()
        self._contents = SampledContents(device)

    def faults(self, ctx: Any, recorder: UseRecorder) -> Iterator[Fault]:
        """Yield the violations found in the iteration that has just ended, or before."""
        for module in self.modes.switched:
            yield Fault(ctx.iter_idx, _SWITCHED, name=f"a {type(module).__name__}")
        # Starts the comparison of this iteration; changed() yields what has arrived, also of
        # earlier ones.
        self._contents.compare(ctx.iter_idx, recorder.outside(ctx))
        for iteration, number, name in self._contents.changed():
            yield Fault(iteration, _CHANGED, number, name)


class PureUses:
    """The memory that the pure tasks of one run have used; its methods are called under a lock."""

    def __init__(self) -> None:
        # Storage to a reference, which keeps its number from being used again, and uses by
        # iteration.
        self._known = PrunedDict[StorageId, tuple[Any, list[tuple[int, _MemoryUse]]]]()
        self._generators: dict[int, tuple[torch.Generator, int]] = {}

    def faults(
        self, task: PipelineTask, iteration: int, recorder: UseRecorder, workers: int
    ) -> Iterator[Fault]:
        """Yield the violations of ``pure=True`` by a task in an iteration.

        On one thread, a task may draw from a generator of its own if the task's function, which
        runs in order, sets the generator back when iterations are dropped (``draws_from``).
        """
        yield from self._draws(task, iteration, recorder, workers)
        for number, uses in recorder.uses.items():
            name = recorder.storages.description(number)
            for use in uses:
                for earlier, before in self._known.get(number, (None, ()))[1]:
                    if earlier != iteration and before.meets(use):
                        for text in _against(before, use, given=number in recorder.given):
                            yield Fault(iteration, text, number, name)
                self._note(number, iteration, use, recorder)
        # A result that is alive after its iteration may be kept for later ones: it counts as used.
        for number, use in recorder.left():
            self._note(number, iteration, use, recorder)
        self._known.prune(lambda known: bool(known[0].expired()))

    def _draws(
        self, task: PipelineTask, iteration: int, recorder: UseRecorder, workers: int
    ) -> Iterator[Fault]:
        """Yield the violations by draws from generators."""
        in_order = getattr(task.fn, "draws_from", None) if workers == 1 else None
        for number, generator in recorder.draws.items():
            if generator is None:
                if not task.random:
                    yield Fault(iteration, _DRAWS)
            elif in_order is not None:
                in_order(generator, iteration)
            # A generator made and used within one iteration is fine. The first iteration is
            # remembered, and so is the generator, whose number is not used again then.
            elif self._generators.setdefault(number, (generator, iteration))[1] != iteration:
                yield Fault(iteration, _DRAWS_FROM)

    def _note(
        self, number: StorageId, iteration: int, use: _MemoryUse, recorder: UseRecorder
    ) -> None:
        """Store a use, with the version that the memory has now that the task has ended."""
        use.version = version_of(use.tensor)
        use.tensor = weakref.ref(use.tensor)
        _, known = self._known.setdefault(number, (recorder.storages.reference(number), []))
        # The newest use of each span replaces the older one, so the version compared is the last
        # known.
        known[:] = [each for each in known if each[1].span != use.span][-_MOST_SPANS:]
        known.append((iteration, use))


def _against(before: _MemoryUse, now: _MemoryUse, *, given: bool) -> Iterator[str]:
    """Yield why a task may not use memory that pure tasks used in an earlier iteration.

    Memory that the task was given is the batch's: loops compare its content
    (``swpipe.loops.ahead_tasks``).
    """
    if now.writes:
        yield _WRITES
    elif now.trains:
        yield _TRAINS
    elif not given and before.tensor() is now.tensor and before.version != now.version:
        yield _CHANGED


_DRAWS = (
    "draws from torch's default generators, so that its numbers depend on what draws before it. "
    "Declare random=True as well, which seeds the task for each iteration; or draw in the loader"
)
_DRAWS_FROM = (
    "draws from a generator that it drew from in an earlier iteration: a pure task changes its "
    "context only. Seed a generator from ctx.iter_idx, or use random=True and torch's default ones"
)
_WRITES = (
    "writes {what}, which it or another pure task had in an earlier iteration: a pure task "
    "changes its context only. Make a new tensor, or take pure=True away and declare "
    'io=[DeclaredIO(state="its name")]'
)
_KEEP_IN_ORDER = "take pure=True away (a function given to ahead belongs into the body then)"
_TRAINS = (
    "reads {what}, which requires grad, so training may change it while the task runs ahead. "
    f"Freeze it (requires_grad_(False)), or {_KEEP_IN_ORDER}"
)
_CHANGED = (
    "reads {what}, which something has changed since the task read it last: it finds other values "
    f"than in a plain loop when it runs ahead. Do not change it while the loop runs, or "
    f"{_KEEP_IN_ORDER}"
)
_SWITCHED = (
    "runs {what} whose mode, train or eval, the task or other code switches while the "
    "loop runs: code that runs the module meanwhile runs it in the wrong mode. Set the mode before "
    "the loop, give the task a copy of the module, or take pure=True away"
)


def problem_of(task: PipelineTask, fault: Fault, what: str) -> Problem:
    """Return a violation as the problem of an error message."""
    did = fault.text.format(what=what)
    text = f"task {task.name!r} is pure, but on iteration {fault.iteration} it {did}"
    return Problem(f"{text}. The run may have differed from a serial one already", (task.name,))
