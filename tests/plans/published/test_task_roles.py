"""Roles and thread presets: the published tables, and plans that have other streams."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import recsys14
from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.resolved import resolve_plan
from swpipe.plans.published.queue_rules import stream_of
from swpipe.plans.published.task_roles import PRESETS, TaskRoles

STEP = recsys14.plan()
ROLES = TaskRoles.of(resolve_plan(STEP), recsys14.FROZEN)


def threads(
    preset: str, plan: PipelinePlan = STEP, roles: TaskRoles = ROLES
) -> dict[str, set[str]]:
    """Thread to its tasks, the caller's left out."""
    groups: dict[str, set[str]] = {}
    streams = {name: stream_of(plan, name) for name in plan.schedule}
    for name, group in roles.groups(preset, streams).items():
        groups.setdefault(group, set()).add(name)
    groups.pop("default")
    return groups


def in_a_chain(*streams: str) -> TaskRoles:
    """Of tasks named like their streams, one after the other, and one of the caller's."""
    plan = PipelinePlan(
        {**{n: TaskSchedule(stream=n) for n in streams}, "f": TaskSchedule()},
        deps=list(zip([*streams[1:], "f"], streams, strict=True)),
    )
    return TaskRoles.of(resolve_plan(plan))


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


@pytest.mark.parametrize(
    ("streams", "roles"),
    [
        ("ab", "io data_dist"),
        ("abc", "io data_dist prefetch"),
        ("abcd", "io data_dist data_dist prefetch"),
    ],
)
def test_a_bundle_has_its_role_by_its_place(streams: str, roles: str) -> None:
    """A step without an embedding cache has no prefetch; those between share a thread."""
    assert in_a_chain(*streams).role == dict(zip(streams, roles.split(), strict=True))


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
    roles = TaskRoles.of(resolve_plan(plan))
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
    roles = TaskRoles.of(resolve_plan(plan))
    assert dict(roles.role) == {"copy": "io"}
    assert threads("io_data_dist_prefetch_compute", plan, roles) == {"io": {"copy"}}
    assert threads("by_stream", plan, roles) == {"in": {"copy"}, "out": {"loss", "log"}}


def test_frozen_tasks_are_on_the_callers_thread_in_every_preset() -> None:
    """Also one with a stream; tasks after it in the same iteration do not prepare."""
    roles = TaskRoles.of(resolve_plan(STEP), ["start_input_dist"])
    assert set(roles.role) == COPY
    for preset in PRESETS:
        assert "start_input_dist" not in set().union(*threads(preset, STEP, roles).values())
