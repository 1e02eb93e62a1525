"""Packages use each other's public names, and only ``swpipe.device`` knows kinds of device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layout import PACKAGE, ROOT, parsed

PAGE = ROOT / "docs" / "private-symbols.md"

OF_PYTHON = {
    *("_DummyThread", "_current_frames", "_exit", "_fields", "_getframe", "_is_gil_enabled"),
    *("_replace", "_thread"),
}
"""Python's own names, which need no row on the page."""

NO_SYMBOLS = {"_Req", "_like", "_process", "_released", "_sequencer", "_shortcut_tasks"}
"""Strings that begin with an underscore and are no name of another package."""

_ROW = re.compile(r"^\| `(swpipe/[\w/]+\.py)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")


def modules(package: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield each module's path under ``package``, and its syntax tree."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package), parsed(path)


def is_private(name: str) -> bool:
    """Return whether a name has one leading underscore."""
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def own_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines: functions, classes, variables, attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            names.add(node.attr)
    return names


def of_self(node: ast.Attribute) -> bool:
    """Return whether the object is ``self``, ``cls`` or ``super()``."""
    return ast.unparse(node.value) in ("self", "cls", "super()")


def torchs_modules(tree: ast.Module) -> dict[str, str]:
    """Return what a module imports of torch: the local name to the dotted one."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or "torch": a.name for a in node.names if a.asname or a.name == "torch"
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {local: name for local, name in names.items() if name.split(".")[0] == "torch"}


def attributes_of_others(tree: ast.Module, package: set[str]) -> Iterator[str]:
    """Yield the private attributes that a module uses and does not define.

    Those of ``self`` may be another module's of swpipe, whose names are in ``package``. The name is
    dotted if the object is a module of torch.
    """
    here, imported = own_names(tree), torchs_modules(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        if node.attr not in (package if of_self(node) else here):
            root, _, rest = ast.unparse(node).partition(".")
            of_torch = root in imported and re.fullmatch(r"[\w.]+", rest)
            yield f"{imported[root]}.{rest}" if of_torch else node.attr


def private_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module imports, and its imports from private modules.

    Imports for type checkers are left out, since mypy reports these.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from private_imports(node)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            # A package of swpipe may be private: what is in it is not.
            checked = name.rpartition(".")[2] if name.startswith("swpipe.") else name
            if any(map(is_private, checked.split("."))):
                yield name


def private_strings(tree: ast.Module, package: set[str]) -> Iterator[str]:
    """Yield the strings that are private names, such as arguments of ``getattr``."""
    formatted = [part for f in ast.walk(tree) if isinstance(f, ast.JoinedStr) for part in f.values]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if name.isidentifier() and is_private(name) and node not in formatted:
                yield from {name} - package - NO_SYMBOLS


def private_symbols(tree: ast.Module, package: set[str]) -> set[str]:
    """Return the private names of other packages and modules that a module uses."""
    names = {
        *attributes_of_others(tree, package),
        *private_imports(tree),
        *private_strings(tree, package),
    }
    names = {name for name in names if not OF_PYTHON & {*name.split(".")}}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def uses(package: Path) -> dict[str, set[str]]:
    """Return these names for each module that uses some."""
    trees = dict(modules(package))
    own = set().union(*map(own_names, trees.values()))
    return {
        f"swpipe/{path.as_posix()}": names
        for path, tree in trees.items()
        if (names := private_symbols(tree, own))
    }


def rows() -> dict[str, tuple[set[str], list[str]]]:
    """Return the rows of the page: for each module its symbols, and the tests."""
    listed: dict[str, tuple[set[str], list[str]]] = {}
    for path, symbols, tests in _ROW.findall(PAGE.read_text(encoding="utf-8")):
        before, named = listed.get(path, (set(), []))
        listed[path] = (before | {*_CODE.findall(symbols)}, named + _CODE.findall(tests))
    return listed


def test_each_private_name_of_another_package_has_a_row() -> None:
    """A name of another swpipe module must be public; all other private names are on a page.

    If a module no longer uses a name, its row is removed.
    """
    listed = {path: symbols for path, (symbols, _) in rows().items()}
    used = uses(PACKAGE)
    lacking = {path: sorted(used[path] - listed.get(path, set())) for path in used}
    needless = {path: sorted(listed[path] - used.get(path, set())) for path in listed}
    assert {path: names for path, names in lacking.items() if names} == {}
    assert {path: names for path, names in needless.items() if names} == {}


def test_each_row_of_private_names_has_tests() -> None:
    """They fail if the module's private names disappear."""
    assert [path for path, (_, tests) in rows().items() if not tests] == []
    tests = {test for _, named in rows().values() for test in named}
    assert [test for test in sorted(tests) if not (ROOT / test).exists()] == []


@pytest.mark.parametrize(
    ("code", "symbols"),
    [
        ("import torch\ntorch._C._f()", {"torch._C._f"}),
        ("from torch.utils import _pytree as tree\ntree._leaf", {"torch.utils._pytree._leaf"}),
        ("from torch._utils import thing", {"torch._utils.thing"}),
        ("def f(tensor): return tensor._base", {"_base"}),
        ("getattr(module, '_modules')", {"_modules"}),
        ("from swpipe.core.task import _part", {"swpipe.core.task._part"}),
        ("class A:\n    def __init__(self): self._own = 1\n    def f(a): return a._own", set()),
        ("from swpipe._values import walk\nnode._replace(a=1)", set()),
    ],
)
def test_a_private_name_of_another_package_is_found(code: str, symbols: set[str]) -> None:
    """It may be an attribute, an import or a string; a name that the module defines is its own."""
    tree = ast.parse(code)
    assert private_symbols(tree, own_names(tree)) == symbols


def names_a_device(node: ast.AST) -> bool:
    """Return whether an expression contains the name of a kind of device."""
    return any(
        isinstance(part, ast.Constant)
        and isinstance(part.value, str)
        and part.value.partition(":")[0] in ("cpu", "cuda")
        for part in ast.walk(node)
    )


def device_questions(package: Path) -> list[str]:
    """Return where a module outside ``device`` asks for the kind of a device."""
    found = []
    for path, tree in modules(package):
        if path.parts[0] == "device":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                asks = any(map(names_a_device, (node.left, *node.comparators)))
            elif isinstance(node, ast.MatchValue):
                asks = names_a_device(node.value)
            else:
                asks = isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda")
            if asks:
                found.append(f"{path}:{getattr(node, 'lineno', '?')}")
    return found


def test_only_devices_know_their_kind() -> None:
    """Other code does not compare with "cpu" or "cuda": a device has an attribute for it."""
    assert device_questions(PACKAGE) == []
