"""Replay of a task's outputs in place of a run.

A task runs in one of three modes::

    not enabled          enabled, first run              enabled, later runs
    (normal)             (caching)                       (replay)

    task.fn(ctx)         watch ctx                       check that the cache is unmodified
                         task.fn(ctx)                    delete what the task deleted
                         cache what changed, and         restore what it produced, connected to
                         what each io captures           the autograd graph; restore each io

A replay leaves the context as the cached run did, with tensors in any nesting, and restores what
each ``DeclaredIO`` captured. Objects that were shared are shared again.

- Outputs that later tasks modify in place are copied for each replay; other tensors share memory
  with the cache (``swpipe.shortcut.handed_out``). If the cache is modified all the same, the next
  replay raises and names the attribute. ``.grad`` is always copied: autograd accumulates into it.
- Arrays and objects are copied, or restored themselves and refused once they are modified
  (``swpipe.shortcut.objects``). An object that cannot be replayed raises a ``ShortcutError``.
- A tensor computed by autograd is restored with a graph (``swpipe.shortcut.graft``) that gives zero
  gradients to the upstream attributes and the parameters it was computed from. Grad mode on and off
  have separate caches.
- Only the task's function is skipped. Order, streams and events stay as they are.
- A task with a substitute (``swpipe.shortcut.substitute``) is neither run nor cached.

Assumptions
    - Runs of different tasks may overlap, and tasks may be enabled and disabled meanwhile: runs
      only look up a set and a dict, which is atomic in Python, also without the interpreter lock.
      Runs of the same task, which several workers may call at once, are serialized by a lock, and
      the first iteration is the cached one.
    - No code relies on one produced tensor being the same object as an upstream attribute: each
      tensor is cached separately.
    - Changes that a task makes outside the context are declared as its io.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from swpipe.core.task import PipelineTask
from swpipe.device import CpuDevice, Device

if TYPE_CHECKING:
    from swpipe.shortcut.cache import Cache


class Shortcuts:
    """The tasks that are replayed, and their caches.

    Attributes:
        substitutes: Each task that has to go through ``run``, with the function that is called in
            its place; None for a task that is replayed.
        names: These tasks: a view of the keys.
        cycle: The number of iterations after which the same batches come again. Each iteration of
            the cycle has a cache of its own, so that later tasks work on values of the right batch.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.substitutes: dict[str, Callable[[Any], None] | None] = {}
        self.names = self.substitutes.keys()
        self.cycle = 1
        self._device: Device = CpuDevice() if device is None else device
        # Task to its caches, by grad mode and place in the cycle. Each ``enable`` creates a new
        # inner dict: a run that started before ``disable`` stores its cache in the old one, where
        # it is never read.
        self._caches: dict[str, dict[tuple[bool, int], Cache]] = {}
        self._lock = threading.Lock()  # tasks and caches must change together
        self._turns: dict[str, threading.Lock] = {}  # task to a lock for its runs

    def enable(
        self, task_names: Iterable[str], substitute: Callable[[Any], None] | None = None
    ) -> None:
        """Cache tasks on their next run and replay them afterwards; existing caches stay.

        With a ``substitute``, that function is called in place of the task from now on.
        """
        # Imported late: most pipelines never replay a task. Imported here and not in ``run``, so
        # that no task's measured time includes it.
        from swpipe.shortcut.cache import Cache

        self._cache = Cache
        with self._lock:
            for name in task_names:
                self._caches.setdefault(name, {})
                self.substitutes[name] = substitute

    def enable_like(self, other: Shortcuts) -> None:
        """Enable the same tasks as another object, with own caches and the same substitutes."""
        for name, substitute in [*other.substitutes.items()]:
            self.enable([name], substitute)

    def disable(self, task_names: Iterable[str]) -> None:
        """Run tasks normally from their next run on, and drop their caches."""
        with self._lock:
            for name in task_names:
                self.substitutes.pop(name, None)
                for cache in self._caches.pop(name, {}).values():
                    cache.close()

    def check(self, task_names: Iterable[str]) -> None:
        """Check that all replays of tasks up to now were right; for use between iterations.

        Raises:
            ShortcutError: The last iterations modified a cache in place.
        """
        for name in task_names:
            for cache in self._caches.get(name, {}).values():
                cache.check()

    def in_backward_s(self, task_name: str) -> float:
        """Return the seconds that a task's replays have cost in the backward of other tasks."""
        caches = self._caches.get(task_name, {}).values()
        return sum(seconds for cache in list(caches) for seconds in list(cache.in_backward_s))

    def run(self, task: PipelineTask, ctx: Any, in_turn: Callable[[], None] = lambda: None) -> None:
        """Run a task and cache what it produces, or replay its cache.

        Args:
            task: The task. If it was disabled in the meantime, it runs normally.
            ctx: The iteration's context: any object with a ``__dict__``.
            in_turn: Called before the run that is cached; waits until the task has run for all
                earlier iterations.

        Raises:
            ShortcutError: The cache was modified in place, or an output cannot be cached.
        """
        caches = self._caches.get(task.name)
        substitute = self.substitutes.get(task.name)
        if substitute is not None:
            substitute(ctx)
            return
        if caches is None:
            task.fn(ctx)
            return
        place = ctx.iter_idx % self.cycle if self.cycle > 1 else 0
        key = torch.is_grad_enabled(), place
        # Waiting happens before the lock is taken: an earlier iteration of the task may need the
        # lock.
        if key not in caches:
            in_turn()
        with self._turns.setdefault(task.name, threading.Lock()):
            cache = caches.get(key)
            if cache is None:
                caches[key] = self._cache(task, ctx, self._device)
                # Under the task's lock, so that no replay of the task starts before its changes are
                # accepted.
                self._accept(ctx)
            else:
                cache.replay(task, ctx)

    def _accept(self, ctx: Any) -> None:
        """Accept the changes that a newly cached task may have made to outputs of other tasks.

        Its replays make the same changes.
        """
        for caches in list(self._caches.values()):
            for cache in list(caches.values()):
                cache.accept(ctx)
