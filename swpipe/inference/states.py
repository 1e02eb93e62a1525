"""State outside the context, by names: parameters, gradients, optimizer state, declared memory.

A state item keeps its name while its tensor may be replaced: ``model.net.weight``, its ``.grad``,
``optimizer: exp_avg of model.net.weight``, or a tensor by itself. The items are collected again
after each task, since optimizers create their state in their first step.

Tensors in the memory that a task declares (``DeclaredIO(memory=...)``) belong to the declared
state, whatever else refers to them: a model's parameter, a view that an object keeps, a shard. So
observed and declared accesses are to the same state, and a plan can name it in ``stale``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from swpipe._state.loop import declared_memory
from swpipe._values.containers import LEAF, kind_of
from swpipe._values.stateful import (
    PLAIN,
    REGISTERED,
    Owner,
    has_state_dict,
    is_generator,
    modules_in,
    named_modules_in,
)
from swpipe._values.storages import StorageId, nbytes
from swpipe._values.walk import grad_or_none, tensors_in, unsharded
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.errors import PlanError, Problem

DECLARED = "declared"
"""The kind of items in declared memory, whose owner is the declared state."""

ATTRIBUTE = "attribute"
"""The kind of items that are attributes of the context, one for each iteration."""


class StateItem(NamedTuple):
    """The name of one piece of state.

    Attributes:
        name: "model.net.weight".
        owner: The object that it belongs to: "model".
        kind: "parameters", "buffers", "gradients", "state" of an optimizer, "options" of an
            optimizer, "mode" of a module, "declared", "unnamed" for memory that is known by a
            description only, "attribute" of the context, or "" for anything else that belongs to
            no module and no optimizer.
    """

    name: str
    owner: str
    kind: str

    @classmethod
    def alone(cls, name: str) -> StateItem:
        """Return the item of a state that belongs to no module and no optimizer."""
        return cls(name, name, "")


@dataclass
class StateItems:
    """The state that some objects hold.

    Attributes:
        tensors: Item to its tensor.
        options: Optimizer's name to its id and the options of its parameter groups.
        generators: Name to random number generator.
    """

    tensors: dict[StateItem, Tensor] = field(default_factory=dict)
    options: dict[str, tuple[int, Any]] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)


def items_in(owners: Iterable[Owner]) -> StateItems:
    """Return all state that some modules, optimizers, tensors and generators hold now."""
    state = StateItems()
    count: Counter[str] = Counter()
    names_of: dict[int, str] = {}
    covered: set[int] = set()

    def unique(name: str) -> str:
        # Two objects can have the same path, such as two optimizers of one class.
        count[name] += 1
        return name if count[name] == 1 else f"{name} ({count[name]})"

    # Optimizers come last: their state is named after parameters.
    for path, owner in sorted(owners, key=lambda named: isinstance(named.owner, Optimizer)):
        if id(owner) in covered:  # a submodule of an earlier owner, which brought its tensors
            continue
        if isinstance(owner, Module):
            covered.update(map(id, modules_in(owner)))
        if is_generator(owner):
            state.generators[unique(path)] = owner
        elif isinstance(owner, Optimizer):
            root = unique(path)
            _add(state, names_of, _optimizer_items(root, owner, names_of))
            state.options[root] = (id(owner), _options(owner))
        elif isinstance(owner, Tensor | Module):
            _add(state, names_of, items_of(unique(path), owner))
    return state


def _add(
    state: StateItems, names_of: dict[int, str], items: Iterable[tuple[StateItem, Tensor]]
) -> None:
    """Add the items whose tensors have no item yet, and the gradients of these tensors."""
    for item, tensor in ((item, part) for item, whole in items for part in unsharded(whole)):
        # The first name of a tensor counts: a shared parameter appears once.
        if id(tensor) in names_of or item in state.tensors:
            continue
        names_of[id(tensor)] = item.name
        state.tensors[item] = tensor
        grad = grad_or_none(tensor)
        if grad is not None and id(grad) not in names_of:
            names_of[id(grad)] = f"{item.name}.grad"
            state.tensors[StateItem(f"{item.name}.grad", item.owner, "gradients")] = grad


def items_of(root: str, owner: Any) -> Iterator[tuple[StateItem, Tensor]]:
    """Yield the tensor, or all tensors of a module, including those in plain lists and dicts."""
    if isinstance(owner, Tensor):
        yield StateItem.alone(root), owner
        return
    modules = list(named_modules_in(root, owner))
    # Registered tensors come first: their names are better than those of a wrapper's lists.
    # Module._parameters and _buffers are private in torch 2.13; read module by module, they give
    # each tensor the path of its own module.
    for path, module in modules:
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                kind = "parameters" if name in module._parameters else "buffers"
                yield StateItem(f"{path}.{name}", root, kind), tensor
    for path, module in modules:
        for name, value in [*vars(module).items()]:  # copied: a running task may add an attribute
            if name not in REGISTERED:
                yield from _indexed(f"{path}.{name}", root, "buffers", value)


def _indexed(path: str, root: str, kind: str, value: Any) -> Iterator[tuple[StateItem, Tensor]]:
    """Yield the tensors in a plain value, with an index in the name if the value is a container."""
    if isinstance(value, (*PLAIN, Optimizer)):
        return
    for index, tensor in enumerate(tensors_in(value)):
        of_kind = "parameters" if isinstance(tensor, Parameter) else kind
        yield StateItem(path if tensor is value else f"{path}[{index}]", root, of_kind), tensor


def _optimizer_items(
    root: str, optimizer: Optimizer, names_of: dict[int, str]
) -> Iterator[tuple[StateItem, Tensor]]:
    """Yield parameters without a name, then the optimizer's state, named after its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Parameters of no given module, such as a tensor that was passed to the optimizer alone.
    for index, parameter in enumerate(parameters):
        if id(parameter) not in names_of:
            yield StateItem(f"{root}: parameter {index}", root, "parameters"), parameter
    for index, (parameter, state) in enumerate(optimizer.state.items()):
        of = names_of.get(id(parameter), f"parameter {index}")
        for key, value in state.items() if isinstance(state, dict) else [("state", state)]:
            yield from _indexed(f"{root}: {key} of {of}", root, "state", value)
    # Options can be tensors, too: a capturable optimizer keeps its learning rate in one.
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield from _indexed(f"{root}: {key} of group {number}", root, "state", value)


def _options(optimizer: Optimizer) -> Any:
    """Return the plain options of each parameter group, in a form that can be compared."""
    return [
        [(key, value) for key, value in group.items() if isinstance(value, (*PLAIN, tuple))]
        for group in optimizer.param_groups
    ]


def options_of(optimizer: str) -> StateItem:
    """Return the item of an optimizer's options, such as the learning rate.

    Parameters are not part of it.
    """
    return StateItem(f"{optimizer} options", optimizer, "options")


def mode_of(module: str) -> StateItem:
    """Return the item of a module's mode, train or eval."""
    return StateItem(f"{module} mode", module, "mode")


def assign_declared(
    items: Mapping[StateItem, Tensor], tasks: Iterable[PipelineTask]
) -> dict[StateItem, Tensor]:
    """Return the items, with those in declared memory assigned to the states declared there.

    Raises:
        PlanError: Two states are declared in the same memory, or a declared memory is not tensors.
    """
    state_of: dict[StorageId, str] = {}
    # By storage and not by tensor, since views and shards are other tensors in the same memory.
    for task, io, tensor in declared_tensors(tasks):
        for storage in nbytes(tensor):
            other = state_of.setdefault(storage, str(io.state))
            if other != io.state:
                raise _refused(
                    task,
                    io,
                    f"a tensor of shape {list(tensor.shape)} that also belongs to state "
                    f"{other!r}: declare it for one of them",
                )
    assigned = {}
    for item, tensor in items.items():
        state = next((state_of[n] for n in nbytes(tensor) if n in state_of), None)
        key = item if state is None else item._replace(owner=state, kind=DECLARED)
        assigned[key] = tensor
    return assigned


def declared_tensors(
    tasks: Iterable[PipelineTask],
) -> Iterator[tuple[PipelineTask, DeclaredIO, Tensor]]:
    """Yield each task, declaration and tensor in declared memory.

    These are given tensors, tensors of given modules, and this rank's shards of ShardedTensors.
    """
    for task, io, item in declared_memory(tasks):
        if isinstance(item, Module):
            for _, tensor in items_of("", item):
                yield from ((task, io, part) for part in unsharded(tensor))
        elif isinstance(item, Tensor):
            yield task, io, item
        # Objects with state_dict have no tensors to compare; they are saved and restored only.
        elif kind_of(type(item)) is LEAF and not has_state_dict(item):
            what = f"{item!r}: give tensors, modules, or objects with state_dict"
            raise _refused(task, io, what)


def _refused(task: PipelineTask, io: DeclaredIO, what: str) -> PlanError:
    """Return the error for a declared memory that cannot be used."""
    text = f"task {task.name!r} declares that state {io.state!r} lies in {what}"
    return PlanError([Problem(text, (task.name,))])
