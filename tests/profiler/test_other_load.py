"""The use of the machine by other processes, from the tables of a kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swpipe.profiler import other_load
from swpipe.profiler.other_load import OtherLoad, load_so_far


class Kernel:
    """A folder like ``/proc``; times are in ticks, of which a second has 100."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def cores(self, *busy: int) -> None:
        """Set how long each core was busy: half for users, the rest for the system and stolen."""
        lines = ["cpu 1 1 1 1 1 1 1 1 0 0"]
        for core, ticks in enumerate(busy):
            user = ticks // 2
            lines.append(f"cpu{core} {user} 0 {ticks - user - 1} 77777 88888 0 0 1 {user} 0")
        (self.folder / "stat").write_text("\n".join([*lines, "intr 1", "ctxt 2"]))

    def process(self, pid: int, parent: int, ticks: int, ended: int = 0) -> None:
        """Set how long a process, and its children that have ended, were on a core."""
        (self.folder / str(pid)).mkdir(exist_ok=True)
        head = f"{pid} (a (worse) name) S {parent}"
        text = f"{head} 0 0 0 0 0 0 0 0 0 {ticks} 0 {ended} 0 20 0 1"
        (self.folder / str(pid) / "stat").write_text(text)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel with two cores, this process, its parent, and one child of each."""
    seconds = iter([0.0, 10.0, 10.0, 20.0])
    monkeypatch.setattr(other_load, "_PROC", tmp_path)
    monkeypatch.setattr(other_load.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(os, "getpid", lambda: 20)
    monkeypatch.setattr(os, "getppid", lambda: 10)
    kernel = Kernel(tmp_path)
    kernel.cores(5000, 6000, 99999)
    for pid, parent in ((10, 1), (20, 10), (21, 20), (30, 10), (40, 1)):
        kernel.process(pid, parent, 100)
    return kernel


@pytest.mark.parametrize(("is_rank", "used"), [(False, 1.5), (True, 1.1)])
def test_what_is_not_ones_own_is_of_others(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, is_rank: bool, used: float
) -> None:
    """Child processes, also ended ones, and ranks of the same job are one's own."""
    monkeypatch.setattr(other_load, "is_alone", lambda: not is_rank)
    before = load_so_far()
    assert before is not None
    kernel.cores(6000, 7000, 99999)
    kernel.process(20, 10, 300, ended=100)
    kernel.process(21, 20, 300)
    kernel.process(30, 10, 500)
    load = before.others()
    assert load == OtherLoad(used, 2)
    assert load.is_busy


def test_a_machine_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no Linux, or its kernel hides the load."""
    monkeypatch.setattr(other_load, "_PROC", tmp_path)
    assert load_so_far() is None


@pytest.mark.parametrize(("used", "is_busy"), [(0.1, False), (0.3, True)])
def test_a_tenth_of_the_cores_is_much(used: float, is_busy: bool) -> None:
    """For two cores it is 0.2."""
    assert OtherLoad(used, 2).is_busy is is_busy
