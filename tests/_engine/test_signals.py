"""Real signals at random moments: nothing hangs, nothing is left, and the pipeline runs again."""

from __future__ import annotations

import pytest

from tests.support.scripts import Script, Scripts

TRIALS = 20


@pytest.mark.parametrize("kinds", [("close", "closing", "one"), ("storm",)], ids="+".join)
def test_signals_at_random_moments_do_no_harm(scripts: Scripts, kinds: tuple[str, ...]) -> None:
    """The handler's own exception comes out, no thread is left, the pipeline runs or is closed."""
    args = (f"{TRIALS}", *kinds)  # see ``signal_trials``
    done = scripts.run(Script(module="tests._engine.signal_trials", args=args, errors=("Warning",)))
    said = (done.returncode, done.stdout, "" if "storm" in kinds else done.stderr)
    # Python may have ignored a signal of a storm, and says so.
    assert said == (0, f"{TRIALS} trials\n" * len(kinds), ""), done.stderr
