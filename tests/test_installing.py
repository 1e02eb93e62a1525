"""An installed swpipe, as a script next to a clone finds it; unsupported systems."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_layout import LINKED, ROOT, imported, parsed

needs_repository = pytest.mark.skipif(not (ROOT / ".src").exists(), reason="needs the repository")

SCRIPT = f"""
import importlib.util
import swpipe
import swpipe.plans.prefetch
from swpipe import ahead
from swpipe.profiler import TaskProfiler

assert list(ahead([1, 2])) == [1, 2]
found = [name for name in {(*LINKED, "tests", "docs", "bench")} if importlib.util.find_spec(name)]
assert found == [], found
assert swpipe.TaskProfiler is TaskProfiler
print(swpipe.__file__, swpipe.plans.prefetch.__file__)
"""

TYPED = """
import swpipe
import swpipe.plans.prefetch

reveal_type(swpipe.TaskProfiler.profile)
reveal_type(swpipe.plans.prefetch.prefetch_plan)
swpipe.overlap()
"""

NOT_FOLLOWED = "[mypy]\n[mypy-torch.*]\nfollow_imports = skip\nignore_missing_imports = true\n"


def run(command: list[object], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, and return its output."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site-packages of an environment in which the clone ``swpipe`` is installed.

    It is installed as ``pip install --editable .`` does it, by the same build backend.
    """
    folder = tmp_path_factory.mktemp("editable")
    # By other tests, lint and docs, which run at the same time; Python writes to two suffixes.
    written_meanwhile = (".hypothesis", ".*_cache", "*.pyc.*", "build", "dist", "_build", "out")
    left_out = shutil.ignore_patterns(".git", ".venv*", *written_meanwhile)
    shutil.copytree(ROOT, folder / "swpipe", symlinks=True, ignore=left_out)
    build = "from setuptools import build_meta; build_meta.build_editable('dist')"
    built = run([sys.executable, "-c", build], folder / "swpipe")
    assert built.returncode == 0, built.stderr
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (wheel,) = (folder / "swpipe" / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    # A path entry does not read the .pth files that it leads to: another swpipe stays unseen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return site


@needs_repository
def test_a_clone_called_swpipe_does_not_hide_the_package(site: Path) -> None:
    """Python finds the package, not the folder next to the script, and no other file of it.

    Its types are found where it is marked as typed.
    """
    folder = site.parents[3]
    (folder / "script.py").write_text(SCRIPT)
    done = run([folder / "venv" / "bin" / "python", "-W", "error", "script.py"], folder)
    assert done.stderr == ""
    for file in map(Path, done.stdout.split()):
        assert file.is_relative_to(folder / "swpipe" / ".src")
    package = Path(done.stdout.split()[0]).parent
    assert (package / "py.typed").exists()


@needs_repository
def test_a_system_outside_the_package_needs_public_names_only(site: Path) -> None:
    """A system of another repository trains under its plan with the serial numbers."""
    folder = site.parents[3]
    shutil.copy(ROOT / "tests" / "support" / "outside_system.py", folder)
    done = run([folder / "venv" / "bin" / "python", "-W", "error", "outside_system.py"], folder)
    assert done.stderr == ""
    assert "the same numbers" in done.stdout


def test_that_system_imports_no_private_name() -> None:
    """It stands for the systems of others, which cannot rely on private modules."""
    tree = parsed(ROOT / "tests" / "support" / "outside_system.py")
    modules = {one.name.rpartition(".")[0] for one in imported(tree, "") if "swpipe" in one.name}
    assert modules
    assert not [name for name in modules if "._" in name]


@needs_repository
@pytest.mark.slow
def test_a_type_checker_finds_the_package_beside_such_a_clone(site: Path) -> None:
    """Types of functions and submodules are found, and a call that lacks its argument.

    An IDE runs no finder: it follows the lines of .pth files to folders, as type checkers do.
    """
    folder = site.parents[3]
    lines = "".join(file.read_text() for file in site.glob("__editable__*")).split()
    (source,) = map(Path, lines)
    assert source == folder / "swpipe" / ".src"
    assert [path.name for path in source.iterdir() if path.suffix != ".egg-info"] == ["swpipe"]
    (folder / "script.py").write_text(TYPED)
    (folder / "mypy.ini").write_text(NOT_FOLLOWED)
    python = folder / "venv" / "bin" / "python"
    mypy = [sys.executable, "-m", "mypy", "--python-executable", python, "script.py"]
    said = run(mypy, folder).stdout
    assert "-> swpipe.profiler.result.ProfileResult" in said
    assert "-> swpipe.core.plan.PipelinePlan" in said
    assert "error: " in said
    assert "[call-overload]" in said or "[call-arg]" in said
    assert "Found 1 error in 1 file" in said


def test_a_system_without_fork_is_refused_in_one_sentence() -> None:
    """Windows is such a system: its ``os`` lacks names that swpipe needs."""
    code = "import os; del os.register_at_fork; import swpipe"
    done = run([sys.executable, "-c", code], ROOT)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if not line.startswith((" ", "Traceback"))]
    assert len(told) == 1
    assert told[0].startswith("ImportError: swpipe needs a system whose processes can fork")
