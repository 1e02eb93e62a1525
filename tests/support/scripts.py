"""Python scripts in processes of their own, forked from one that has imported torch already.

A script is ``__main__``, from its first line to the interpreter's shutdown. A script that tests an
import or a launcher needs an interpreter of its own.
"""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.support.ports import free_port
from tests.support.servers import ROOT, Process

DEADLINE_S = 120.0
"""Seconds after which a script is killed, where a test does not say otherwise."""


@dataclass(frozen=True)
class Script:
    """A script that runs as ``__main__``.

    Attributes:
        code: Python source; or else
        path: a file; or else
        module: a module, as of ``python -m``.
        args: ``sys.argv`` without the first.
        environment: Variables besides those of the server.
        folder: The folder in which it runs.
        errors: Warnings that are errors, by the names of their classes.
        is_torn_down: Whether modules and daemon threads are taken down at its end, which takes
            long; without it threads are joined and exit functions called all the same.
    """

    code: str = ""
    path: str = ""
    module: str = ""
    args: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = str(ROOT)
    errors: Sequence[str] = ()
    is_torn_down: bool = True


def as_torchrun(size: int) -> list[dict[str, str]]:
    """Return the variables of each rank of a job on this machine."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    told["TORCHELASTIC_RUN_ID"] = "here"
    sizes = {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
    return [{**told, **sizes, "RANK": f"{k}", "LOCAL_RANK": f"{k}"} for k in range(size)]


class Ended(NamedTuple):
    """The result of a script.

    Attributes:
        returncode: The exit code; below 0, the signal, as in ``subprocess``.
        stdout: Its standard output.
        stderr: Its standard error.
    """

    returncode: int
    stdout: str
    stderr: str


class LateError(RuntimeError):
    """A script was killed at its deadline."""


class Scripts:
    """A runner of scripts.

    Args:
        kind: The server that they are forked from, of ``servers.IMPORTED``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def run(self, script: Script, deadline_s: float = DEADLINE_S) -> Ended:
        """Run one script."""
        return self.run_together([script], deadline_s)[0]

    def run_together(
        self, scripts: Sequence[Script], deadline_s: float = DEADLINE_S
    ) -> list[Ended]:
        """Run several scripts at the same time.

        Raises:
            LateError: One had not ended by the deadline.
        """
        with ExitStack() as files:
            outputs = [
                [files.enter_context(tempfile.TemporaryFile()) for _ in (1, 2)] for _ in scripts
            ]
            processes = [
                Process(self._kind, __name__, asdict(script), [file.fileno() for file in pair])
                for script, pair in zip(scripts, outputs, strict=True)
            ]
            until_s = time.monotonic() + deadline_s
            codes = [process.wait(until_s - time.monotonic()) for process in processes]
            for process in processes:
                process.kill()
                process.wait(DEADLINE_S)
            said = [[_text(file) for file in pair] for pair in outputs]
        ended = []
        for code, (printed, error) in zip(codes, said, strict=True):
            if code is None:
                raise LateError(f"a script was killed after {deadline_s:g} s:\n{error}")
            ended.append(Ended(code, printed, error))
        return ended


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def begin(job: dict[str, Any], outputs: list[int]) -> None:
    """Become the script in this process."""
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    for name in job["errors"]:
        warnings.simplefilter("error", getattr(builtins, name))
    sys.argv[:] = [job["path"] or "-c", *job["args"]]
    try:
        _run(job)
    except SystemExit as end:
        if end.code:
            raise
    if not job["is_torn_down"]:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _run(job: dict[str, Any]) -> None:
    if job["module"]:
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    code = job["code"]
    if job["path"]:
        main.__file__ = job["path"]
        sys.path.insert(0, str(Path(job["path"]).parent))  # as Python does
        code = Path(job["path"]).read_text("utf-8")
    exec(compile(code, job["path"] or "<string>", "exec"), vars(main))
