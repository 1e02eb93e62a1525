"""Real signals at random moments: nothing hangs, nothing is left, and the pipeline runs again."""

from __future__ import annotations

import pytest

from tests.support.scripts import Script, Scripts


def survives(scripts: Scripts, how: str, call: str, trials: int) -> None:
    """Every trial went well; see ``signal_trials``."""
    args = (how, call, str(trials), "1")
    done = scripts.run(Script(module="tests._engine.signal_trials", args=args, errors=("Warning",)))
    said = (done.returncode, done.stdout, "" if how == "storm" else done.stderr)
    # Python may have ignored a signal of a storm, and says so.
    assert said == (0, f"{trials} trials\n", ""), done.stderr


@pytest.mark.parametrize(("how", "call"), [("close", "progress"), ("storm", "drain")])
def test_a_few_signals_at_random_moments_do_no_harm(scripts: Scripts, how: str, call: str) -> None:
    """The handler's own exception comes out, no thread is left, the pipeline runs or is closed."""
    survives(scripts, how, call, 10)


@pytest.mark.slow
@pytest.mark.parametrize("trials", [30])
@pytest.mark.parametrize("call", ["progress", "drain"])
@pytest.mark.parametrize("how", ["close", "closing", "one", "storm"])
def test_signals_at_random_moments_do_no_harm(
    scripts: Scripts, how: str, call: str, trials: int
) -> None:
    """The same, for every handler and every call."""
    survives(scripts, how, call, trials)
