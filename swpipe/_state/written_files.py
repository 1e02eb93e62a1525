"""Files and directories that tasks write by path: as they were before the tasks ran on trial.

Before a task opens a file to write, or makes, moves or removes one, what is at the path is saved:

    nothing                      what is there afterwards is removed
    a file                       its content; of a large one that is only added to, the length
    a larger one, a directory    refused, before it is overwritten, moved or removed

This is seen where Python code does it: through ``open``, ``pathlib``, ``os``, ``shutil`` and
``torch.save``, and in what the handlers of ``logging`` write. ``os.open`` is not seen, nor are code
in C that opens files by itself, other processes, and threads that run no task. What compilers,
``tempfile`` and ``multiprocessing`` write is left alone, since they keep what they know of it.
"""

from __future__ import annotations

import builtins
import io
import logging
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakSet

import torch

from swpipe._state.kinds import MAX_CONTENT
from swpipe._state.put_back import saving
from swpipe.core.errors import UnsavedStateError
from swpipe.core.messages import listed


class SavedFiles:
    """What was at each path before a task first wrote there.

    Args:
        refuse: Whether a task that overwrites what cannot be saved fails.
    """

    def __init__(self, *, refuse: bool) -> None:
        self._refuse = refuse
        self._saved: dict[Path, bytes | int | None] = {}  # content, length or nothing, by path
        self._opened = WeakSet[Any]()
        self._logs: dict[Any, Callable[[], object]] = {}  # by stream

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which what tasks are about to write to is saved.

        Raises:
            UnsavedStateError: In a task, which is about to overwrite what cannot be saved.
        """
        with _lock:
            _watching.append(self)
            _set_functions(_WATCHED)
        try:
            yield
        finally:
            with _lock:
                _watching.remove(self)
                _set_functions(_WATCHED if _watching else _ORIGINAL)

    def restore(self) -> None:
        """Put everything back.

        Warns:
            RuntimeWarning: A file is still open, and so left as it is.
        """
        for put_back in self._logs.values():
            put_back()
        writing = [file for file in self._opened if not file.closed and file.writable()]
        still = {_absolute(file.name) for file in writing} & self._saved.keys()
        for path in sorted(self._saved.keys() - still, reverse=True):  # files before their folders
            _put_back(path, self._saved[path])
        self._saved.clear()
        self._opened.clear()
        self._logs.clear()
        if still:
            names = listed(sorted(map(str, still)))
            warnings.warn(
                f"a task keeps {names} open, so what was written there on trial stays: open such "
                "files before the tasks run",
                RuntimeWarning,
                stacklevel=3,
            )

    def before_write(self, path: Any, *, adds: bool = False) -> None:
        """Save what is at a path; of a large file that is only added to, the length is enough."""
        where = _absolute(path)
        if where is None or not isinstance(self._saved.get(where, 0), int):
            return
        if not os.path.lexists(where):
            self._saved[where] = None
        elif where.is_file() and where.stat().st_size <= MAX_CONTENT:
            self._saved[where] = where.read_bytes()
        elif where.is_file() and adds:
            self._saved.setdefault(where, where.stat().st_size)
        elif self._refuse and not adds and (where.is_file() or where.is_dir()):
            raise UnsavedStateError([str(where)], "a task overwrites, moves or removes it", _MEND)

    def before_emit(self, handler: logging.FileHandler) -> None:
        """Save the length of a file to which a handler of ``logging`` is about to write."""
        if handler.stream is None:  # it opens its file at the first message
            options = {"encoding": handler.encoding, "errors": handler.errors}
            handler.stream = _OPEN(handler.baseFilename, handler.mode, **options)
        if handler.stream not in self._logs and (put_back := saving(handler.stream, 0)):
            self._logs[handler.stream] = put_back

    def opened(self, file: Any) -> None:
        """Remember a file that was opened."""
        self._opened.add(file)


_OPEN: Any = builtins.open

_MEND = (
    "It is a directory, or too large to be saved: write such files in the loop's body. Or name all "
    "that has to be restored: state=[model, optimizer, ...]"
)


def _absolute(path: Any) -> Path | None:
    return (
        Path(os.fsdecode(path)).absolute() if isinstance(path, str | bytes | os.PathLike) else None
    )


def _put_back(path: Path, saved: bytes | int | None) -> None:
    if isinstance(saved, int):
        os.truncate(path, saved)
    elif isinstance(saved, bytes):
        if not path.is_file() or path.read_bytes() != saved:
            path.write_bytes(saved)
    elif not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        with suppress(OSError):  # it is not empty: something in it was not seen
            path.rmdir()


_Save: TypeAlias = Callable[..., object]
"""Saves what a function is about to write: takes a ``SavedFiles`` and the function's arguments."""


def _before_open(saved: SavedFiles, file: Any, mode: str = "r", *rest: Any, **named: Any) -> None:
    if not set(mode).isdisjoint("wax+"):
        saved.before_write(file, adds="a" in mode)


def _before_save(saved: SavedFiles, value: Any, f: Any, *rest: Any, **named: Any) -> None:
    saved.before_write(f)


def _before_making(saved: SavedFiles, path: Any, *rest: Any, **named: Any) -> None:
    saved.before_write(path, adds=True)


def _before_removing(saved: SavedFiles, *paths: Any, dir_fd: Any = None, **named: Any) -> None:
    for path in paths[:2] if dir_fd is None else ():
        saved.before_write(path)


_WRITERS: tuple[tuple[Any, str, _Save], ...] = (
    (builtins, "open", _before_open),
    (io, "open", _before_open),
    (torch, "save", _before_save),
    (os, "mkdir", _before_making),
    (Path, "touch", _before_making),
    *((os, name, _before_removing) for name in ("remove", "unlink", "rename", "replace")),
    (shutil, "rmtree", _before_removing),
    (logging.FileHandler, "emit", lambda saved, handler, record: saved.before_emit(handler)),
)

_lock = threading.Lock()
_watching: list[SavedFiles] = []


def _watched(function: Callable[..., Any], save: _Save) -> Callable[..., Any]:
    """The function, before which a task that calls it has saved what it is about to write."""

    @wraps(function)
    def watched(*args: Any, **named: Any) -> Any:
        noting = list(_watching) if _is_tasks(sys._getframe(1)) else []
        for saved in noting:
            save(saved, *args, **named)
        result = function(*args, **named)
        for saved in noting if isinstance(result, io.IOBase) else ():
            saved.opened(result)
        return result

    return watched


_PASSED = sys.stdlib_module_names - {"tempfile", "multiprocessing"}
_LEFT_ALONE = ("torch", "triton", "tempfile", "multiprocessing")


def _is_tasks(frame: FrameType | None) -> bool:
    """Whether a call is a task's: swpipe has called it, and it is no compiler that makes it."""
    roots: list[str] = []
    while frame is not None:
        roots.append(str(frame.f_globals.get("__name__")).partition(".")[0])
        frame = frame.f_back
    callers = [root for root in roots if root not in _PASSED]
    return "swpipe" in callers and callers[0] not in _LEFT_ALONE


_ORIGINAL = [getattr(owner, name) for owner, name, _ in _WRITERS]
_WATCHED = [_watched(f, save) for f, (*_, save) in zip(_ORIGINAL, _WRITERS, strict=True)]


def _set_functions(functions: list[Callable[..., Any]]) -> None:
    for (owner, name, _), function in zip(_WRITERS, functions, strict=True):
        setattr(owner, name, function)
