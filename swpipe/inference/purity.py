"""Checks the word of pure tasks, as far as torch's operators show what they do.

    iteration    3              4              5
    task T       reads table    reads table    reads table      memory that T used in an earlier
                 reads batch    reads batch    reads batch      iteration as well is outside of its
                                writes mean    writes mean      contexts: here the table, the mean

Guarantees
    - A pure task that draws without ``random=True``, or in a watched iteration uses memory that
      pure tasks used or made in an earlier watched one, and writes it, or finds it changed, or
      finds that it is of a tensor that training changes (a leaf that requires grad), raises
      PlanError. So does one that runs a module whose mode is switched, unless something is compiled
      in the process.
    - A task's own tensors, and its batch's, may be anything; what a cache gives it, it may read.

Assumptions
    - What does not go through torch's operators is the author's word: Python values, numpy, files,
      kernels launched directly, and what compiled functions do.
    - A change through ``tensor.data`` has no version: a sample of the content shows it, of some of
      the tensors that a task reads (``swpipe.inference.sampled_contents``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._tensors.pytree import tensors_in
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import Problem
from swpipe.inference.draw_recorder import DrawRecorder
from swpipe.inference.operators import CREATED, OperatorRecorder, tensors_of
from swpipe.inference.recorded_context import attributes
from swpipe.inference.sampled_contents import SampledContents, Used
from swpipe.inference.storages import StorageId, Storages
from swpipe.inference.watched_gradients import Gradient, accumulating
from swpipe.inference.watched_modes import WatchedModes

_MOST_KEPT = 4096
"""How many storages are added before those are dropped whose memory is gone."""

_MOST_SPANS = 256
"""So many uses are kept of a storage, such as that of a dataset whose batches are slices."""


class _Span(NamedTuple):
    """Bytes of a storage: from the first, up to the last and without it."""

    first: int
    end: int

    def meets(self, other: _Span) -> bool:
        """Whether they share bytes."""
        return self.first < other.end and other.first < self.end


_ALL = _Span(0, sys.maxsize)


@dataclass(slots=True)
class _Use:
    """What a task did with some memory in one iteration.

    Attributes:
        tensor: The tensor whose version counter stands for the memory: the first one that the task
            met there, or its base.
        version: Of the counter: when the task began to use it; then, when the task had ended. None
            for a tensor without one.
        trains: It is a leaf that requires grad.
        writes: The task wrote it.
    """

    span: _Span
    tensor: Any
    version: int | None
    trains: bool
    writes: bool = False


class PureRecorder(DrawRecorder):  # type: ignore[no-untyped-call]
    """Records also how a pure task uses memory.

    Attributes:
        uses: Storage to its uses.
        accumulated: Id of a parameter to its gradient, where autograd has accumulated it.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.uses: dict[StorageId, list[_Use]] = {}
        self.accumulated: dict[int, Gradient] = {}
        self._owners: dict[StorageId, Tensor] = {}
        self._made: dict[StorageId, weakref.ref[Tensor]] = {}

    def _record(self, value: Any, mode: str, replays: bool = False) -> None:
        super()._record(value, mode, replays)
        if mode == CREATED and replays and (parameter := accumulating()) is not None:
            self._accumulate(parameter, value)
        for tensor in tensors_of(value) if mode else ():
            if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
                self._use(tensor, mode)

    def _accumulate(self, parameter: Tensor, value: Any) -> None:
        """Note a result of an operator that runs where a parameter's gradient is accumulated.

        The first one is the gradient; it may be copied on, as into the buckets that ranks exchange.
        """
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            new = Gradient.of(parameter, value, self.storages)
            old = self.accumulated.get(id(parameter), new)
            kept = new if old.tensor() is None else old
            memory = {**old.memory, **new.memory}
            self.accumulated[id(parameter)] = Gradient(parameter, kept.tensor, memory)

    def _use(self, tensor: Tensor, mode: str) -> None:
        base = tensor if tensor._base is None else tensor._base
        for number in self.storages.of(tensor):
            if number in self.accesses.created:
                self._made[number] = weakref.ref(base)  # it must not live longer for being watched
                continue
            # What detach() makes of it shares its version counter, and does not lead back to it.
            owner = self._owners.setdefault(number, base)
            if mode not in ("r", "w", "rw"):
                continue
            span, uses = _span_of(tensor), self.uses.setdefault(number, [])
            use = next((use for use in uses if use.span == span), None)
            if use is None:
                version = None if owner.is_inference() else owner._version
                use = _Use(span, owner, version, owner.is_leaf and owner.requires_grad)
                uses.append(use)
            use.writes |= mode != "r"

    def outside(self, ctx: Any) -> Iterator[Used]:
        """The memory that the task has read, as far as it is not its context's."""
        values = attributes(ctx).values()
        own = {n for value in values for one in tensors_in(value) for n in self.storages.of(one)}
        for number in (number for number in self.uses if number not in own):
            name, reference = self.storages.description(number), self.storages.reference(number)
            yield Used(number, name, self._owners[number], reference)

    def left(self) -> Iterator[tuple[StorageId, _Use]]:
        """The memory that the task has made and that is still there, all of it in use."""
        for number, reference in self._made.items():
            if (tensor := reference()) is not None:
                yield number, _Use(_ALL, tensor, None, trains=False)


class _BesideCompiler(PureRecorder):  # type: ignore[no-untyped-call]
    """One whose own code torch's compiler does not compile."""

    __torch_dispatch__ = OperatorRecorder.__torch_dispatch__

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True


def pure_recorder(device: Device) -> PureRecorder:
    """A recorder for one task."""
    kind = _BesideCompiler if "torch._dynamo" in sys.modules else PureRecorder
    return kind(device)


def _span_of(tensor: Tensor) -> _Span:
    size = tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = sum((n - 1) * int(step) for n, step in steps)
    first = int(tensor.storage_offset()) * size
    return _Span(first, first + (extent + 1) * size)


@dataclass(slots=True)
class _Known:
    """What pure tasks did with some memory in the last iteration that they used it in."""

    iteration: int
    use: _Use
    reference: Any  # to the storage: its number is not used again while this is kept


class Fault(NamedTuple):
    """What a task did in an iteration against its word.

    Attributes:
        text: In words; it may have a place for what was touched.
        number: Of the storage; 0 for something else.
        name: What was touched; of a storage, if it has no better name.
    """

    iteration: int
    text: str
    number: StorageId = 0
    name: str = ""


class PureRuns:
    """The runs of one pure task, which follow each other: what others change beneath it."""

    def __init__(self, device: Device) -> None:
        self.modes = WatchedModes()
        self._contents = SampledContents(device)

    def faults(self, ctx: Any, recorder: PureRecorder) -> Iterator[Fault]:
        """What it has met in the iteration that has just ended, or before."""
        if (module := self.modes.switched) is not None:
            yield Fault(ctx.iter_idx, _SWITCHED, name=f"a {type(module).__name__}")
        self._contents.compare(ctx.iter_idx, recorder.outside(ctx))
        for iteration, number, name in self._contents.changed():
            yield Fault(iteration, _CHANGED, number, name)


class PureUses:
    """What the pure tasks of one run have used outside their contexts; call it under a lock."""

    def __init__(self) -> None:
        self._known: dict[StorageId, list[_Known]] = {}
        self._generators: dict[int, tuple[torch.Generator, int]] = {}
        self._most = _MOST_KEPT

    def faults(self, task: PipelineTask, iteration: int, recorder: PureRecorder) -> Iterator[Fault]:
        """What a task did in an iteration against its word."""
        for number, generator in recorder.draws.items():
            if generator is None:
                if not task.random:
                    yield Fault(iteration, _DRAWS)
            elif self._generators.setdefault(number, (generator, iteration))[1] != iteration:
                yield Fault(iteration, _DRAWS_FROM)
        for number, uses in recorder.uses.items():
            known = self._known.setdefault(number, [])
            name = recorder.storages.description(number)
            for use in uses:
                for one in known:
                    if one.iteration != iteration and one.use.span.meets(use.span):
                        for text in _against(one.use, use):
                            yield Fault(iteration, text, number, name)
                self._note(known, iteration, use, recorder.storages, number)
        for number, use in recorder.left():
            known = self._known.setdefault(number, [])
            self._note(known, iteration, use, recorder.storages, number)
        if len(self._known) > self._most:
            alive = {n: k for n, k in self._known.items() if not k[0].reference.expired()}
            self._known, self._most = alive, 2 * len(alive) + _MOST_KEPT

    def _note(
        self, known: list[_Known], iteration: int, use: _Use, storages: Storages, number: StorageId
    ) -> None:
        base = use.tensor
        use.version = None if base.is_inference() else base._version
        use.tensor = weakref.ref(base)
        known[:] = [one for one in known if one.use.span != use.span][-_MOST_SPANS:]
        known.append(_Known(iteration, use, storages.reference(number)))


def _against(before: _Use, now: _Use) -> Iterator[str]:
    """Why a task may not use memory that pure tasks used in an earlier iteration."""
    if now.writes:
        yield _WRITES
    elif now.trains:
        yield _TRAINS
    elif before.tensor() is now.tensor and before.version != now.version:
        yield _CHANGED


_DRAWS = (
    "draws from torch's default generators, so its numbers depend on who draws before it. Give it "
    "random=True as well, which seeds it for each iteration; or let the loader draw"
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
_TRAINS = (
    "reads {what}, which requires grad, so training may change it while the task runs ahead. "
    "Freeze it (requires_grad_(False)), or take pure=True away"
)
_CHANGED = (
    "reads {what}, which something has changed since the task read it last: it finds other values "
    "than in a plain loop when it runs ahead. Take pure=True away, or let nobody change it"
)
_SWITCHED = (
    "runs {what} whose mode, train or eval, the task or something beside it switches while the "
    "loop runs: whoever runs it meanwhile has the wrong one. Set the mode before the loop, give "
    "the task a copy of the module, or take pure=True away"
)


def told(task: PipelineTask, fault: Fault, what: str) -> Problem:
    """A fault as an error's text."""
    did = fault.text.format(what=what)
    text = f"task {task.name!r} is pure, but on iteration {fault.iteration} it {did}"
    return Problem(f"{text}. The run may have differed from a serial one already", (task.name,))
