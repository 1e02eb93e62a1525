"""Compare the parts of TorchRec that swpipe uses with those of a new release.

    pip install --no-deps --target NEW torchrec==X.Y.Z
    python .ci/torchrec_release.py NEW

says what is gone, and to where it may have moved; which parameters differ; and the lines of source
that have changed since the TorchRec that is installed. The new one is imported on the installed
torch and fbgemm, or on those of ``--python``, an interpreter that has swpipe's dependencies.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from importlib import metadata
from pathlib import Path
from typing import Any

from swpipe.tasks.torchrec.private_parts import PARTS, find, problems, source_of


def sources() -> dict[str, str]:
    """Return the source of each part; of a class, that of its used members and initialiser."""
    found = {}
    for part in PARTS:
        whole = find(part)
        if inspect.isclass(whole):
            made = ["__init__"] if part.takes is not None or part.has else []
            for name in (*made, *part.calls, *part.replaces, *part.has.split()):
                if source := source_of(getattr(whole, name, None)):
                    found[f"{part}.{name}"] = source
        elif inspect.isfunction(whole):
            found[str(part)] = inspect.getsource(whole)
    return found


def _look() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in PARTS:
            find(part)
        version = metadata.version("torchrec")
        return {"version": version, "problems": problems(), "sources": sources()}


def _look_at(folder: Path, python: str) -> dict[str, Any]:
    """Return the same for the TorchRec in a folder, from a process of its own."""
    package = Path(__file__).parents[1]
    paths = os.pathsep.join([str(folder.resolve()), str(package)])
    done = subprocess.run(
        [python, __file__, "--look"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{folder}: TorchRec cannot be imported by {python}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            before, after = old[name].splitlines(), new[name].splitlines()
            yield "\n".join([f"{name} has changed:", *list(unified_diff(before, after, n=2))[2:]])
    for name in old.keys() - new.keys():
        yield f"{name} is no function any more"


def main() -> int:
    """Compare; the exit status is 1 if a part is not as expected."""
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
    head = f"torchrec {here['version']} is installed"
    if options.folder is not None:
        head += f"; {options.folder} has {other['version']}"
    lines = [
        head,
        *(f"not as expected: {line}" for line in other["problems"]),
        *changes,
        f"{len(PARTS)} parts: {len(other['problems'])} not as expected, {len(changes)} changed",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if other["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
