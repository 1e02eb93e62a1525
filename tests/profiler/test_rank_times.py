"""Several ranks: which is slow, and which waits for which."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from swpipe.profiler import ProfileResult, ProfileResults
from swpipe.profiler.figures import IterationTimes, RankTimes
from swpipe.profiler.rank_times import rank_waits, waited_for
from swpipe.profiler.spread import Estimate
from tests.profiler.results import changed, of_step, tasks_of
from tests.profiler.test_result import RESULT

TASKS = ("read", "forward", "backward")


def rank(number: int, read_ms: float, waits_ms: float) -> RankTimes:
    """Return a rank with this time to read, and to wait in the forward's collective."""
    host_s = {"read": read_ms / 1e3, "forward": (4 + waits_ms) / 1e3, "backward": 4e-3}
    return RankTimes(
        rank=number,
        iteration=IterationTimes(Estimate(0.0125, 0.0), 0.0125),
        tasks=tasks_of(
            raw_s={"read": read_ms / 1e3, "forward": 0.008, "backward": 0.004},
            spread_s=dict.fromkeys(TASKS, 1e-4),
            host_s=host_s,
            error_s=dict.fromkeys(TASKS, 1e-4),
            # Without the forward, its gradients are not exchanged; that is no wait.
            in_others_s={"read": {"forward": waits_ms / 1e3}, "forward": {"backward": 4e-3}},
        ),
    )


RANKS = (rank(0, 2, 5.5), rank(1, 8, 0.0), rank(2, 5, 3))

VIEW = """\
3 ranks, ms      exposed                         host
                  median        worst    on    median        worst    on
-------------  ---------  -----------  ----  --------  -----------  ----
iteration           12.5         12.5     0
read                5.00  8.00 ± 0.10     1      5.00  8.00 ± 0.20     1
forward             8.00  8.00 ± 0.10     0      7.00  9.50 ± 0.20     0
backward            4.00  4.00 ± 0.10     0      4.00  4.00 ± 0.20     0
Rank 0 waits for rank 1: 5.500 ± 0.283 ms per iteration, in forward 5.500; rank
  1 takes longer in read 6.000
Rank 2 waits for rank 1: 3.000 ± 0.283 ms per iteration, in forward 3.000; rank
  1 takes longer in read 3.000
"""


def test_the_median_the_worst_and_who_waits_for_whom() -> None:
    """Other ranks wait for what takes a rank longer, wherever they wait.

    The forward takes rank 0 longest, since it waits there: that is no reason for another rank to
    wait.
    """
    result = replace(RESULT, ranks=RANKS, collectives=("forward", "backward"))
    for text in (result.format_report(), ProfileResults([result]).format_report()):
        assert VIEW in "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    (first, second) = result.rank_waits
    assert (first.rank, first.waits_for, first.waits_in) == (
        0,
        1,
        {"forward": pytest.approx(5.5e-3)},
    )
    assert (second.rank, second.longer_there) == (2, {"read": pytest.approx(3e-3)})
    assert ProfileResult.from_json(result.to_json()) == result


def test_a_result_says_how_its_ranks_differ() -> None:
    """For the simulator and planners, a collective costs the time of its last rank."""
    differences = replace(RESULT, ranks=RANKS, collectives=("forward", "backward")).differences
    assert differences is not None
    assert differences.ranks.number == 3
    assert (differences.slowest, differences.task) == (1, "read")
    assert differences.longer_us == pytest.approx(3_000)
    assert differences.costs.tasks["forward"].host_us == pytest.approx(4_000)
    assert RESULT.differences is None


def test_a_difference_within_the_error_is_no_wait() -> None:
    """A small part of an iteration is none either, nor a longer read without a wait."""
    close = (rank(0, 2, 0.2), rank(1, 8, 0.0))
    assert rank_waits(close, ("forward", "backward")) == ()
    noisy = tuple(changed(of, error_s=dict.fromkeys(TASKS, 5e-3)) for of in RANKS)
    assert rank_waits(noisy, ("forward", "backward")) == ()
    assert rank_waits(RANKS, ()) == ()
    text = replace(RESULT, ranks=close, collectives=("forward", "backward")).format_report()
    assert "no rank waits for another by more than the measurement's error" in text


def test_one_rank_has_no_view() -> None:
    """The report does not mention ranks."""
    assert RESULT.rank_waits == ()
    assert "rank" not in RESULT.format_report()


def test_a_damaged_rank_is_refused() -> None:
    """It is refused like other damaged parts."""
    data = json.loads(replace(RESULT, ranks=RANKS).to_json())
    del data["ranks"][1]["tasks"]
    with pytest.raises(ValueError, match=r"a profile result.ranks\[1\] has no tasks"):
        ProfileResult.from_dict(data)


def test_the_rank_that_others_wait_for() -> None:
    """It has the longest wait, since all iterations take as long; without a wait, the slowest."""
    result = replace(RESULT, ranks=RANKS, collectives=("forward", "backward"))
    assert waited_for(RANKS, result.rank_waits) == 1
    slower = of_step(RANKS[2], 2 * RANKS[2].baseline_s)
    assert waited_for((*RANKS[:2], slower), ()) == 2
