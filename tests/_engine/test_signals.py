"""Real signals at random moments: nothing hangs, nothing is left, and the pipeline runs again."""

from __future__ import annotations

import pytest

from tests.support.budget import FACTOR, seeds
from tests.support.scripts import DEADLINE_S, Script, Scripts

TRIALS = 20


@pytest.mark.examples
@pytest.mark.parametrize("kinds", [("close", "closing", "one"), ("storm",)], ids="+".join)
def test_signals_at_random_moments_do_no_harm(scripts: Scripts, kinds: tuple[str, ...]) -> None:
    """The handler's own exception is raised, no thread remains, the pipeline runs or is closed."""
    first, *more = seeds("endings", TRIALS * len(kinds))
    trials = (1 + len(more)) // len(kinds)
    args = (f"{first}", f"{trials}", *kinds)  # see ``signal_trials``
    script = Script(module="tests._engine.signal_trials", args=args, errors=("Warning",))
    done = scripts.run(script, deadline_s=DEADLINE_S * FACTOR)
    said = (done.returncode, done.stdout, "" if "storm" in kinds else done.stderr)
    # Python may have ignored a signal of a storm, and says so.
    assert said == (0, f"{trials} trials\n" * len(kinds), ""), done.stderr
