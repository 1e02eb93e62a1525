"""Notes that tasks of a test take, and that recordings and profiles leave where they are."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from pathlib import Path
from typing import Any


class Notes:
    """A list in a file, which is opened for each note: what a task writes so is not put back."""

    def __init__(self) -> None:
        number, name = tempfile.mkstemp()
        os.close(number)
        self.path = Path(name)
        self._end = weakref.finalize(self, self.path.unlink)

    def append(self, note: Any) -> None:
        with self.path.open("ab") as file:
            pickle.dump(note, file)

    def read(self) -> list[Any]:
        """All notes."""
        found = []
        with self.path.open("rb") as file:
            while file.peek(1):
                found.append(pickle.load(file))
        return found

    def clear(self) -> None:
        self.path.write_bytes(b"")
