"""Who waited for a core."""

from __future__ import annotations

from pathlib import Path

import pytest

from swpipe.profiler import run_queue
from swpipe.profiler.run_queue import disturbed, waited_s


def test_the_waits_of_all_threads_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has ended meanwhile has no file any more."""
    for thread, text in (("1", "5 2000000000 7\n"), ("2", "1 500000000 1\n")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "3").mkdir()
    monkeypatch.setattr(run_queue, "_TASKS", tmp_path)
    assert waited_s() == 2.5


def test_a_machine_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without the file, or no Linux."""
    (tmp_path / "1").mkdir()
    monkeypatch.setattr(run_queue, "_TASKS", tmp_path)
    assert waited_s() is None
    monkeypatch.setattr(run_queue, "_TASKS", tmp_path / "gone")
    assert waited_s() is None


@pytest.mark.parametrize(
    ("shares", "which"),
    [
        ([0.0, 0.0, 0.5], [False, False, True]),
        ([0.5, 0.5, 0.6], [False] * 3),  # one's own threads compete all the time
        ([None, None], [False, False]),
        ([], []),
    ],
)
def test_a_visit_is_disturbed_if_it_waited_much_longer(
    shares: list[float | None], which: list[bool]
) -> None:
    """Than the others of its round."""
    assert disturbed(shares) == which
