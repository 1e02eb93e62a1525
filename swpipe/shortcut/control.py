"""The methods of a pipeline that shortcut its tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic

from swpipe._distributed.rank_checks import ShortcutAct, check_same_shortcuts
from swpipe._engine.driver import Driver
from swpipe.core.context import C
from swpipe.core.messages import listed
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask, TaskRef, names_of

if TYPE_CHECKING:
    from swpipe.shortcut.substitute import Substitute


class ShortcutControl(Generic[C]):
    """The part of a pipeline that shortcuts its tasks."""

    plan: PipelinePlan
    tasks: tuple[PipelineTask, ...]
    _driver: Driver[C]
    _alike: bool
    _stall_timeout_s: float | None

    def enable_shortcut(self, *tasks: TaskRef, with_: Substitute | None = None) -> None:
        """Cache what each task's next run produces, and replay that in place of later runs.

        Give ``with_`` for one task, to take its outputs from elsewhere: a function of the context
        that is called in its place, or attributes and their values. The task itself never runs. On
        several ranks, enable the same tasks on all of them, between the same two steps; the ranks
        wait for each other here.

        Raises:
            TypeError: ``with_`` is neither a function nor a dict of values.
            ValueError: A task that this pipeline does not have; ``with_`` for several tasks.
            RuntimeError: Another rank enables other tasks, or none within ``stall_timeout_s``.
        """
        # Imported late, since most pipelines never shortcut a task.
        from swpipe.shortcut.substitute import substitute_of

        names = self.task_names(*tasks)
        shortcuts = self._driver.engine.shortcuts
        substitute = None if with_ is None else substitute_of(names, with_)
        # Compared before anything changes: on an error the tasks are shortcut as before.
        wanted = shortcuts.substitutes | dict.fromkeys(names, substitute)
        self._compare_shortcuts("enable", wanted)
        shortcuts.enable(names, substitute)

    def disable_shortcut(self, *tasks: TaskRef) -> None:
        """Run tasks as usual again and drop their caches; without arguments, all tasks.

        On several ranks, call it on all of them, as for ``enable_shortcut``.

        Raises:
            ValueError: A task that this pipeline does not have.
            RuntimeError: As for ``enable_shortcut``; the tasks then are shortcut as before.
        """
        names = self.task_names(*(tasks or self.tasks))
        shortcuts = self._driver.engine.shortcuts
        if not shortcuts.names.isdisjoint(names):
            # Ranks compare the tasks that stay shortcut, since those decide which collectives are
            # called.
            left = {name: s for name, s in shortcuts.substitutes.items() if name not in names}
            self._compare_shortcuts("disable", left)
            shortcuts.disable(names)

    def cycle_shortcuts(self, cycle: int) -> None:
        """Give each of ``cycle`` batches, which come again and again in this order, its own cache.

        This applies to tasks that are shortcut from now on; iteration i has batch i modulo
        ``cycle``.
        """
        self._driver.engine.shortcuts.cycle = cycle

    def check_shortcuts(self) -> None:
        """Raise ShortcutError if later tasks modified what shortcut tasks have replayed until now.

        For use between iterations; the next replay of the task would raise the same error.
        """
        shortcuts = self._driver.engine.shortcuts
        shortcuts.check(sorted(shortcuts.names))

    def replay_in_backward_s(self, *tasks: TaskRef) -> float:
        """Return the seconds that replays of tasks have cost in the backward of other tasks.

        A replayed forward makes zero gradients there, for the parameters that the task used. The
        time counts since the tasks were enabled.
        """
        return sum(map(self._driver.engine.shortcuts.in_backward_s, self.task_names(*tasks)))

    def _compare_shortcuts(self, act: ShortcutAct, wanted: Mapping[str, object]) -> None:
        """Check that all ranks shortcut the same tasks, and have substitutes for the same ones."""
        # Without check_ranks, ranks may run different pipelines and would not come here.
        if self._alike:
            timeout_s = math.inf if self._stall_timeout_s is None else self._stall_timeout_s
            labels = {f"{name} (with_)" if given else name for name, given in wanted.items()}
            check_same_shortcuts(self.plan.digest(), act, labels, timeout_s)

    @contextmanager
    def shortcut(self, *tasks: TaskRef, with_: Substitute | None = None) -> Iterator[None]:
        """Shortcut tasks within the block; ``with_`` as for ``enable_shortcut``."""
        self.enable_shortcut(*tasks, with_=with_)
        try:
            yield
        except BaseException:
            # Disabled without a comparison of ranks: the other ranks may not come here.
            self._driver.engine.shortcuts.disable(names_of(tasks))
            raise
        if tasks:
            self.disable_shortcut(*tasks)

    @property
    def shortcut_tasks(self) -> frozenset[str]:
        """The names of the tasks that are shortcut."""
        return frozenset(self._driver.engine.shortcuts.names)

    def task_names(self, *tasks: TaskRef) -> tuple[str, ...]:
        """Return the names of some tasks.

        Raises:
            ValueError: This pipeline does not have one of the tasks.
        """
        names = names_of(tasks)
        for name in names:
            if name not in self._driver.engine.tasks:
                known = listed([task.name for task in self.tasks])
                raise ValueError(f"this pipeline has no task {name!r}; it has {known}")
        return names
