"""The choice of the installed TorchRec, and messages about other versions."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import pytest

from swpipe.tasks.torchrec._torchrec import VERSION, check_version
from tests.support.scripts import Script, Scripts


@pytest.mark.parametrize("version", ["1.5.0", "1.8", "1.8.1+cu130", "1.9.2"])
def test_a_tested_series_is_taken_in_silence(version: str) -> None:
    """Any patch level and build is accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(version)


@pytest.mark.parametrize("version", ["1.4.9", "1.10.0", "1.50", "2.6", "unknown"])
def test_another_series_is_taken_with_a_warning(version: str) -> None:
    """It has the parts; the warning says what was tested, and what to do."""
    said = rf"{version} is installed.*tested with 1\.5 to 1\.9.*compare a few losses.*==1\.9\.\*"
    with pytest.warns(UserWarning, match=said):
        check_version(version)


def test_no_torchrec_is_told() -> None:
    """The error is not that of a missing module somewhere inside."""
    with pytest.raises(ImportError, match=r"tested with 1\.5 to 1\.9, and none is installed"):
        check_version(None)


_GONE = """
import torchrec.distributed.train_pipeline.tracing as tracing
del tracing.Tracer
try:
    import swpipe.tasks.torchrec
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_part_that_is_gone_is_named(scripts: Scripts) -> None:
    """The error has the installed version, and the one to install."""
    code, said, _ = scripts.run(Script(_GONE))
    assert code == 0
    first, last = said.strip().splitlines()
    assert (
        f"torchrec {VERSION} is not as swpipe.tasks.torchrec uses it: cannot import name" in first
    )
    assert "'Tracer'" in first
    assert last.startswith("install torchrec==1.9.*")


COMPARING = Path(__file__).parents[3] / ".ci/torchrec_release.py"


@pytest.mark.skipif(not COMPARING.exists(), reason="needs the repository")
def test_a_new_release_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints its version, missing parts and changed lines of source; the exit status is 1."""
    script = runpy.run_path(str(COMPARING))
    name = "torchrec.distributed.train_pipeline.utils._fuse_input_dist_splits"
    source = script["sources"]()[name]
    assert source.startswith("def _fuse_input_dist_splits(")
    here = {"version": "1.8", "sources": {name: source, "a.gone": source}}
    new = {"version": "7.0", "sources": {name: source.replace("context", "other"), "a.gone": ""}}
    compared = script["main"].__globals__
    monkeypatch.setitem(compared, "_look", lambda: here)
    monkeypatch.setitem(compared, "_look_at", lambda *_: new)
    monkeypatch.setattr(sys, "argv", [str(COMPARING), "new"])
    assert script["main"]() == 1
    said = capsys.readouterr().out
    assert "torchrec 1.8 is installed; new has 7.0" in said
    assert "a.gone is gone" in said
    assert f"{name} has changed:" in said
    assert "2 parts: 1 gone, 1 changed" in said


@pytest.mark.slow
def test_the_import_is_silent(scripts: Scripts) -> None:
    """Neither a warning nor a log line reaches the user."""
    code = "import warnings; warnings.simplefilter('error')\n"
    code += "import swpipe.tasks.torchrec.pipelines.semi_sync"
    assert scripts.run(Script(code)) == (0, "", "")
