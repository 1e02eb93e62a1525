"""States of which it is said how others touch them (``DeclaredIO.others``), by their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from swpipe.core.task import PipelineTask
from swpipe.errors import Problem
from swpipe.inference.accesses import Access
from swpipe.inference.declared import declared_tensors
from swpipe.inference.storages import StorageId, Storages


class ApartStates:
    """Such states of some tasks, and who touches them against the word.

    Args:
        tasks: The tasks; none of them runs now.
    """

    def __init__(self, tasks: Iterable[PipelineTask]) -> None:
        tasks = tuple(tasks)
        said = [(task.name, io) for task in tasks for io in task.io if io.state]
        self._names = {(task, io.state) for task, io in said}
        self._word: dict[str, tuple[str, str]] = {}  # state to how others touch it, and who says so
        for task, io in said:
            if len(io.others) < len(self._word.get(str(io.state), ("rw", ""))[0]):
                self._word[str(io.state)] = io.others, task
        storages = Storages()
        self._state_of: dict[StorageId, str] = {}
        for io, tensor in declared_tensors(tasks) if self._word else ():
            if io.state in self._word:
                self._state_of |= dict.fromkeys(storages.of(tensor), str(io.state))
        self._storages = storages  # keeps the numbers from being used again

    def __bool__(self) -> bool:
        return bool(self._state_of)

    def broken(
        self, task: str, iteration: int, touched: Mapping[StorageId, Access]
    ) -> Iterator[Problem]:
        """Why a task that does not name a state may not touch it so."""
        for number in touched.keys() & self._state_of.keys():
            state = self._state_of[number]
            others, said_by = self._word[state]
            access = touched[number]
            if (task, state) not in self._names and not (others == "r" and not access.writes):
                does = "writes" if access.writes else "reads"
                yield Problem(
                    f"task {task!r} {does} state {state!r} on iteration {iteration}, and does not "
                    f"name it, but {said_by!r} says that others do not: others={others!r}. Name it "
                    f'in {task!r}, io=[DeclaredIO(state="{state}", mode=...)], or take others away',
                    (said_by, task),
                )
