"""Real signals at random moments: nothing hangs, nothing is left, and the pipeline runs again."""

from __future__ import annotations

import pytest

from tests.support.scripts import Script, Scripts


@pytest.mark.parametrize(
    ("how", "call"),
    [("close", "progress"), ("closing", "drain"), ("one", "drain"), ("storm", "progress")],
)
def test_signals_at_random_moments_do_no_harm(scripts: Scripts, how: str, call: str) -> None:
    """The handler's own exception comes out, no thread is left, the pipeline runs or is closed."""
    args = (how, call, "20", "1")  # see ``signal_trials``
    done = scripts.run(Script(module="tests._engine.signal_trials", args=args, errors=("Warning",)))
    said = (done.returncode, done.stdout, "" if how == "storm" else done.stderr)
    # Python may have ignored a signal of a storm, and says so.
    assert said == (0, "20 trials\n", ""), done.stderr
