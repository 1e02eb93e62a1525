"""The house keeps its plan: who may import whom, what loading swpipe loads, how long a module is.

The rooms and the directions between them (an arrow reads "imports from")::

    tasks, loops ──> plans ──┐
    tuning ──> profiler ──> planning ──> the framework (swpipe/*.py) ──> torch
    reporting ──> tuning, profiler, planning
    swpipe/cli ──> everything; swpipe/__init__.py names what the rooms offer, and loads it late
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import swpipe
import swpipe.inference

PACKAGE = Path(swpipe.__file__).parent
ROOT = Path(__file__).parent.parent

ROOMS = (*("loops", "planning", "plans", "profiler", "reporting", "tasks", "tuning"),)
LINKED = ("plans", "tasks", "profiler")
"""Rooms that a link at the top level opens."""

MAY_USE = {
    "loops": ("plans",),
    "planning": (),
    "plans": ("planning",),
    "profiler": ("planning",),
    "reporting": ("planning", "profiler", "tuning"),
    "tasks": ("plans",),
    "tuning": ("planning", "plans", "profiler"),
}
"""The other rooms that a room may import."""

EDGE = ("cli", "testing", "__init__")
"""Modules of the framework that may name the rooms."""

SHARED_NAMES = {"pipeline_parallel", "torchrec", "transformer"}
"""A workload's name, in ``plans`` and in ``tasks``; and what each takes from TorchRec."""

SYSTEMS = ("plans", "schedulable", "tasks")
"""Rooms that could each be a separate repository: they import public names only."""

WORKLOADS = ("dynamicemb", "fbgemm_gpu", "megatron", "pandas", "polars", "torchmetrics", "torchrec")
"""Rooms that the framework never imports."""

LATE = ("jinja2", "matplotlib", "nvtx", "tabulate", "tomli_w", "tqdm")
"""Packages that are imported inside the functions that need them."""


class Import(NamedTuple):
    """One imported module: its dotted name, the line, and whether loading the file runs it."""

    name: str
    line: int
    at_load: bool


@cache
def _parsed(path: Path, _written_ns: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is cached."""
    return _parsed(path, path.stat().st_mtime_ns)


@cache
def imported(tree: ast.Module, package: str) -> tuple[Import, ...]:
    """Return every import of a module of this package."""
    return (*imports(tree, package),)


def imports(tree: ast.AST, package: str, at_load: bool = True) -> Iterator[Import]:
    """Yield every import below ``tree``, including those in functions and for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from swpipe import plans` names a room as surely as `from swpipe.plans import x`.
            yield from (
                Import(f"{base}.{alias.name}", node.lineno, at_load) for alias in node.names
            )
        else:
            runs = at_load and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                runs = False
            yield from imports(node, package, runs)


def wrong_imports(package: Path) -> list[str]:
    """Return the imports under ``package`` in a wrong direction, as ``file:line: why``."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        room = parts[0] if parts[0] in ROOMS else None
        others = [other for other in ROOMS if other != room]
        if room is not None:
            barred = [other for other in others if other not in MAY_USE[room]]
        else:
            barred = [] if parts[0] in EDGE else others
        folder = ".".join(["swpipe", *parts[:-1]])
        for name, line, at_load in imported(parsed(path), folder):
            top, *rest = name.split(".")
            if top == "swpipe" and rest and rest[0] in barred:
                why = f"{room or 'the framework'} must not import swpipe.{rest[0]}"
            elif room is None and top in WORKLOADS:
                why = f"the framework does not know {top}"
            elif at_load and top in LATE:
                why = f"{top} is imported inside the function that needs it"
            else:
                continue
            found.append(f"{path.relative_to(package)}:{line}: {why}")
    return found


def test_imports_go_one_way() -> None:
    """The framework imports no room and no workload; each room imports only what it may."""
    assert wrong_imports(PACKAGE) == []


def private_imports_of_systems(package: Path) -> list[str]:
    """Return the private modules and names of swpipe that systems import, as ``file:line: name``.

    A system may use its own private modules, such as ``swpipe.tasks.torchrec._torchrec``. A string
    that names a private module counts as a late import.
    """
    private = []
    for room in SYSTEMS:
        for path in sorted((package / room).rglob("*.py")):
            parts = path.relative_to(package).parts
            own = ".".join(["swpipe", *parts[: min(2, len(parts) - 1)]])
            tree = parsed(path)
            folder = ".".join(["swpipe", *parts[:-1]])
            names = [(one.name, one.line) for one in imported(tree, folder)]
            names += [
                (node.value, node.lineno)
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            private += [
                f"{path.relative_to(package)}:{line}: {name}"
                for name, line in names
                if re.match(r"swpipe\.(?:\w+\.)*_", name) and not name.startswith(f"{own}.")
            ]
    return private


def test_systems_import_public_names_only() -> None:
    """A system of another repository can use whatever tasks, plans and ``schedulable`` use."""
    assert private_imports_of_systems(PACKAGE) == []


@pytest.mark.parametrize(
    "code",
    [
        "from swpipe._values.walk import tensors_in",
        "from swpipe import _values",
        "import swpipe._engine.run",
        "from swpipe.core.plan import _checked",
        "def late():\n    from ..._values import walk",
        'WHERE = "swpipe._distributed.even_data"',
        "from swpipe.tasks.other._parts import part",
    ],
)
def test_a_private_import_of_a_system_is_found(tmp_path: Path, code: str) -> None:
    """Each way to import a private module or name is found; the system's own are allowed."""
    folder = tmp_path / "tasks" / "toy"
    folder.mkdir(parents=True)
    own = "from swpipe.tasks.toy._parts import part\nfrom swpipe.values import tensors_in\n"
    (folder / "step.py").write_text(f"{own}{code}\n")
    assert len(private_imports_of_systems(tmp_path)) == 1


def module_graph(package: Path) -> dict[str, set[str]]:
    """Return the modules of ``package`` that each module imports, also in functions."""
    paths = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for name, path in paths.items():
        folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
        named = [one.name for one in imported(parsed(path), folder)]
        found = {full if full in paths else full.rpartition(".")[0] for full in named}
        graph[name] = found & paths.keys() - {name}
    return graph


def in_circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that remain after repeatedly removing those that import no other.

    Each of these is in a circle or imports from one.
    """
    left = dict(graph)
    while free := [name for name, uses in left.items() if not uses & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """The imports form no circle; imports inside functions and for type checkers count."""
    assert in_circles(module_graph(PACKAGE)) == []


def test_no_two_modules_share_a_name() -> None:
    """A module's name means one thing; the two parts of one workload may share its name."""
    names = [name.rpartition(".")[2] for name in module_graph(PACKAGE)]
    # A package's main module may have the package's name.
    main = [name for name in module_graph(PACKAGE) if name.endswith(2 * f".{name.split('.')[-1]}")]
    counts = Counter(names) - Counter(name.rpartition(".")[2] for name in main)
    assert {name for name, count in counts.items() if count > 1} == SHARED_NAMES


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    """``import signal`` can mean one thing only; ``swpipe.trace`` is the word of the field."""
    names = {name.rpartition(".")[2] for name in module_graph(PACKAGE)}
    assert names & sys.stdlib_module_names == {"trace"}


def test_no_public_name_hides_a_module() -> None:
    """No package exports a name that one of its own modules has."""
    hidden = []
    for init in sorted(PACKAGE.rglob("__init__.py")):
        name = ".".join(init.relative_to(PACKAGE.parent).parent.parts)
        modules = {path.stem for path in init.parent.glob("*.py")}
        modules |= {path.parent.name for path in init.parent.glob("*/__init__.py")}
        exported = {one.name for one in imported(parsed(init), name)}
        hidden += [
            one
            for one in exported
            if one.rpartition(".")[2] in modules and one.rpartition(".")[0] != name
        ]
    assert hidden == []


MOST_LOADED, MOST_LOADED_WATCHED = 92, 111
"""The most modules of swpipe that a run loads up to its first batch, without and with pure tasks.
"""

BY_TORCH_ITSELF = {"torch.utils._device"}
"""Modules that ``torch.get_default_device`` loads."""


def test_a_run_loads_few_modules_and_nothing_else_of_torch() -> None:
    """The first batch waits for no more than its run needs; ``import swpipe`` loads no room."""
    code = """
import os, sys, torch
before = set(sys.modules)  # torch itself may load anything
import swpipe
print(*sorted(set(sys.modules) - before), flush=True)
def function(batch): return batch
loader = [torch.ones(1)]
watched = os.fork() == 0
if not watched:
    os.wait()
next(iter(swpipe.ahead(loader, function) if watched else swpipe.overlap(loader, [function])))
print(*sorted(set(sys.modules) - before), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, watched, plain = (set(line.split()) for line in done.stdout.splitlines())
    rooms = (*(f"swpipe.{room}" for room in ROOMS), "swpipe.cli")
    assert first & {*WORKLOADS, *LATE, "typer", *rooms} == set()
    for loaded, most in ((plain, MOST_LOADED), (watched, MOST_LOADED_WATCHED)):
        ours = {name for name in loaded if name.partition(".")[0] == "swpipe"}
        others = {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names}
        assert len(ours) <= most
        assert others - BY_TORCH_ITSELF - ours == set()


@pytest.mark.parametrize("door", [swpipe, swpipe.inference])
def test_all_public_names_load(door: ModuleType) -> None:
    """Each name in ``__all__`` exists, also if it is loaded late."""
    assert [name for name in door.__all__ if not hasattr(door, name)] == []


def test_names_loaded_late_are_listed() -> None:
    """``dir`` lists them: the pages of the API are made from it."""
    assert {*swpipe.inference.__all__} <= {*dir(swpipe.inference)}


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the repository")
@pytest.mark.parametrize("room", LINKED)
def test_the_links_at_the_top_open_the_rooms(room: str) -> None:
    """plans, tasks and profiler at the top level are relative links into the package."""
    link = ROOT / room
    if not (ROOT / "swpipe").exists():
        pytest.skip("runs against an installed swpipe")
    assert link.readlink() == Path("swpipe", room)
    assert (link / "__init__.py").is_file()


def test_every_test_says_what_holds() -> None:
    """Each test has a docstring; only files that seem to have one without are parsed."""
    begins = r"^ *def test_\w+\((?:[^()]|\([^()]*\))*\)[^\n]*:\n"
    silent = re.compile(begins + r' *+(?!""")', re.MULTILINE)
    found = [
        f"{path.name}:{node.name}"
        for path in sorted(Path(__file__).parent.rglob("test_*.py"))
        if silent.search(path.read_text(encoding="utf-8"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if ast.get_docstring(node) is None
    ]
    assert found == []


def test_no_users_code_is_read_and_no_name_in_it_followed() -> None:
    """What a function refers to is its author's; state is given, declared, or shown by torch."""
    inside = ("co_names", "co_consts", "co_freevars", "__closure__", "cell_contents", "__globals__")
    found = {
        f"{path.name}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in inside
        if name in path.read_text()
    }
    assert found == set()
