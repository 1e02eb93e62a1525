"""Notes of a test's tasks, which recordings and profiles do not restore."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from pathlib import Path
from typing import Any


class Notes:
    """A list in a file, written through its descriptor, so that no trial restores it."""

    def __init__(self) -> None:
        number, name = tempfile.mkstemp()
        os.close(number)
        self.path = Path(name)
        self._end = weakref.finalize(self, self.path.unlink)

    def append(self, note: Any) -> None:
        number = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(number, pickle.dumps(note))
        os.close(number)

    def read(self) -> list[Any]:
        """Return all notes."""
        found = []
        with self.path.open("rb") as file:
            while file.peek(1):
                found.append(pickle.load(file))
        return found

    def clear(self) -> None:
        self.path.write_bytes(b"")
