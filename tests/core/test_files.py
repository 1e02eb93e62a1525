"""A file is replaced as a whole, or stays as it was."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.files import check_writable, read_text, replacing, write_atomically
from swpipe.errors import PlanError
from tests.support.plans_for_tests import piped

not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def mode(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def test_a_plan_or_model_that_cannot_be_saved_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a writer works, or a full disk, leave no other file either."""

    def interrupted(self: Path, text: str, **_: object) -> int:
        self.write_bytes(text.encode()[:10])
        raise KeyboardInterrupt

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = CostModel({"a": TaskCost(host_us=1)})
    for name, writer in (("a.toml", piped(3)), ("a.json", piped(3)), ("costs.json", model)):
        path = tmp_path / name
        writer.save(path)
        before = path.read_bytes()
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_text", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.save(path)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                writer.save(path)
        assert path.read_bytes() == before
    assert len([*tmp_path.iterdir()]) == 3


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    """This holds also if the file does not exist yet."""
    file, link = tmp_path / "folder" / "file", tmp_path / "link"
    file.parent.mkdir()
    link.symlink_to(file)
    for text in ("one", "two"):
        write_atomically(link, text)
        assert link.is_symlink()
        assert file.read_text() == text
    assert [*file.parent.iterdir()] == [file]


def test_permissions_stay_and_new_files_have_the_usual_ones(tmp_path: Path) -> None:
    """They are not those of a temporary file."""
    usual, kept = tmp_path / "usual", tmp_path / "kept"
    (tmp_path / "other").write_text("")
    write_atomically(usual, "x")
    assert mode(usual) == mode(tmp_path / "other")
    kept.write_text("old")
    kept.chmod(0o640)
    write_atomically(kept, "new")
    assert (kept.read_text(), mode(kept)) == ("new", 0o640)


def test_pipes_are_written_in_place(tmp_path: Path) -> None:
    """They are not replaced by files, and neither is what ``/dev/fd`` leads to."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "x")
    assert os.read(reader, 9) == b"x"
    os.close(reader)
    assert pipe.is_fifo()
    read, write = os.pipe()
    write_atomically(f"/dev/fd/{write}", "x")
    assert os.read(read, 9) == b"x"
    os.close(read)
    os.close(write)


def test_a_writer_gets_a_file_of_the_same_kind(tmp_path: Path) -> None:
    """Pictures are of the kind that their suffix names."""
    with replacing(tmp_path / "a.png") as temporary:
        assert (temporary.suffix, temporary.parent) == (".png", tmp_path)
        temporary.write_bytes(b"x")
    assert [*tmp_path.iterdir()] == [tmp_path / "a.png"]


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    """A missing folder and a folder in a file's place are found; the check leaves nothing."""
    (tmp_path / "file").write_text("kept")
    for good in ("new", "file"):
        check_writable(tmp_path / good)
    for bad in ("missing/new", "file/new", "."):
        with pytest.raises(OSError, match="Errno"):
            check_writable(tmp_path / bad)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]


@not_root
def test_a_file_without_permission_is_not_replaced(tmp_path: Path) -> None:
    """It is not replaced, though the folder would allow it."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "file").chmod(0o444)
    with pytest.raises(PermissionError):
        write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    """No more is read of a wrong file than a plan could have."""
    with pytest.raises(PlanError, match="more than 1000 bytes"):
        read_text("/dev/zero", 1000)
    (tmp_path / "file").write_text("x" * 1000)
    assert read_text(tmp_path / "file", 1000) == "x" * 1000


def test_files_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    """A name beyond ASCII goes to a file and back."""
    plan = PipelinePlan({"größe": TaskSchedule()})
    for name in ("plan.toml", "plan.json"):
        plan.save(tmp_path / name)
        assert PipelinePlan.load(tmp_path / name) == plan
    assert "größe".encode() in (tmp_path / "plan.toml").read_bytes()
