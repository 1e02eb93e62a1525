"""Forked scripts behave like others, up to their exit code."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.ranks import WELL_BEFORE_S
from tests.support.scripts import LateError, Script, Scripts

WHOLE = """
import atexit, os, sys
atexit.register(print, "torn down")
print(__name__, sys.argv[1:], os.environ["TOLD"], os.getcwd(), sys.stdin.read())
print("said", file=sys.stderr)
sys.exit(3)
"""


def test_a_script_has_arguments_variables_and_a_folder_and_ends_in_good_order(
    scripts: Scripts, tmp_path: Path
) -> None:
    """What runs at the interpreter's shutdown runs, too."""
    script = Script(WHOLE, args=("a", "b"), environment={"TOLD": "yes"}, folder=str(tmp_path))
    printed = f"__main__ ['a', 'b'] yes {tmp_path} \ntorn down\n"
    assert scripts.run(script) == (3, printed, "said\n")
    assert "TOLD" not in os.environ


def test_scripts_know_nothing_of_each_other(scripts: Scripts) -> None:
    """A module that one changes is unchanged for the next."""
    assert scripts.run(Script("import torch; torch.planted = 1")).returncode == 0
    assert scripts.run(Script("import torch; print(hasattr(torch, 'planted'))")).stdout == "False\n"


def test_warnings_are_errors_where_the_test_says_so(scripts: Scripts) -> None:
    """Otherwise they are printed."""
    code = "import warnings; warnings.warn('look', ResourceWarning)"
    loud = scripts.run(Script(code, errors=("ResourceWarning",)))
    assert (loud.returncode, "ResourceWarning: look" in loud.stderr) == (1, True)
    assert scripts.run(Script(code)).returncode == 0


def test_a_script_that_is_late_is_killed(scripts: Scripts) -> None:
    """The next script runs."""
    code = "import sys, threading; print('stuck', file=sys.stderr, flush=True)"
    begin_s = time.monotonic()
    with pytest.raises(LateError, match=r"killed after 0\.5 s(?s:.*)"):
        scripts.run(Script(f"{code}; threading.Event().wait()"), deadline_s=0.5)
    assert time.monotonic() - begin_s < WELL_BEFORE_S
    assert scripts.run(Script("print(1)")).stdout == "1\n"
