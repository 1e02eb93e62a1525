"""The differences between ranks are reported one by one."""

from __future__ import annotations

from dataclasses import replace

from swpipe._distributed.agreement import differences, name_ranks, plan_facts
from tests.support.plans_for_tests import piped

PLAN = piped(3)


def test_equal_plans_differ_in_nothing() -> None:
    """It does not matter how they were built."""
    assert differences([plan_facts(PLAN), plan_facts(piped(3))]) == ""


def test_plans_differ_in_what_their_digests_count() -> None:
    """Each of these fields changes the digest, and is named."""
    name, entry = next(iter(PLAN.schedule.items()))
    moved = {**PLAN.schedule, name: replace(entry, thread_group="elsewhere")}
    backwards = dict(reversed(PLAN.schedule.items()))
    changes = {
        f"task {name!r}: (stage {entry.stage}, ": {"schedule": moved},
        "deps (": {"deps": PLAN.deps[1:]},
        "cross_iter_deps (": {"cross_iter_deps": [*PLAN.cross_iter_deps, (name, name, 2)]},
        "pipeline_depth: 3 on rank 0, 5 on rank 1": {"pipeline_depth": 5},
        f"order: none on rank 0, {name} on rank 1": {"order": [name]},
        "": {"schedule": backwards},
    }
    for told, change in changes.items():
        other = replace(PLAN, **change)
        assert other.digest() != PLAN.digest()
        digest, _, rest = differences([plan_facts(PLAN), plan_facts(other)]).partition("; ")
        assert digest.startswith("digest: ")
        assert rest.startswith(told)


def test_the_first_few_differences_are_told() -> None:
    """The message also has the number of further differences."""
    facts = [{str(i): str(rank) for i in range(6)} for rank in (0, 1)]
    told = differences(facts)
    assert told.startswith("0: 0 on rank 0, 1 on rank 1; ")
    assert told.endswith("; 3: 0 on rank 0, 1 on rank 1; and 2 more")


def test_what_a_rank_does_not_have_is_none_there() -> None:
    """A value that a rank lacks is shown as none; ranks with one value are listed together."""
    assert differences([{"a": "1"}, {}, {"a": "1"}]) == "a: 1 on ranks 0, 2, none on rank 1"


def test_long_values_are_told_from_where_they_differ() -> None:
    """Two orders of thousands of tasks may be equal up to the last one."""
    same = ", ".join(f"t{k}" for k in range(5000))
    told = differences([{"order": f"{same}, a, {same}"}, {"order": f"{same}, b, {same}"}])
    assert "t4999, a, t0" in told
    assert "t4999, b, t0" in told
    assert len(told) < 600


def test_of_many_values_the_first_are_told() -> None:
    """Only the first values are shown, since each rank may have its own."""
    told = differences([{"a": str(rank)} for rank in range(100)])
    assert told == "a: 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3, and 96 other values"
    assert name_ranks(range(1000)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"
