"""States of Python that one part of a loop reads and another writes, and that nobody declares.

``STATES`` has them by name. Each is made anew for each run of a loop.
"""

from __future__ import annotations

import array
import calendar
import collections
import contextvars
import copy
import ctypes
import dataclasses
import decimal
import enum
import functools
import gc
import io
import itertools
import logging
import mmap
import os
import queue
import random
import sqlite3
import struct
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import SGD


def nothing() -> None:
    """There is nothing to close."""


class Job(NamedTuple):
    """What the loop that has the state trains with: some states are part of it."""

    weight: nn.Parameter
    optimizer: SGD
    batches: list[Tensor]
    folder: Path


@dataclasses.dataclass
class State:
    """A state.

    Attributes:
        read: Returns a number that depends on it.
        write: Changes it; called with the number of the iteration.
        loader: What the loop iterates over; by default a list, or a generator that reads or writes.
        close: Puts back what is the process's.
        shown: Returns the state at the end, if not ``read``.
    """

    read: Callable[[], float]
    write: Callable[[int], object]
    loader: Iterable[Tensor] | None = None
    close: Callable[[], object] = nothing
    shown: Callable[[], object] | None = None


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a state is used.

    Attributes:
        make: Makes it.
        reader: Who reads it: "decode", "train", "step", "body", or "loader".
        writer: Who writes it: the same.
        when: It is written "always", "fourth" (every fourth iteration), or "once" (iteration 7).
        own_loader: Whether the state has a loader of its own, which leads to it.
    """

    make: Callable[[Job], State]
    reader: str
    writer: str
    when: str
    own_loader: bool


STATES: dict[str, Kind] = {}

Maker = Callable[[Job], State]


def state(
    name: str,
    reader: str = "decode",
    writer: str = "step",
    when: str = "always",
    own_loader: bool = False,
) -> Callable[[Maker], Maker]:
    """Enter the state that a function makes."""

    def enter(make: Maker) -> Maker:
        assert name not in STATES
        STATES[name] = Kind(make, reader, writer, when, own_loader)
        return make

    return enter


@dataclasses.dataclass
class Settings:
    level: float = 1.0

    def raised(self, number: int = 0) -> None:
        """Change it."""
        self.level += 1

    def __str__(self) -> str:
        return str(self.level)


class Plain:
    """An object of a plain class."""

    level = 1.0

    def raised(self, number: int = 0) -> None:
        """Change it."""
        self.level += 1


@state("dataclasses.asdict", when="fourth")
def asdict(job: Job) -> State:
    settings = Settings()
    return State(lambda: dataclasses.asdict(settings)["level"], settings.raised)


@state("copy.deepcopy", when="once")
def deepcopied(job: Job) -> State:
    settings = Plain()
    return State(lambda: copy.deepcopy(settings).level, settings.raised)


@state("f-string")
def f_string(job: Job) -> State:
    settings = Settings()
    return State(lambda: float(f"{settings}"), settings.raised)


@state("comparison", writer="body")
def comparison(job: Job) -> State:
    settings, easy = Settings(), Settings()

    def write(number: int) -> None:
        settings.level = 1.0 + number % 2

    return State(lambda: 1.0 if settings == easy else 2.0, write)


@state("enum", when="fourth")
def enumeration(job: Job) -> State:
    class Level(enum.Enum):
        NOW = 1

    Level.NOW.amount = 1.0  # type: ignore[attr-defined]

    def write(number: int) -> None:
        Level.NOW.amount += 1.0  # type: ignore[attr-defined]

    return State(lambda: getattr(Level(1), "amount"), write)  # noqa: B009


@state("os.getenv", when="once")
def getenv(job: Job) -> State:
    os.environ["UNDECLARED_LEVEL"] = "1"

    def write(number: int) -> None:
        os.environ["UNDECLARED_LEVEL"] = str(number + 2)

    def close() -> None:
        del os.environ["UNDECLARED_LEVEL"]

    return State(lambda: float(os.getenv("UNDECLARED_LEVEL", "0")), write, close=close)


@state("os.environ", reader="loader", writer="body", when="fourth")
def environ(job: Job) -> State:
    found = getenv(job)
    return dataclasses.replace(found, read=lambda: float(os.environ["UNDECLARED_LEVEL"]))


@state("file by path")
def file_by_path(job: Job) -> State:
    path = job.folder / "level"
    path.write_text("1")
    return State(lambda: float(path.read_text()), lambda number: path.write_text(str(number + 2)))


@state("file appended to", when="fourth")
def file_appended(job: Job) -> State:
    path = job.folder / "log"
    path.write_text("")

    def write(number: int) -> None:
        with path.open("a") as file:
            file.write(f"{number}\n")

    return State(lambda: 1.0 + len(path.read_text().splitlines()), write)


@state("open file", writer="body")
def open_file(job: Job) -> State:
    file = (job.folder / "open").open("w+")

    def read() -> float:
        file.seek(0)
        return 1.0 + len(file.read())

    return State(read, lambda number: file.write("x"), close=file.close)


@state("working directory", when="once")
def working_directory(job: Job) -> State:
    before = Path.cwd()
    for name, level in (("easy", "1"), ("hard", "3")):
        (job.folder / name).mkdir(exist_ok=True)
        (job.folder / name / "level").write_text(level)
    os.chdir(job.folder / "easy")
    return State(
        lambda: float(Path("level").read_text()),
        lambda number: os.chdir(job.folder / "hard"),
        close=lambda: os.chdir(before),
    )


@state("partial's keywords")
def partial_keywords(job: Job) -> State:
    scale = functools.partial(lambda level: level, level=1.0)

    def write(number: int) -> None:
        scale.keywords["level"] += 1.0

    return State(scale, write)


@state("class attribute through self.__class__", when="fourth")
def class_attribute(job: Job) -> State:
    class Counter:
        level = 1.0

        def count(self, number: int) -> None:
            self.__class__.level += 1

    counter = Counter()
    return State(lambda: Counter.level, counter.count)


@state("one of 2,000 objects")
def one_of_many(job: Job) -> State:
    many = [Settings() for _ in range(2000)]
    return State(lambda: sum(each.level for each in many) / 2000, lambda i: many[1234].raised())


@state("a library's global", when="once")
def library_global(job: Job) -> State:
    before = calendar.firstweekday()
    calendar.setfirstweekday(0)
    return State(
        lambda: 1.0 + calendar.firstweekday(),
        lambda number: calendar.setfirstweekday((calendar.firstweekday() + 1) % 7),
        close=lambda: calendar.setfirstweekday(before),
    )


@state("decimal's context")
def decimal_context(job: Job) -> State:
    before = decimal.getcontext().prec

    def write(number: int) -> None:
        decimal.getcontext().prec = 1 + number % 3

    return State(
        lambda: float(decimal.Decimal(2) / 3),
        write,
        close=lambda: setattr(decimal.getcontext(), "prec", before),
    )


class Simulator:
    """As a gymnasium environment: it cannot be set back."""

    def __init__(self) -> None:
        self._positions = self._moves()
        next(self._positions)

    def _moves(self) -> Iterator[float]:
        at, action = 1.0, 0
        while True:
            action = yield at
            at = at * 0.9 + 0.1 * action

    def step(self, action: int) -> float:
        """Move on."""
        self.at = self._positions.send(action)  # type: ignore[attr-defined]
        return self.at

    at = 1.0


@state("simulator")
def simulator(job: Job) -> State:
    world = Simulator()
    return State(lambda: world.step(1), lambda number: world.step(number), shown=lambda: world.at)


class Curriculum:
    """Harder every fourth time."""

    def __init__(self) -> None:
        self.level, self._calls = 1.0, 0

    def update(self, number: int) -> None:
        """One more iteration is done."""
        self._calls += 1
        if self._calls % 4 == 0:
            self._harder()

    def _harder(self) -> None:
        self.level *= 1.5


@state("curriculum.update")
def curriculum(job: Job) -> State:
    plan = Curriculum()
    return State(lambda: plan.level, plan.update)


@state("curriculum of the loader", reader="loader", writer="body")
def loaders_curriculum(job: Job) -> State:
    return curriculum(job)


@state("context variable")
def context_variable(job: Job) -> State:
    level = contextvars.ContextVar("level", default=1.0)
    return State(level.get, lambda number: level.set(number + 2.0))


@state("threading.local", when="fourth")
def thread_local(job: Job) -> State:
    mine = threading.local()

    def write(number: int) -> None:
        mine.level = number + 2.0

    return State(lambda: getattr(mine, "level", 1.0), write)


@state("lru_cache", when="fourth")
def lru_cache(job: Job) -> State:
    levels = itertools.count(1)
    level = functools.lru_cache(maxsize=None)(lambda: float(next(levels)))
    return State(level, lambda number: level.cache_clear())


@state("local variable of a generator")
def generators_local(job: Job) -> State:
    def levels() -> Iterator[float]:
        level = 1.0
        while True:
            more = yield level
            level += more or 0.0  # type: ignore[unreachable]

    running = levels()
    next(running)
    return State(lambda: next(running), lambda number: running.send(1.0))  # type: ignore[attr-defined]


@state("closure cell", when="once")
def closure_cell(job: Job) -> State:
    level = 1.0

    def write(number: int) -> None:
        nonlocal level
        level += 1

    return State(lambda: level, write)


LEVEL = 1.0


@state("global of a module", writer="body", when="fourth")
def module_global(job: Job) -> State:
    global LEVEL
    LEVEL = 1.0

    def write(number: int) -> None:
        global LEVEL
        LEVEL += 1.0

    return State(lambda: LEVEL, write)


@state("warnings filters")
def warnings_filters(job: Job) -> State:
    before = len(warnings.filters)

    def write(number: int) -> None:
        warnings.filterwarnings("ignore", message=f"undeclared {number}")

    def close() -> None:
        del warnings.filters[: len(warnings.filters) - before]  # type: ignore[attr-defined]

    return State(lambda: 1.0 + len(warnings.filters) - before, write, close=close)


@state("random", when="fourth")
def python_random(job: Job) -> State:
    return State(random.random, lambda number: random.random())


@state("random of an object", reader="loader")
def own_random(job: Job) -> State:
    draws = random.Random(5)
    return State(draws.random, lambda number: draws.random())


@state("SQLite in memory", when="fourth")
def sqlite(job: Job) -> State:
    table = sqlite3.connect(":memory:")
    table.execute("CREATE TABLE levels (level REAL)")
    return State(
        lambda: 1.0 + table.execute("SELECT COUNT(*) FROM levels").fetchone()[0],
        lambda number: table.execute("INSERT INTO levels VALUES (?)", (number,)),
        close=table.close,
    )


class Bar:
    """As tqdm's."""

    n = 0

    def update(self, number: int) -> None:
        """One more batch."""
        self.n += 1


@state("progress bar of the loader", reader="body", writer="loader")
def progress_bar(job: Job) -> State:
    bar = Bar()
    return State(lambda: float(bar.n), bar.update)


@state("last index of the loader", reader="train", writer="loader")
def loader_index(job: Job) -> State:
    seen = [0.0]

    def write(number: int) -> None:
        seen[0] = float(number)

    return State(lambda: 1.0 + seen[0], write)


class Defaults(dict[str, float]):
    """A dict that makes what it lacks."""

    made = 0

    def __missing__(self, key: str) -> float:
        self.made += 1
        self[key] = float(self.made)
        return self[key]


@state("subclass of dict", when="fourth")
def dict_subclass(job: Job) -> State:
    levels = Defaults()
    return State(lambda: levels["level"], lambda number: levels.pop("level", None))


@state("slots")
def slots(job: Job) -> State:
    class Slotted:
        __slots__ = ("level",)

    one = Slotted()
    one.level = 1.0
    return State(lambda: one.level, lambda number: setattr(one, "level", number + 2.0))


@state("weak references", when="once")
def weak(job: Job) -> State:
    kept = {"one": Plain()}
    seen = weakref.WeakValueDictionary(kept)
    return State(lambda: 1.0 + len(seen), lambda number: kept.clear())


@state("property", writer="body")
def computed(job: Job) -> State:
    class Computed:
        _level = 1.0

        @property
        def level(self) -> float:
            self._level += 0.5
            return self._level

        @level.setter
        def level(self, value: float) -> None:
            self._level = value

    one = Computed()
    return State(
        lambda: one.level,
        lambda number: setattr(one, "level", float(number)),
        shown=lambda: one._level,
    )


class Stored:
    """A descriptor that keeps its objects' values itself."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self.values.get(id(owner), 1.0)

    def __set__(self, owner: Any, value: float) -> None:
        self.values[id(owner)] = value


@state("descriptor")
def descriptor(job: Job) -> State:
    kind = type("Described", (), {"level": Stored()})
    one = kind()
    return State(lambda: one.level, lambda number: setattr(one, "level", number + 2.0))


@state("attribute of a metaclass", when="fourth")
def metaclass(job: Job) -> State:
    meta: Any = type("Meta", (type,), {"level": 1.0})
    one = meta("Made", (), {})()

    def write(number: int) -> None:
        meta.level += 1

    return State(lambda: type(one).level, write)


@state("attribute of a function")
def function_attribute(job: Job) -> State:
    def read() -> float:
        return read.level  # type: ignore[attr-defined, no-any-return]

    read.level = 1.0  # type: ignore[attr-defined]
    return State(read, lambda number: setattr(read, "level", number + 2.0))


@state("mutable default", when="once")
def mutable_default(job: Job) -> State:
    def levels(new: float | None = None, kept: list[float] = [1.0]) -> float:  # noqa: B006
        if new is not None:
            kept.append(new)
        return kept[-1]

    return State(levels, lambda number: levels(number + 2.0))


@state("memoryview")
def viewed(job: Job) -> State:
    memory = bytearray(8)
    view = memoryview(memory)
    return State(lambda: 1.0 + memory[3], lambda number: view.__setitem__(3, number))


@state("ctypes buffer", when="fourth")
def ctypes_buffer(job: Job) -> State:
    buffer = ctypes.create_string_buffer(8)
    address = ctypes.addressof(buffer)
    return State(
        lambda: 1.0 + ord(buffer[0]), lambda number: ctypes.memset(address, number + 1, 1) and None
    )


@state("mmap", writer="body")
def mapped(job: Job) -> State:
    memory = mmap.mmap(-1, 16)
    return State(
        lambda: 1.0 + memory[0],
        lambda number: struct.pack_into("b", memory, 0, number),
        close=memory.close,
    )


@state("array.array", when="once")
def arrays(job: Job) -> State:
    values = array.array("d", [1.0])
    return State(lambda: values[-1], lambda number: values.append(number))


@state("deque")
def dequeue(job: Job) -> State:
    last = collections.deque([1.0], maxlen=3)
    return State(lambda: sum(last), lambda number: last.append(float(number)))


@state("queue", reader="loader")
def queued(job: Job) -> State:
    waiting: queue.Queue[float] = queue.Queue()
    return State(lambda: 1.0 + waiting.qsize(), waiting.put)


@state("itertools.count", writer="train")
def counted(job: Job) -> State:
    numbers = itertools.count(1)
    return State(lambda: float(next(numbers)), lambda number: next(numbers))


@state("StringIO", when="fourth")
def string_io(job: Job) -> State:
    text = io.StringIO()
    return State(lambda: 1.0 + len(text.getvalue()), lambda number: text.write("x"))


@state("level of a logger", when="once")
def logger_level(job: Job) -> State:
    logger = logging.getLogger("undeclared")
    logger.setLevel(10)
    return State(
        lambda: logger.getEffectiveLevel() / 10, lambda number: logger.setLevel(10 + number)
    )


@state("module made by the loop")
def made_module(job: Job) -> State:
    sys.modules["undeclared_made"] = module = types.ModuleType("undeclared_made")
    module.level = 1.0  # type: ignore[attr-defined]

    def read() -> float:
        import undeclared_made  # type: ignore[import-not-found]

        return undeclared_made.level  # type: ignore[no-any-return]

    return State(
        read,
        lambda number: setattr(module, "level", number + 2.0),
        close=lambda: sys.modules.pop("undeclared_made"),
    )


@state("setting of the interpreter", when="fourth")
def interpreter(job: Job) -> State:
    before = gc.get_threshold()

    def write(number: int) -> None:
        first, *others = gc.get_threshold()
        gc.set_threshold(first + 1, *others)

    return State(
        lambda: 1.0 + gc.get_threshold()[0] - before[0],
        write,
        close=lambda: gc.set_threshold(*before),
    )
