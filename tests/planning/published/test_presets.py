"""Roles and thread presets: the published tables, and plans that have other streams."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.resolved import resolve_plan
from swpipe.planning import recsys14
from swpipe.planning.published.presets import PRESETS, Roles, thread_map
from swpipe.planning.published.queue_rules import stream_of

STEP = recsys14.plan()
ROLES = Roles.of(resolve_plan(STEP), recsys14.FROZEN)


def threads(preset: str, plan: PipelinePlan = STEP, roles: Roles = ROLES) -> dict[str, set[str]]:
    """Thread to its tasks, the caller's left out."""
    groups: dict[str, set[str]] = {}
    streams = {name: stream_of(plan, name) for name in plan.schedule}
    for name, group in thread_map(preset, roles, streams).items():
        groups.setdefault(group, set()).add(name)
    groups.pop("default")
    return groups


COPY = {"h2d", "start_shuffle", "finish_shuffle"}
DIST = {"start_input_dist", "wait_input_dist"}
CACHE = {"prefetch_embeddings"}


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("default", {"io": COPY}),
        ("by_stream", {"memcpy": COPY, "data_dist": DIST, "prefetch": CACHE}),
        ("io_prefetch_compute", {"io": COPY, "prefetch": CACHE}),
        ("io_data_dist_compute", {"io": COPY, "data_dist": DIST}),
        (
            "io_data_dist_prefetch_compute",
            {"io": COPY, "data_dist": DIST, "prefetch": CACHE},
        ),
        ("per_task", {name: {name} for name in COPY | DIST | CACHE}),
    ],
)
def test_the_published_presets(preset: str, expected: dict[str, set[str]]) -> None:
    """On the fourteen tasks the roles give the published thread maps."""
    assert threads(preset) == expected


def test_by_stream_follows_the_current_streams() -> None:
    """A task that has been moved is submitted with the others of its new stream."""
    moved = {n: replace(e, stream="prefetch") if n in DIST else e for n, e in STEP.schedule.items()}
    assert threads("by_stream", replace(STEP, schedule=moved)) == {
        "memcpy": COPY,
        "prefetch": DIST | CACHE,
    }


def test_two_bundles_are_io_and_data_dist() -> None:
    """A step without an embedding cache has no prefetch."""
    plan = PipelinePlan(
        {"copy": TaskSchedule(stream="a"), "dist": TaskSchedule(stream="b"), "f": TaskSchedule()},
        deps=[("dist", "copy"), ("f", "dist")],
    )
    assert dict(Roles.of(resolve_plan(plan)).role) == {"copy": "io", "dist": "data_dist"}


def test_bundles_between_first_and_last_are_data_dist() -> None:
    """More than three bundles: those between share a thread."""
    names = ["a", "b", "c", "d"]
    plan = PipelinePlan(
        {**{n: TaskSchedule(stream=n) for n in names}, "f": TaskSchedule()},
        deps=list(zip([*names[1:], "f"], names, strict=True)),
    )
    assert list(Roles.of(resolve_plan(plan)).role.values()) == [
        "io",
        "data_dist",
        "data_dist",
        "prefetch",
    ]


def test_a_thread_group_without_streams_is_a_bundle() -> None:
    """A task that reads on another thread prepares, too."""
    plan = PipelinePlan(
        {
            "read": TaskSchedule(thread_group="reader"),
            "copy": TaskSchedule(stream="memcpy", thread_group="reader"),
            "train": TaskSchedule(),
        },
        deps=[("copy", "read"), ("train", "copy")],
    )
    roles = Roles.of(resolve_plan(plan))
    assert dict(roles.bundles) == {"reader": ("read",), "memcpy": ("copy",)}
    assert dict(roles.role) == {"read": "io", "copy": "data_dist"}
    assert threads("by_stream", plan, roles) == {"reader": {"read"}, "memcpy": {"copy"}}


def test_what_comes_after_the_callers_tasks_does_not_prepare() -> None:
    """Copying the loss back has a stream but no role; ``by_stream`` still gives it a thread."""
    plan = PipelinePlan(
        {
            "copy": TaskSchedule(stream="in"),
            "train": TaskSchedule(),
            "loss": TaskSchedule(stream="out"),
            "log": TaskSchedule(stream="out"),
        },
        deps=[("train", "copy"), ("loss", "train"), ("log", "loss")],
    )
    roles = Roles.of(resolve_plan(plan))
    assert dict(roles.role) == {"copy": "io"}
    assert threads("io_data_dist_prefetch_compute", plan, roles) == {"io": {"copy"}}
    assert threads("by_stream", plan, roles) == {"in": {"copy"}, "out": {"loss", "log"}}


def test_frozen_tasks_are_on_the_callers_thread_in_every_preset() -> None:
    """Also one with a stream; tasks after it in the same iteration do not prepare."""
    roles = Roles.of(resolve_plan(STEP), ["start_input_dist"])
    for preset in PRESETS:
        assert not any(
            "start_input_dist" in tasks for tasks in threads(preset, STEP, roles).values()
        )
    assert set(roles.role) == COPY
