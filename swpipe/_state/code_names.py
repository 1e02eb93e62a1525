"""What a function's code names: attributes that it takes, and what it assigns to or modifies.

The bytecode is read, and nothing is run. What has no name there (a local variable, an argument, an
item) is called "", and may be any object; a local variable that only ever holds a list, dict or
result that the code has just made is none that anybody else can see.
"""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from types import CodeType
from typing import Any

SELF = "self"
LENGTH = "__len__"
_STORES = (
    "STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF", "DELETE_ATTR",
)  # fmt: skip
_MODIFIERS = {
    "append", "appendleft", "extend", "extendleft", "insert", "remove", "pop", "popleft", "popitem",
    "clear", "sort", "reverse", "rotate", "add", "discard", "update", "setdefault", "move_to_end",
    "subtract", "difference_update", "intersection_update", "symmetric_difference_update",
    "__setitem__", "__delitem__", "__iadd__", "__ior__",
    "fill", "put", "partition", "resize", "itemset", "setfield", "byteswap", "frombytes",
}  # fmt: skip
_MODIFY_ARGUMENTS = {
    "heappush", "heappop", "heapreplace", "heappushpop", "heapify", "insort", "insort_left",
    "insort_right", "shuffle", "copyto", "put", "at", "setitem", "delitem", "exec",
}  # fmt: skip
_FILL_ARGUMENTS = {
    "pack_into", "readinto", "readinto1", "recv_into", "putmask", "place", "fill_diagonal",
    "put_along_axis",
}  # fmt: skip
"""Functions and methods that write into an array that they are given."""

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_LOADS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "LOAD_CLASSDEREF")
_IGNORED = ("CACHE", "PUSH_NULL", "PRECALL", "RESUME", "EXTENDED_ARG", "NOP")
_SUBSCRIPT = {"STORE_SUBSCR": 1, "DELETE_SUBSCR": 1, "STORE_SLICE": 2}
"""How many values lie on the stack above the container."""

_BUILT = ("BUILD_LIST", "BUILD_MAP", "BUILD_SET", "LIST_EXTEND", "DICT_UPDATE")
_FRESH = (*_BUILT, "BINARY_OP", "LOAD_CONST")
_ARRAY_MAKERS = {
    "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like",
}  # fmt: skip
_MAKERS = {"list", "dict", "set", "deque", "defaultdict", "OrderedDict", "Counter", "bytearray"}
_BY_STRING = {
    "getattr",
    "setattr",
    "delattr",
    "hasattr",
    "vars",
    "__dict__",
    "attrgetter",
    "globals",
}
_ANY = {"setattr", "delattr", "vars", "__dict__", "globals", "__setattr__", "exec", "eval"}
_USES = ("LOAD_FAST", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_AND_CLEAR", "STORE_FAST_LOAD_FAST")
_UNNAMED = {"super", "locals", "eval", "exec"}
"""Names of what takes local variables without naming them."""

_UNGRADED = {"no_grad", "inference_mode", "set_grad_enabled", "data", "load_state_dict"}
_CHANGE_TENSORS = {"load_state_dict", "reset_parameters", "reset_running_stats", "data"}


@dataclass
class CodeNames:
    """What some code does, by name.

    Attributes:
        uses: Name to the attributes that are taken of what is called so, ``LENGTH`` among them for
            ``len``; None if anything else is done with it. What has no name is called "".
        stores: Names of variables and attributes that are assigned to or deleted.
        sets: Attributes of the context that are assigned to.
        stores_any: Whether it may assign to attributes by names that it computes.
        modifies: What the lists, dicts and arrays are called that it may modify.
        adds: Names of variables and attributes that it may modify by operators such as ``+=``.
        fills: What the arrays are called that functions may write into for it.
        subscripts: What the objects are called of which it gets items.
        loaded: Names of globals.
        imported: Modules that are imported when it runs.
        names: All names of globals and attributes.
        strings: Words that code with functions such as ``getattr`` may use as names.
        counts: Name to how many times it is loaded.
        with_generator: How many calls pass a generator by its keyword.
        changes_tensors: Whether it may modify tensors in place.
        ungraded: Whether it may modify parameters in place, which is an error with gradients on.
    """

    uses: dict[str, set[str | None]] = field(default_factory=lambda: {"": set()})
    stores: set[str] = field(default_factory=set)
    sets: set[str] = field(default_factory=set)
    stores_any: bool = False
    modifies: set[str] = field(default_factory=set)
    adds: set[str] = field(default_factory=set)
    fills: set[str] = field(default_factory=set)
    subscripts: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    with_generator: int = 0
    changes_tensors: bool = False
    ungraded: bool = False

    def add(self, other: CodeNames) -> None:
        """Add what other code does."""
        for name, taken in other.uses.items():
            self.uses.setdefault(name, set()).update(taken)
        for each in _SETS:
            getattr(self, each).update(getattr(other, each))
        self.stores_any |= other.stores_any
        self.changes_tensors |= other.changes_tensors
        self.ungraded |= other.ungraded


_SETS = [one.name for one in fields(CodeNames) if one.default_factory is set]


@cache
def read_code(code: CodeType, context: str) -> CodeNames:
    """What code does, with the functions defined in it; ``context`` is what it calls the context.

    The result is shared: do not modify it.
    """
    found = CodeNames()
    for each in _codes(code):
        _Reader(each, context, found).read()
    return found


def takes_first(code: CodeType) -> bool:
    """Whether a method's code may use the object that it is bound to."""
    first = code.co_varnames[:1]
    if not first or first[0] in code.co_cellvars or not _UNNAMED.isdisjoint(code.co_names):
        return True
    used = (one.argval for one in dis.get_instructions(code) if one.opname in _USES)
    return any(first[0] in (one if isinstance(one, tuple) else (one,)) for one in used)


def modifies_argument(name: str, of_container: bool) -> bool:
    """Whether a function of this name, or a container's method, modifies what it is given."""
    return name in _MODIFY_ARGUMENTS or (of_container and name in _MODIFIERS)


class _Reader:
    """Reads the code of one function."""

    def __init__(self, code: CodeType, context: str, found: CodeNames) -> None:
        self._code, self._context, self._found = code, context, found
        self._steps = [one for one in dis.get_instructions(code) if one.opname not in _IGNORED]
        arguments = set(code.co_varnames[: _arguments(code)]) - {context}
        self._fresh = set(_variables(self._steps, _FRESH)) - arguments
        self._built = set(_variables(self._steps, _BUILT)) - arguments
        self._aliases = {*_alias_variables(self._steps), *arguments}

    def read(self) -> None:
        found, names = self._found, set(self._code.co_names)
        found.names |= names
        if not _MODIFY_ARGUMENTS.isdisjoint(names):
            found.modifies.add("")
        if not _FILL_ARGUMENTS.isdisjoint(names):
            found.fills.add("")
        if not _BY_STRING.isdisjoint(names):
            strings = {one for one in self._code.co_consts if isinstance(one, str)}
            found.strings |= {one for one in strings if one.isidentifier()}
            found.uses[""] |= strings
        found.changes_tensors |= any(map(_changes_tensors, names))
        found.ungraded |= not _UNGRADED.isdisjoint(names)
        called: str | None = None  # what the last instruction has put onto the stack is called so
        for index, one in enumerate(self._steps):
            called = self._read_step(index, one, called)

    def _read_step(self, index: int, one: dis.Instruction, called: str | None) -> str | None:
        found, name = self._found, one.opname
        self._count(index, one, called)
        for variable in one.argval if isinstance(one.argval, tuple) else ():
            if name.startswith(("LOAD_FAST", "STORE_FAST")):  # two at once, since Python 3.13
                found.uses.setdefault(variable, set()).add(None)
        attribute = name in ("LOAD_ATTR", "LOAD_METHOD")
        named = attribute or name in ("STORE_ATTR", "DELETE_ATTR")
        if named or called is not None:
            other = LENGTH if self._is_length(index) else None
            found.uses.setdefault(called or "", set()).add(one.argval if named else other)
        if attribute and one.argval in _MODIFIERS and not self._is_fresh(index - 1):
            of_type = self._steps[index - 1].opname == "LOAD_GLOBAL" and called in _MAKERS
            found.modifies.add("" if of_type else called or "")  # ``list.append(log, value)``
        if name in _STORES:
            of_context = named and called == self._context != ""
            (found.sets if of_context else found.stores).add(one.argval)
        if name in _SUBSCRIPT:
            at = _container(self._steps, index)
            found.changes_tensors |= not self._is_fresh(at)
            if not self._is_fresh(at):
                found.modifies.add(self._called(at) or "")
        if _is_in_place(one):
            self._read_in_place(index)
        if name == "BINARY_SUBSCR" and self._steps[index - 1].opname != "COPY":
            found.subscripts.add(self._called(_begin(self._steps, index - 1) - 1) or "")
        if name in _GLOBALS:
            found.loaded.add(one.argval)
        if name == "IMPORT_NAME":
            found.imported.add(one.argval)
        return self._called(index)

    def _read_in_place(self, index: int) -> None:
        """An augmented assignment: of a list, it adds to the list."""
        found, (target, *after) = self._found, self._steps[index + 1 : index + 4]
        of_attribute = bool(after) and after[0].opname == "STORE_ATTR"
        found.changes_tensors |= not of_attribute and target.argval not in self._fresh
        if of_attribute or target.opname in _STORES:
            found.adds.add((after[0] if of_attribute else target).argval)
        elif target.opname != "STORE_FAST" or target.argval not in self._fresh:
            alias = target.opname == "STORE_FAST" and target.argval in self._aliases
            if alias or self._is_container(index - 1):
                found.modifies.add("")

    def _is_container(self, index: int) -> bool:
        """Whether an instruction leaves a list, dict or set that the code has just made."""
        one = self._steps[index]
        return _makes(self._steps, index, _BUILT) or (
            one.opname == "LOAD_FAST" and one.argval in self._built
        )

    def _count(self, index: int, one: dis.Instruction, called: str | None) -> None:
        """Count what the code names, and the calls that pass a generator."""
        found, loads = self._found, one.opname.startswith("LOAD")
        if loads and one.argval in _ANY and not self._is_of_context(index, called):
            found.stores_any = True
        if loads and isinstance(one.argval, str):
            found.counts[one.argval] += 1
        if one.opname == "KW_NAMES" and one.arg is not None:
            self._read_keywords(index, self._code.co_consts[one.arg])
        elif one.opname == "LOAD_CONST" and isinstance(one.argval, tuple):  # since Python 3.13
            self._read_keywords(index, one.argval)

    def _read_keywords(self, index: int, keywords: tuple[Any, ...]) -> None:
        """Read what a call passes by keywords; the values lie before."""
        found, at = self._found, index - 1
        for keyword in reversed(keywords):
            value = self._steps[at]
            one_of_two = self._steps[at + 1].is_jump_target
            given = value.opname != "LOAD_CONST" or one_of_two or bool(value.argval)
            found.with_generator += keyword == "generator"
            if keyword == "dropout_p" and given:
                found.names.add(keyword)
                found.counts[keyword] += 1
            elif keyword == "out" and given and not self._is_fresh(at):
                found.fills.add(called := self._called(at) or "")
                found.changes_tensors |= not called
            at = _begin(self._steps, at) - 1

    def _called(self, index: int) -> str | None:
        """What the value is called that an instruction leaves; None if it has no name."""
        if not 0 <= index < len(self._steps):
            return None
        one = self._steps[index]
        if one.opname in (*_LOADS, "LOAD_ATTR", "LOAD_METHOD"):
            local = one.opname == "LOAD_DEREF" and one.argval in self._code.co_cellvars
            return None if local else one.argval
        if one.opname == "LOAD_FAST":
            first = self._code.co_varnames[0] == one.argval and one.argval == SELF
            return one.argval if first or one.argval == self._context else None
        return None

    def _is_length(self, index: int) -> bool:
        """Whether an instruction calls ``len`` of what the one before leaves."""
        if self._steps[index].opname != "CALL" or self._steps[index].arg != 1:
            return False
        before = self._steps[_begin(self._steps, index - 1) - 1]
        return before.opname == "LOAD_GLOBAL" and before.argval == "len"

    def _is_of_context(self, index: int, called: str | None) -> bool:
        """Whether ``setattr``, ``vars`` or ``__dict__`` is used on the context."""
        after = self._steps[index + 1].argval if index + 1 < len(self._steps) else None
        return bool(self._context) and self._context in (called, after)

    def _is_fresh(self, index: int) -> bool:
        """Whether an instruction leaves a variable of what the code has just made."""
        if not 0 <= index < len(self._steps):
            return False
        one = self._steps[index]
        return one.opname.startswith("LOAD_FAST") and one.argval in self._fresh


def _is_in_place(step: dis.Instruction) -> bool:
    """Whether a step is an augmented assignment, such as ``+=``."""
    return step.opname == "BINARY_OP" and str(step.argrepr).endswith("=")


def _arguments(code: CodeType) -> int:
    varied = bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return code.co_argcount + code.co_kwonlyargcount + varied


def _variables(steps: Sequence[dis.Instruction], opnames: tuple[str, ...]) -> Iterator[str]:
    """Local variables that only get what the code makes by some instructions."""
    other: set[str] = set()
    made: set[str] = set()
    for index, one in enumerate(steps):
        if one.opname == "STORE_FAST":
            if not _is_in_place(steps[index - 1]):
                new = all(_makes(steps, at, opnames) for at in _arms(steps, index))
                (made if new else other).add(one.argval)
        elif one.opname.startswith("STORE_FAST"):
            other.update(one.argval if isinstance(one.argval, tuple) else (one.argval,))
    yield from made - other


def _alias_variables(steps: Sequence[dis.Instruction]) -> Iterator[str]:
    """Local variables that get what something else holds, such as an attribute or an item."""
    for index, one in enumerate(steps):
        before = [steps[at] for at in _arms(steps, index)] if one.opname == "STORE_FAST" else []
        new = (_is_in_place(each) or each.opname.startswith(("CALL", *_FRESH)) for each in before)
        if not all(new):
            yield one.argval


def _arms(steps: Sequence[dis.Instruction], index: int) -> Iterator[int]:
    """The instructions that leave the value which is stored: of a condition, one in each arm."""
    yield index - 1
    for at, one in enumerate(steps if steps[index].is_jump_target else ()):
        if "JUMP" in one.opname and one.argval == steps[index].offset:
            before = [steps[at - number].opname for number in (1, 2)]
            # Of ``or``, since Python 3.12, the value is copied for the jump.
            yield at - 1 - sum(name in ("COPY", "TO_BOOL") for name in before)


def _makes(steps: Sequence[dis.Instruction], index: int, opnames: tuple[str, ...]) -> bool:
    before = [steps[at].opname if at >= 0 else "" for at in (index, index - 1)]
    if before[0].startswith("CALL"):  # of a comprehension, or of a type without arguments
        made = before[1] == "LOAD_GLOBAL" and steps[index - 1].argval in _MAKERS
        return before[1] == "GET_ITER" or made or (opnames is _FRESH and _is_array(steps, index))
    return before[0] in opnames


def _is_array(steps: Sequence[dis.Instruction], index: int) -> bool:
    """Whether a call makes an array or a tensor, such as ``torch.empty(2)``."""
    begin = _begin(steps, index)
    return steps[begin].opname == "LOAD_GLOBAL" and steps[begin + 1].argval in _ARRAY_MAKERS


def _container(steps: Sequence[dis.Instruction], index: int) -> int:
    """The instruction that has put the container of a subscript onto the stack; -1 if unknown."""
    at = index - 1
    if [one.opname for one in steps[max(0, index - 2) : index]] == ["SWAP", "SWAP"]:
        while at > 0 and [steps[at].opname, steps[at - 1].opname] != ["COPY", "COPY"]:
            at -= 1
        at -= 2  # of ``container[key] += value``: both are on the stack twice
    for _ in range(_SUBSCRIPT[steps[index].opname]):
        at = _begin(steps, at) - 1
    return at


def _begin(steps: Sequence[dis.Instruction], at: int) -> int:
    """Where the expression begins that ends with an instruction."""
    needed = 1
    while at >= 0:
        one = steps[at]
        try:
            needed -= dis.stack_effect(
                one.opcode, one.arg if one.opcode >= dis.HAVE_ARGUMENT else None
            )
        except ValueError:
            return 0
        if needed <= 0:
            return at
        at -= 1
    return 0


def _changes_tensors(name: str) -> bool:
    """Whether it is the name of a method that modifies a tensor, by torch's convention."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _CHANGE_TENSORS


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
