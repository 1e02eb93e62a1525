"""Compare the parts of TorchRec that swpipe imports with those of a new release.

    pip install --no-deps --target NEW torchrec==X.Y.Z
    python .ci/torchrec_release.py NEW

says what is gone, and the lines of source that have changed since the TorchRec that is installed.
The new one is imported on the installed torch and fbgemm, or on those of ``--python``, an
interpreter that has swpipe's dependencies.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import unified_diff
from importlib import metadata
from pathlib import Path
from typing import Any

IMPORTS = Path(__file__).parents[1] / "swpipe/tasks/torchrec/_torchrec.py"


def parts() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each class and function that swpipe imports of TorchRec."""
    for node in ast.walk(ast.parse(IMPORTS.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchrec"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def sources() -> dict[str, str]:
    """Return the source of each part; "" for one that is gone."""
    found = {}
    for module, name in parts():
        whole = None
        with suppress(ImportError):
            whole = getattr(importlib.import_module(module), name, None)
        if not inspect.ismodule(whole):
            found[f"{module}.{name}"] = "" if whole is None else inspect.getsource(whole)
    return found


def _look() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"version": metadata.version("torchrec"), "sources": sources()}


def _look_at(folder: Path, python: str) -> dict[str, Any]:
    """Return the same for the TorchRec in a folder, from a process of its own."""
    done = subprocess.run(
        [python, __file__, "--look"],
        env={**os.environ, "PYTHONPATH": str(folder.resolve())},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{folder}: TorchRec cannot be imported by {python}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in old:
        if new[name] and old[name] != new[name]:
            before, after = old[name].splitlines(), new[name].splitlines()
            yield "\n".join([f"{name} has changed:", *list(unified_diff(before, after, n=2))[2:]])


def main() -> int:
    """Compare; the exit status is 1 if a part is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", nargs="?", type=Path, help="where the new TorchRec is")
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter to import it with"
    )
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    here = _look()
    if options.look:
        sys.stdout.write(f"\n{json.dumps(here)}\n")
        return 0
    other = here if options.folder is None else _look_at(options.folder, options.python)
    changes = sorted(_changes(here["sources"], other["sources"]))
    gone = [name for name, source in other["sources"].items() if not source]
    head = f"torchrec {here['version']} is installed"
    if options.folder is not None:
        head += f"; {options.folder} has {other['version']}"
    lines = [
        head,
        *(f"{name} is gone" for name in gone),
        *changes,
        f"{len(here['sources'])} parts: {len(gone)} gone, {len(changes)} changed",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
