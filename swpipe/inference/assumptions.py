"""What tasks may touch without having been seen to: unknown is not safe.

A recording sees a few iterations. A task that acts in others only (every fourth, every hundredth)
touches nothing in these, or something else. So a task *may touch all that its code can reach*,

- if it was seen to touch nothing, or different things in different iterations;
- if its code takes ``iter_idx`` of the context, or it changes a Python value outside of it;

and else may touch the modules, optimizers, tensors and generators within reach that it was not seen
to touch at all, attributes of the context that its code names, and default generators, if its code
names functions that draw. It may modify tensors that it was seen to read, if its code modifies some
in place. Python values that tasks share count as touched by every task that can reach them, if one
of these tasks changes them or has code that may. A task whose code sets what holds for the whole
process, such as the default dtype, keeps its order with all others. A tensor with which an array of
numpy shares memory is used by every task that can reach the array.

A task that declares a state (``DeclaredIO(state=...)``) is taken at its word: nothing is assumed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import getattr_static
from itertools import count
from typing import Any

import torch
from torch import Tensor

from swpipe._state.code_names import SELF
from swpipe._state.draws import modules_draw
from swpipe._state.generators import TORCH
from swpipe._state.reached import PlaceId, Reach
from swpipe._state.torch_settings import PROCESS_WIDE
from swpipe._tensors.pytree import grad_or_none
from swpipe._tensors.stateful import PLAIN, modules_in
from swpipe.core.effects import Effects, Location
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.inference.accesses import READ_WRITE, WRITE, Access, TaskAccesses, options_of
from swpipe.inference.declared import DECLARED
from swpipe.inference.observation import IterationObservation, TaskObservation
from swpipe.inference.shared_arrays import accesses_by_arrays
from swpipe.inference.state_items import ReachableItems, StateItem, items_of
from swpipe.inference.storages import unsharded
from swpipe.inference.thread_values import threads_values


@dataclass
class Assumption:
    """What one task may touch beyond what was seen.

    Attributes:
        reasons: Why, if it may touch all that it can reach.
        attributes: Attributes of the context.
        items: State items.
        shared: Python values that it shares with a task that was seen to change them; in ``items``.
        own_thread: Paths of values of which each thread has its own.
    """

    reasons: list[str] = field(default_factory=list)
    attributes: dict[str, Access] = field(default_factory=dict)
    items: dict[StateItem, Access] = field(default_factory=dict)
    shared: set[StateItem] = field(default_factory=set)
    own_thread: set[str] = field(default_factory=set)


def find_assumptions(
    tasks: Sequence[PipelineTask],
    iterations: Sequence[IterationObservation],
    accesses: Mapping[str, TaskAccesses],
    reaches: Mapping[str, Reach],
    reached: ReachableItems,
    own: Container[str],
) -> dict[str, Assumption]:
    """Task to what it may touch besides.

    Args:
        tasks: In serial order.
        iterations: What was observed.
        accesses: What follows from it.
        reaches: Task to what its code can reach.
        reached: All state items after the last iteration.
        own: Tasks that run in this process, and so draw from its generators.
    """
    found = {task.name: Assumption() for task in tasks}
    items = _ItemsOf(reached, {item for of_task in accesses.values() for item in of_task.items})
    attributes = {name for of_task in accesses.values() for name in of_task.attributes}
    undeclared = [task for task in tasks if not any(io.state for io in task.io)]
    for task in undeclared:
        runs = [one for each in iterations for one in each.tasks if one.task == task.name]
        seen, reach, assumed = accesses[task.name], reaches[task.name], found[task.name]
        assumed.reasons += _reasons(runs, seen, reach)
        for owner, called in reach.wholes.items():
            one = reach.holders[owner]
            if assumed.reasons or not items.is_touched(one, seen):
                harmless = not assumed.reasons and _is_harmless(one, called, reach)
                inside = items.gradients_of(one) if harmless else items.of(one)
                assumed.items |= dict.fromkeys(inside, WRITE if harmless else READ_WRITE)
            else:
                assumed.items |= dict.fromkeys(
                    items.changeable(one, called, seen, reach), READ_WRITE
                )
        if task.name in own:
            assumed.items |= dict.fromkeys(_draws(task, reach, bool(assumed.reasons)), READ_WRITE)
        for item, access in accesses_by_arrays(reach, reached):
            assumed.items[item] = access | assumed.items.get(item, access)
        named = reach.uses.get(reach.context, set())
        taken = reach.taken(reach.context) if assumed.reasons else named
        new = (taken & attributes) - seen.attributes.keys()
        new |= {n for n in reach.sets & attributes if not seen.attributes.get(n, Access()).writes}
        assumed.attributes |= {str(n): Access(True, n in reach.sets) for n in new}
    _add_seeded(undeclared, accesses, found)
    _add_settings(undeclared, reaches, found)
    for name, paths in threads_values(
        {task.name: reaches[task.name] for task in undeclared}
    ).items():
        found[name].own_thread |= paths
    _add_places(undeclared, iterations, reaches, found, _writers(accesses, reached))
    return found


def _reasons(runs: Sequence[TaskObservation], seen: TaskAccesses, reach: Reach) -> Iterator[str]:
    if not seen.attributes and not seen.items and not any(one.changes.plain for one in runs):
        yield "was seen to touch nothing"
    elif any(_touched(one, runs) != _touched(runs[0], runs) for one in runs[1:]):
        yield "touched different things in different iterations"
    if "iter_idx" in reach.taken(reach.context):
        yield "uses the iteration's number"
    if any(one.places - reach.inner for one in runs):
        yield "changes Python values outside the context"


def _touched(one: TaskObservation, runs: Sequence[TaskObservation]) -> set[object]:
    """What the task used in this run, of that which was there before each run of it."""
    lasting = set(one.items).intersection(*(run.items for run in runs))
    log, operators = one.attributes, one.operators
    used = operators.all_reads | operators.writes | one.changes.storages
    found: set[object] = {*log.reads, *log.sets, *log.deletes, *one.stepped, *one.changes.options}
    found |= {(item.owner, item.kind) for item in lasting if one.items[item] & used}
    return found | {(i.owner, i.kind) for i in one.changes.items & lasting} | one.changes.generators


def touched_in(one: TaskObservation) -> frozenset[object]:
    """What the task touched in one iteration; memory of the iteration itself does not count."""
    found = _touched(one, [one]) | {(i.owner, i.kind) for i in one.changes.items}
    return frozenset(found | one.places | one.modes.ran | one.modes.switched | one.changes.plain)


class _ItemsOf:
    """Finds the state items of modules, optimizers, tensors and generators.

    Args:
        reached: All state items that there are.
        seen: Items that tasks touched; some may be gone, such as gradients that were set to None.
    """

    def __init__(self, reached: ReachableItems, seen: set[StateItem]) -> None:
        self._gone = {item.name: item for item in seen if item.kind == "gradients"}
        self._reached = reached
        self._of_tensor = {id(tensor): item for item, tensor in reached.tensors.items()}
        self._options = {number: name for name, (number, _) in reached.options.items()}
        self._generators = {id(one): name for name, one in reached.generators.items()}

    def of(self, owner: Any) -> set[StateItem]:
        """All items that belong to the owner or that it refers to."""
        if isinstance(owner, torch.optim.Optimizer):
            parameters = [p for group in owner.param_groups for p in group["params"]]
            return self._own(owner) | self._tensors(parameters)
        if isinstance(owner, torch.nn.Module):
            return self._tensors([tensor for _, tensor in items_of("", owner)])
        if isinstance(owner, Tensor):
            return self._tensors([owner])
        name = self._generators.get(id(owner))
        return set() if name is None else {StateItem(name, name, "")}

    def gradients_of(self, owner: Any) -> set[StateItem]:
        """The gradients of the parameters of an optimizer, which its code may clear."""
        if not isinstance(owner, torch.optim.Optimizer):
            return set()
        return {item for item in self.of(owner) if item.kind == "gradients"}

    def changeable(
        self, owner: Any, called: set[str], seen: TaskAccesses, reach: Reach
    ) -> set[StateItem]:
        """Items of a module or tensor that a task read, and may modify in other iterations."""
        changes = reach.changes_tensors or not called.isdisjoint(reach.adds | (reach.fills - {""}))
        if not changes or isinstance(owner, torch.optim.Optimizer):
            return set()
        kinds = ("parameters", "buffers", DECLARED, "")
        if any(access.writes and item.kind in kinds for item, access in seen.items.items()):
            return set()  # what it modifies was seen
        read = {item for item in self.of(owner) if item in seen.items and item.kind in kinds}
        return {item for item in read if reach.ungraded or item.kind != "parameters"}

    def is_touched(self, owner: Any, seen: TaskAccesses) -> bool:
        """Whether a task was seen to touch the owner; the gradients alone do not count."""
        own = self._own(owner) if isinstance(owner, torch.optim.Optimizer) else self.of(owner)
        return not own or not seen.items.keys().isdisjoint(own)

    def _own(self, optimizer: torch.optim.Optimizer) -> set[StateItem]:
        """The optimizer's options and state, without parameters and gradients."""
        name = self._options.get(id(optimizer))
        if name is None:
            return set()
        kinds = [item for item in self._reached.tensors if item.owner == name]
        return {options_of(name), *(item for item in kinds if item.kind == "state")}

    def _tensors(self, tensors: Sequence[Tensor]) -> set[StateItem]:
        known = self._of_tensor
        parts = [part for one in tensors for part in unsharded(one)]
        grads = [grad for one in parts if (grad := grad_or_none(one)) is not None]
        found = {known[id(one)] for one in (*parts, *grads) if id(one) in known}
        names = {f"{item.name}.grad" for item in found}
        return found | {item for name, item in self._gone.items() if name in names}


def _is_harmless(owner: Any, called: set[str], reach: Reach) -> bool:
    """Whether the code only clears an optimizer's gradients, or takes plain values of a module.

    A method's object that the method does not use is one, too.
    """
    if called == {SELF} and SELF not in reach.uses:
        return True
    if "" in called or not isinstance(owner, torch.nn.Module | torch.optim.Optimizer):
        return False
    taken = set[str | None]().union(*(reach.uses.get(name, {None}) for name in called))
    if isinstance(owner, torch.optim.Optimizer):
        return taken <= {"zero_grad"}
    return all(n and isinstance(getattr_static(owner, n, owner), PLAIN) for n in taken)


_TORCH_ITEM = StateItem(TORCH, TORCH, "")


def _draws(task: PipelineTask, reach: Reach, unsure: bool) -> Iterator[StateItem]:
    """The default generators from which a task may draw, also by running a module if unsure."""
    wholes = [reach.holders[owner] for owner in reach.wholes]
    modules = [one for one in wholes if isinstance(one, torch.nn.Module)] if unsure else []
    drawn = modules_draw(inner for one in modules for inner in modules_in(one))
    for name in sorted(reach.draws | ({TORCH} if drawn or reach.begins else set())):
        if not (task.random and name == TORCH):  # then it has states of its own
            yield StateItem(name, name, "")


def _add_seeded(
    tasks: Sequence[PipelineTask],
    accesses: Mapping[str, TaskAccesses],
    found: Mapping[str, Assumption],
) -> None:
    """Seeded tasks set torch's default generators, from which another task may draw."""
    used = [name for name, of_task in accesses.items() if _TORCH_ITEM in of_task.items]
    if used or any(_TORCH_ITEM in one.items for one in found.values()):
        for task in tasks:
            if task.random:
                found[task.name].items[_TORCH_ITEM] = READ_WRITE


_SETTINGS_ITEM = StateItem("torch's settings", "torch's settings", "")


def _add_settings(
    tasks: Sequence[PipelineTask], reaches: Mapping[str, Reach], found: Mapping[str, Assumption]
) -> None:
    """Tasks whose code sets what every thread computes by, such as the default dtype."""
    setting = {task.name for task in tasks if PROCESS_WIDE & reaches[task.name].names}
    for task in tasks if setting else ():
        found[task.name].items[_SETTINGS_ITEM] = Access(True, task.name in setting)


def _writers(accesses: Mapping[str, TaskAccesses], reached: ReachableItems) -> dict[int, set[str]]:
    """A tensor's id to the tasks that were seen to write it."""
    return {
        id(tensor): {
            name for name, of_task in accesses.items() if of_task.items.get(item, Access()).writes
        }
        for item, tensor in reached.tensors.items()
    }


def _add_places(
    tasks: Sequence[PipelineTask],
    iterations: Sequence[IterationObservation],
    reaches: Mapping[str, Reach],
    found: Mapping[str, Assumption],
    seen: Mapping[int, set[str]],
) -> None:
    """Add the Python values that several tasks can reach and one of them may change.

    ``seen`` has the tasks that were seen to write a tensor, by its id.
    """
    users: dict[PlaceId, dict[str, None]] = defaultdict(dict)
    paths: dict[PlaceId, str] = {}
    for task in tasks:
        for place, path in reaches[task.name].places.items():
            users[place][task.name] = None
            paths.setdefault(place, path)
    changed = {
        (one.task, place) for each in iterations for one in each.tasks for place in one.places
    }
    checked = {task.name for task in tasks}
    for name, place in changed:
        if name in checked and place in users:
            users[place][name] = None  # such as a hook's, during another task's backward
    taken: set[str] = set()
    for place, names in users.items():
        writers = {
            name
            for name in names
            if (name, place) in changed
            or (place in reaches[name].places and reaches[name].may_change(place))
        }
        if len(names) < 2 or not writers:
            continue
        reach = next(reaches[name] for name in names if place in reaches[name].places)
        content = reach.content(place)
        if isinstance(content, Tensor) and writers <= seen.get(id(content), set()):
            continue  # a state item, whatever tensor it is
        path = next(name for name in _numbered(paths[place]) if name not in taken)
        taken.add(path)
        item = StateItem(f"Python value {path}", f"Python value {path}", "")
        for name in names:
            found[name].items[item] = Access(True, name in writers)
            if any((other, place) in changed for other in names):
                found[name].shared.add(item)


def _numbered(name: str) -> Iterator[str]:
    """The name, and others for different things that are called so."""
    yield name
    yield from (f"{name} ({number})" for number in count(2))


def with_assumptions(
    effects: Mapping[str, Effects],
    assumptions: Mapping[str, Assumption],
    states: Mapping[str, tuple[StateItem, ...]],
) -> tuple[dict[str, Effects], dict[str, tuple[StateItem, ...]]]:
    """The effects and states, with what is assumed added."""
    states = dict(states)
    state_of = {item: name for name, items in states.items() for item in items}
    for item in sorted({item for one in assumptions.values() for item in one.items}):
        if item not in state_of:
            # No observed access is to these items, so they may share a state.
            name = next(
                name
                for name in _numbered(f"{item.owner} {item.kind}" if item.kind else item.name)
                if all(i.kind == item.kind for i in states.get(name, ()))
            )
            states[name] = (*states.get(name, ()), item)
            state_of[item] = name
    table = {}
    for task, seen in effects.items():
        one = assumptions[task]
        found = [(Location(name, False), access) for name, access in one.attributes.items()]
        found += [(Location(state_of[item], True), access) for item, access in one.items.items()]
        added = Effects(
            frozenset(place for place, access in found if access.reads),
            frozenset(place for place, access in found if access.writes),
            own_thread=frozenset(Location(path, True) for path in one.own_thread),
        )
        certain = {Location(state_of[item], True) for item in one.shared}
        new = (added.reads - seen.reads) | (added.writes - seen.writes)
        table[task] = replace(seen | added, assumed=new - certain)
    return table, states


def notes_on_assumptions(
    assumptions: Mapping[str, Assumption], effects: Mapping[str, Effects]
) -> Iterator[str]:
    """What was assumed, and how to say what is so."""
    for task, one in assumptions.items():
        if not effects[task].assumed:
            continue
        places = listed(sorted(str(place) for place in effects[task].assumed), most=4)
        why = " and ".join(one.reasons) or "can reach what it was not seen to touch"
        yield (
            f"{task!r} {why}: it is assumed that it may touch {places}, and it keeps its serial "
            "order there. Record more iterations, or declare what it touches: "
            f'{task!r} with io=[DeclaredIO(state="its name", mode="r", "w" or "rw")].'
        )
