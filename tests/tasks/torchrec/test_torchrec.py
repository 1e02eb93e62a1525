"""Which TorchRec is taken, and what is said of another."""

from __future__ import annotations

import subprocess
import sys

import pytest

from swpipe.tasks.torchrec._torchrec import VERSION, check_version, describe


@pytest.mark.parametrize("version", ["1.5.0", "1.6.1", "1.7.0", "1.8", "1.8.0", "1.8.1+cu130"])
def test_a_supported_series_is_taken(version: str) -> None:
    """Whatever its patch level and build."""
    check_version(version)


@pytest.mark.parametrize("version", ["1.4.9", "1.9.0", "1.80", "1.50", "2.6", "0.7", "unknown"])
def test_another_series_is_refused_with_the_mend(version: str) -> None:
    """The message has the version found, the one to install, and how to insist."""
    with pytest.raises(
        ImportError, match=rf"{version} is installed.*1\.5 to 1\.8: .*==1\.8\.\*.*ANY_TORCHREC=1"
    ):
        check_version(version)
    check_version(version, any_version=True)


def test_no_torchrec_is_told() -> None:
    """Not as a missing module somewhere inside."""
    with pytest.raises(ImportError, match=r"needs torchrec 1\.5 to 1\.8, and none is installed"):
        check_version(None)


def test_it_says_what_it_found() -> None:
    """TorchRec's version and fbgemm's."""
    assert describe().startswith(f"torchrec {VERSION} (supported: 1.5 to 1.8)")
    assert "fbgemm" in describe()


@pytest.mark.slow
def test_the_import_is_silent() -> None:
    """Neither a warning nor a log line reaches the user."""
    code = "import swpipe.tasks.torchrec.semi_sync"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
