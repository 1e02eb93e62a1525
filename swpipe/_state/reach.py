"""What a task's code can reach outside the context, whether or not it did so while recorded.

The search follows what ``swpipe._state.discovery`` follows, but one task at a time, and of an
object only the attributes and methods that the code names: ``self.config.model`` leads to an
attribute ``model`` of what is called ``config``, and not to ``self.model``. What has no such name
(a local variable, an argument, an item) may be any object. No code of the objects is run. Names
that are computed are not found, except where the code assigns to them.

Methods of installed libraries are not read. So a library's object, and any other that cannot be
searched (an iterator, a file), is *opaque*: whoever calls a method of it may change it.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import getattr_static
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch

from swpipe._state.code_names import LENGTH, SELF, CodeNames, read_code, takes_first
from swpipe._state.discovery import (
    CACHE,
    MAX_ITEMS,
    attributes_of,
    content_of,
    dict_of,
    is_installed,
)
from swpipe._state.draws import (
    default_generator,
    draws_by,
    draws_seed,
    names_of_generators,
)
from swpipe._state.kinds import (
    CONTAINERS,
    NAMESPACES,
    behind,
    exporter_of,
    is_array,
    is_unchanging,
    referents,
    results_of,
)
from swpipe._state.owners import (
    constructors_of,
    functions_of,
    is_cover,
    is_library_function,
    is_librarys,
    is_of_user,
    is_partly_librarys,
    is_users_descriptor,
    methods_of,
)
from swpipe._state.reached import PlaceId, Reach
from swpipe._tensors.stateful import PLAIN, WHOLE, is_foreign, is_generator, modules_in
from swpipe.core.task import PipelineTask

MAX_HOPS = 4
"""How many times in a row the search may follow an attribute of a library's object."""

_NO_CODE = (lambda: None).__code__
_BACKWARD = {"backward", "grad", "vjp"}
_RUNS_IN_BACKWARD = {
    "register_hook", "register_multi_grad_hook", "register_post_accumulate_grad_hook",
    "register_full_backward_hook", "register_full_backward_pre_hook", "register_prehook",
    "saved_tensors_hooks", "checkpoint", "checkpoint_sequential",
}  # fmt: skip
"""Names of what makes a later backward run code of the task that calls it."""


def reach_of(task: PipelineTask, also: Sequence[Any] = ()) -> Reach:
    """Everything that the task's function, and others that it calls, can reach now."""
    reach = Reach()
    while True:  # names of methods found lead to further attributes
        known = sum(map(len, reach.uses.values()))
        reach.wholes, reach.places, reach.called = {}, {}, {}
        reach.opaque, reach.inner, reach.owned, reach.draws = set(), set(), {}, set()
        _Search(reach).run(task.fn, also)
        if sum(map(len, reach.uses.values())) == known:
            return reach


def reaches_of(tasks: Sequence[PipelineTask]) -> dict[str, Reach]:
    """Task to what its code can reach; hooks are reached by all that may run a backward.

    So is the function of a task that makes a backward run some of its code.
    """
    reaches = {task.name: reach_of(task) for task in tasks}
    hooks = {number: hook for reach in reaches.values() for number, hook in reach.hooks.items()}
    for task in tasks:
        if not _RUNS_IN_BACKWARD.isdisjoint(reaches[task.name].names):
            hooks[id(task.fn)] = task.fn
    for task in tasks if hooks else ():
        if not _BACKWARD.isdisjoint(reaches[task.name].names):
            reaches[task.name] = reach_of(task, list(hooks.values()))
    return reaches


class _Step(NamedTuple):
    path: str
    called: str
    value: Any
    hops: int = 0
    owned: bool = True  # not the inside of a library's object


class _Search:
    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._ahead: deque[_Step] = deque()
        self._seen: set[tuple[int, str]] = set()
        self._codes: list[tuple[CodeNames, dict[str, Any]]] = []  # with their globals

    def run(self, fn: Any, also: Sequence[Any] = ()) -> None:
        """Search all that ``fn`` leads to."""
        code = getattr(getattr(fn, "__func__", fn), "__code__", None)
        if code:
            names = code.co_varnames[isinstance(fn, MethodType) : code.co_argcount]
            self._reach.context = names[0] if names else ""
        self._ahead += [_Step("", "", one) for one in (fn, *also)]
        while self._ahead:
            step = self._ahead.popleft()
            if type(step.value) in weakref.ProxyTypes:  # it claims to be of the object's class
                step = step._replace(value=behind(step.value))
            key = (id(step.value), step.called)
            if not isinstance(step.value, PLAIN) and key not in self._seen:
                self._seen.add(key)
                self._reach.holders[id(step.value)] = step.value
                if not step.owned and is_of_user(step.value):
                    step = step._replace(owned=True)
                if step.owned:
                    self._reach.owned.setdefault(id(step.value), step.path)
                measured = self._reach.uses.get(step.called) == {LENGTH}
                (self._enter_measured if measured else self._enter)(step)
        generators = names_of_generators((n, self._reach.holders[k]) for k, n in self._seen)
        self._reach.draws.update(*(draws_by(*code, generators) for code in self._codes))

    def _enter_measured(self, step: _Step) -> None:
        """Enter what the code takes nothing of but its length."""
        value, function = step.value, getattr(type(step.value), LENGTH, None)
        if isinstance(value, CONTAINERS):
            self._place(step, value, "", step.path)
        elif isinstance(function, FunctionType) and not is_library_function(function):
            held = attributes_of(value)
            named = read_code(function.__code__, "").uses.get(SELF, set())
            for name in sorted(named & held.keys(), key=str):
                self._enter_attribute(step, str(name), held)
            self._ahead.append(step._replace(value=function, called=""))

    def _enter(self, step: _Step) -> None:
        value = step.value
        if isinstance(value, (*WHOLE, random.Random)) or is_generator(value):
            self._enter_whole(step)
        elif isinstance(value, MethodType | BuiltinFunctionType | MethodDescriptorType):
            self._enter_method(step)
        elif isinstance(value, FunctionType):
            self._enter_function(step)
        elif isinstance(value, CACHE):
            inside = (value.__wrapped__, *results_of(value))
            self._ahead += [step._replace(value=one, called="") for one in inside]
        elif isinstance(value, partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self._ahead.append(step._replace(value=item, called=""))
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
            self._enter_container(step)
        elif isinstance(value, type):
            self._enter_class(value, value, self._taken(step), step.path)
            if None in self._taken(step):
                self._enter_constructors(value)
        elif isinstance(value, ModuleType):
            self._enter_module_names(step)
        elif not is_unchanging(value):
            self._enter_other(step)

    def _enter_other(self, step: _Step) -> None:
        value = step.value
        if is_array(value):
            self._place(step, value, "", step.path)
            self._ahead.append(step._replace(value=getattr(value, "base", None)))
        elif isinstance(value, memoryview):
            self._ahead.append(step._replace(value=exporter_of(value)))
        elif isinstance(value, weakref.ref):
            self._ahead.append(step._replace(value=value()))
        elif isinstance(value, GeneratorType):
            self._enter_generator(step)
        else:
            self._enter_object(step)

    def _taken(self, step: _Step) -> set[str | None]:
        return self._reach.taken(step.called)

    def _place(self, step: _Step, holder: Any, name: str, path: str) -> None:
        reach = self._reach
        reach.holders[id(holder)] = holder
        reach.places.setdefault(PlaceId(id(holder), name), path)
        held = isinstance(holder, (*CONTAINERS, *NAMESPACES, CellType, FunctionType, type))
        if not step.owned or (not held and is_librarys(type(holder))):
            reach.inner.add(PlaceId(id(holder), name))
        if not name:
            reach.called.setdefault(id(holder), set()).add(step.called)

    def _enter_whole(self, step: _Step) -> None:
        value = step.value
        self._reach.wholes.setdefault(id(value), set()).add(step.called)
        self._reach.draws.update(default_generator(value))
        if isinstance(value, torch.nn.Module):
            self._enter_object(step)
            if None in self._taken(step):
                self._enter_forward(step)
        elif isinstance(value, torch.optim.Optimizer):
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                hooks = vars(value).get(name, {}).values()
                self._ahead += [step._replace(value=one, called="") for one in hooks]
            if not is_librarys(type(value)):
                self._enter_object(step)

    def _enter_forward(self, step: _Step) -> None:
        """What runs when a module is called: the forward of all modules in it, and hooks."""
        for module in modules_in(step.value):
            self._reach.holders[id(module)] = module
            self._enter_object(step._replace(value=module, called=SELF), ("forward",))
            if type(module).__module__.startswith("torch.nn."):
                for name, value in vars(module).items():
                    if isinstance(value, PLAIN) and name not in _OF_MODULE:
                        self._place(step, module, name, f"{step.path}.{name}")
            for name, hooks in vars(module).items():
                if name.endswith("_hooks") and isinstance(hooks, dict):
                    users = self._add_hooks(hooks)
                    self._ahead += [_Step(step.path, "", one) for one in users]
            for tensor in module._parameters.values():
                for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                    self._add_hooks(getattr(tensor, name, None) or {})

    def _add_hooks(self, hooks: Mapping[Any, Any]) -> list[Any]:
        users = [hook for hook in hooks.values() if is_of_user(getattr(hook, "__func__", hook))]
        self._reach.hooks |= {id(hook): hook for hook in users}
        return users

    def _enter_method(self, step: _Step) -> None:
        function = getattr(step.value, "__func__", None)
        owner = getattr(step.value, "__self__", None)
        if function is None:  # written in C: of a list, or of a module
            self._reach.add_library_function(step.value, step.called, step.owned)
            if owner is not None and not isinstance(owner, ModuleType | type):
                self._reach.modifies |= {""} if isinstance(owner, CONTAINERS) else set()
                self._ahead.append(step._replace(value=owner, called=""))
            return
        self._ahead.append(step._replace(value=function))
        code = function.__code__ if isinstance(function, FunctionType) else _NO_CODE
        if takes_first(code):
            called = SELF if code.co_varnames[:1] == (SELF,) else ""
            self._ahead.append(step._replace(value=owner, called=called))

    def _enter_container(self, step: _Step) -> None:
        value = step.value
        taken = self._taken(step)
        if hasattr(type(value), "_fields") and None not in taken:  # a named tuple
            for name, item in zip(type(value)._fields, value, strict=True):
                if name in taken:
                    self._ahead.append(
                        step._replace(path=f"{step.path}.{name}", called=name, value=item)
                    )
            return
        if isinstance(value, CONTAINERS):
            self._place(step, value, "", step.path)
        if len(value) <= MAX_ITEMS:
            for item in list(value.values() if isinstance(value, dict) else value):
                self._ahead.append(step._replace(value=item, called=""))
        if not is_foreign(type(value).__module__):
            self._enter_object(step)

    def _enter_function(self, step: _Step) -> None:
        function: FunctionType = step.value
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        inner = [step._replace(value=one, called="") for one in vars(function).values()]
        if is_library_function(function):  # may call the user's functions that it was given
            self._reach.add_library_function(step.value, step.called, step.owned)
            held = [content_of(cell) for _, cell in cells]
            given = [one for one in held if isinstance(one, FunctionType | MethodType | partial)]
            self._ahead += [step._replace(value=one, called="") for one in given] + inner
            self._reach.ungraded |= bool(given)  # such as ``torch.no_grad``
            return
        for name, cell in cells:
            self._place(step, cell, name, name)
            self._ahead.append(_Step(name, name, content_of(cell)))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._ahead.append(step._replace(value=value, called=""))
        reach = self._reach
        taken = reach.uses.get(step.called, set()) | reach.strings
        named = {str(name) for name in taken if name} if step.called else set()
        for name in sorted(vars(function).keys() | named):
            if not hasattr(FunctionType, name):
                self._place(step, function, name, f"{step.path}.{name}")
        self._ahead += inner
        self._enter_code(function.__code__, function.__globals__)

    def _enter_generator(self, step: _Step) -> None:
        generator: GeneratorType[Any, Any, Any] = step.value
        self._enter_opaque(step)
        if generator.gi_frame is not None:
            for name, value in generator.gi_frame.f_locals.items():
                self._ahead.append(_Step(name, name, value))
            self._enter_code(generator.gi_code, generator.gi_frame.f_globals)
            for one in gc.get_referents(generator):  # its function has the cells of its closure
                if isinstance(one, FunctionType) and one.__code__ is generator.gi_code:
                    self._enter_function(step._replace(value=one))

    def _enter_constructors(self, cls: type) -> None:
        for function in () if is_librarys(cls) else constructors_of(cls):
            self._enter_function(_Step("", "", function))

    def _enter_code(self, code: CodeType, namespace: dict[str, Any]) -> None:
        found = read_code(code, self._reach.context)
        self._reach.add(found)
        self._codes.append((found, namespace))
        by_string = {str(n) for n in found.uses[""] if "globals" in found.names}
        for name in sorted((found.loaded | by_string) & namespace.keys()):
            self._global(namespace, name)
        for name in sorted(found.imported & sys.modules.keys()):
            self._enter_module_names(_Step(name, name, sys.modules[name]))

    def _global(self, namespace: dict[str, Any], name: str) -> None:
        value = namespace[name]
        if not isinstance(value, FunctionType | ModuleType | type):
            self._place(_Step(name, name, namespace), namespace, name, name)
        self._ahead.append(_Step(name, name, value))

    def _enter_module_names(self, step: _Step) -> None:
        """What code names of a module of the user's, and the environment."""
        module, names = step.value, self._reach.names
        if module.__name__ == "os" and "environ" in names:
            environment = getattr(module.environ, "_data", {})
            self._place(_Step("", "environ", environment), environment, "", "os.environ")
        if is_foreign(module.__name__) or is_installed(getattr(module, "__file__", None)):
            return
        for name in sorted(names & vars(module).keys()):
            self._global(vars(module), name)

    def _enter_object(self, step: _Step, methods: Sequence[str] = ()) -> None:
        value, taken, reach = step.value, self._taken(step), self._reach
        library = is_librarys(type(value)) and not isinstance(value, NAMESPACES)
        module = isinstance(value, torch.nn.Module)
        if library and not module and step.hops < MAX_HOPS and reach.only_reads(value, step.called):
            for name in sorted(taken & attributes_of(value).keys(), key=str):
                self._enter_attribute(step, str(name), attributes_of(value))
            return
        if library and step.hops >= MAX_HOPS:
            return
        partly = not library and is_partly_librarys(type(value))
        names = None if partly else taken.union(methods)
        named = bool(step.called) and None not in reach.uses.get(step.called, {None})
        own = [] if library else list(methods_of(type(value), names, named and not methods))
        if own:
            taken = taken | reach.taken_by(own, type(value), taken)
        every = (library and not module) or partly or reach.stores_any
        of_module = _OF_MODULE if module else set[str]()
        held = attributes_of(value)
        if partly or (library and not module):
            self._enter_opaque(step)
            if dict_of(value) is None:  # written in C: it says what it refers to
                inside = [step._replace(value=one, called="") for one in referents(value)]
                self._ahead += [one._replace(hops=step.hops + 1) for one in inside]
        hops = step.hops + library
        new = set() if library else taken & reach.stores
        for name in [*held, *sorted(new - held.keys(), key=str)]:
            if not (every or name in taken) or name in of_module:
                continue
            path = f"{step.path}.{name}" if step.path else str(name)
            self._place(step, value, str(name), path)
            if name in held:
                owned = step.owned and (not library or is_cover(type(value)))
                self._ahead.append(_Step(path, str(name), held[name], hops, owned))
        for cls in type(value).__mro__:
            self._enter_class(cls, value, taken, step.path)
        self._ahead += [step._replace(value=function, called="") for function in own]

    def _enter_attribute(self, step: _Step, name: str, held: Mapping[Any, Any]) -> None:
        path = f"{step.path}.{name}"
        self._place(step, step.value, name, path)
        self._ahead.append(_Step(path, name, held[name], step.hops, step.owned))

    def _enter_opaque(self, step: _Step) -> None:
        self._reach.begins |= step.owned and draws_seed(step.value)
        self._reach.opaque.add(id(step.value))
        self._place(step, step.value, "", step.path)

    def _enter_class(self, cls: type, owner: Any, taken: set[str | None], path: str) -> None:
        """What a class has that is no method: code may give the object one of its own."""
        if is_librarys(cls):
            return
        taken = taken | (vars(cls).keys() if self._reach.stores_any else set())
        members = [vars(cls)[name] for name in sorted(taken & vars(cls).keys(), key=str) if name]
        if owner is cls and any(True for one in members for _ in functions_of(one)):
            taken = taken | self._reach.uses[""]  # of ``cls``
        if "apply" in taken and owner is cls and issubclass(cls, torch.autograd.Function):
            taken = taken | {"forward", "backward", "setup_context"}
            backward = functions_of(getattr_static(cls, "backward"))
            self._reach.hooks |= {id(one): one for one in backward}
        for name in sorted(taken & vars(cls).keys(), key=str):
            if not name or (name.startswith("__") and name.endswith("__")):
                continue
            member = vars(cls)[name]
            if isinstance(member, CACHE):
                self._ahead.append(_Step(path, "", member))
            elif is_users_descriptor(member):
                self._ahead.append(_Step(f"{path}.{name}", SELF, member))
            if not hasattr(type(member), "__get__"):
                called = f"{path or cls.__name__}.{name}"
                for holder in (cls, owner):
                    self._place(_Step(path, "", holder), holder, name, called)
                self._ahead.append(_Step(called, name, member))
            elif owner is cls:
                self._ahead += [_Step(f"{path}.{name}", "", one) for one in functions_of(member)]


_OF_MODULE = set(vars(torch.nn.Module()))
