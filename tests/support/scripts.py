"""Python scripts in processes of their own, forked from one that has imported torch already.

    test                          server                          script
    run("...")    ── request ──>  has imported torch, swpipe
                                  fork  ─────────────────────>    ``__main__``, from the first line
                  <── code ─────  waits, kills what is late       to the interpreter's shutdown

To import torch and to take it down again costs two seconds of a script that runs for milliseconds.
A script that is to show what an import does, or what a launcher, needs an interpreter of its own.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]

DEADLINE_S = 120.0
"""Seconds after which a script is killed, where a test does not say otherwise."""


@dataclass(frozen=True)
class Script:
    """What runs as ``__main__``.

    Attributes:
        code: Python source; or else
        path: a file; or else
        module: a module, as of ``python -m``.
        args: ``sys.argv`` without the first.
        environment: Variables besides those of the server.
        folder: Where it runs.
        errors: Warnings that are errors, by the names of their classes.
    """

    code: str = ""
    path: str = ""
    module: str = ""
    args: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = str(ROOT)
    errors: Sequence[str] = ()


def as_torchrun(size: int) -> list[dict[str, str]]:
    """The variables of each rank of a job on this machine."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    told["TORCHELASTIC_RUN_ID"] = "here"
    sizes = {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
    return [{**told, **sizes, "RANK": f"{k}", "LOCAL_RANK": f"{k}"} for k in range(size)]


class Ended(NamedTuple):
    """How a script ended.

    Attributes:
        returncode: As of ``subprocess``: below 0, the signal.
        stdout: What it printed.
        stderr: What it said.
    """

    returncode: int
    stdout: str
    stderr: str


class LateError(RuntimeError):
    """A script was killed at its deadline."""


class Scripts:
    """Runs scripts; the server begins with the first one.

    Args:
        imports: Modules that scripts find imported.
    """

    def __init__(self, *imports: str) -> None:
        self._imports = imports
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, script: Script, deadline_s: float = DEADLINE_S) -> Ended:
        """Run one script."""
        return self.run_together([script], deadline_s)[0]

    def run_together(
        self, scripts: Sequence[Script], deadline_s: float = DEADLINE_S
    ) -> list[Ended]:
        """Run some at the same time.

        Raises:
            LateError: One had not ended by the deadline.
        """
        with tempfile.TemporaryDirectory(prefix="scripts-") as folder:
            jobs = [{**asdict(s), "out": f"{folder}/{k}"} for k, s in enumerate(scripts)]
            codes = self._ask({"jobs": jobs, "deadline_s": deadline_s})
            said = [
                [Path(f"{folder}/{k}.{fd}").read_text("utf-8", "replace") for fd in (1, 2)]
                for k in range(len(jobs))
            ]
        ended = [Ended(code, *text) for code, text in zip(codes, said, strict=True)]
        for one in ended:
            if one.returncode == -signal.SIGKILL:
                raise LateError(f"a script was killed after {deadline_s:g} s:\n{one.stderr}")
        return ended

    def _ask(self, request: dict[str, Any]) -> list[int]:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.scripts", *self._imports],
                cwd=ROOT,
                # As the tests: cores are shared by scripts, and idle helpers of torch's are busy.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        answer: list[int] = json.loads(self._server.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._server is not None:
            # Not by the end of its input: processes that the tests have forked hold the pipe, too.
            self._server.communicate(b"\n", timeout=DEADLINE_S)


# ------------------------------------------------------------------------------ the server


def serve() -> dict[str, Any] | None:
    """Fork a process for each script, and tell how they ended; None at the end of the tests.

    In the processes it returns the script to run.
    """
    while (line := sys.stdin.buffer.readline()).strip():
        request = json.loads(line)
        began: list[int] = []
        for job in request["jobs"]:
            began.append(os.fork())
            if began[-1] == 0:
                return dict(job)
        until_s = time.monotonic() + request["deadline_s"]
        codes = [_exit_code(child, until_s) for child in began]
        os.write(1, json.dumps(codes).encode() + b"\n")
    return None


def _exit_code(child: int, until_s: float) -> int:
    end = os.pidfd_open(child)
    ended, _, _ = select.select([end], [], [], max(0.0, until_s - time.monotonic()))
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.close(end)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def become(job: dict[str, Any]) -> None:
    """Be the script, in this process."""
    for fd in (1, 2):
        opened = os.open(f"{job['out']}.{fd}", os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, fd)
        os.close(opened)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    for name in job["errors"]:
        warnings.simplefilter("error", getattr(builtins, name))
    sys.argv[:] = [job["path"] or "-c", *job["args"]]
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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        module = import_module(name)
        for public in getattr(module, "__all__", ()):  # some are loaded when first asked for
            getattr(module, public)
    gc.collect()
    gc.freeze()  # else the shutdown of every script searches all that was imported
    if (asked := serve()) is not None:
        become(asked)
