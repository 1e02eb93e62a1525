"""Roles and thread presets: the published tables, and plans that have other streams."""

from __future__ import annotations

from bench import recsys14
from docs.examples.published_planners.queue_rules import stream_of
from docs.examples.published_planners.task_roles import PRESETS, TaskRoles
from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.resolved import resolve_plan

STEP = recsys14.plan()
ROLES = TaskRoles.of(resolve_plan(STEP), recsys14.FROZEN)


def threads(
    preset: str, plan: PipelinePlan = STEP, roles: TaskRoles = ROLES
) -> dict[str, set[str]]:
    """Return the tasks of each thread but the caller's."""
    groups: dict[str, set[str]] = {}
    streams = {name: stream_of(plan, name) for name in plan.schedule}
    for name, group in roles.groups(preset, streams).items():
        groups.setdefault(group, set()).add(name)
    groups.pop("default")
    return groups


COPY = {"h2d", "start_shuffle", "finish_shuffle"}
DIST = {"start_input_dist", "wait_input_dist"}
CACHE = {"prefetch_embeddings"}


PUBLISHED = {
    "default": {"io": COPY},
    "by_stream": {"memcpy": COPY, "data_dist": DIST, "prefetch": CACHE},
    "io_prefetch_compute": {"io": COPY, "prefetch": CACHE},
    "io_data_dist_compute": {"io": COPY, "data_dist": DIST},
    "io_data_dist_prefetch_compute": {"io": COPY, "data_dist": DIST, "prefetch": CACHE},
    "per_task": {name: {name} for name in COPY | DIST | CACHE},
}


def test_the_published_presets() -> None:
    """On the fourteen tasks the roles give the published thread maps."""
    assert {preset: threads(preset) for preset in PRESETS} == PUBLISHED


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


def test_frozen_tasks_are_on_the_callers_thread_in_every_preset() -> None:
    """This includes a task with a stream; later tasks of the same iteration do not prepare."""
    roles = TaskRoles.of(resolve_plan(STEP), ["start_input_dist"])
    assert set(roles.role) == COPY
    for preset in PRESETS:
        assert "start_input_dist" not in set().union(*threads(preset, STEP, roles).values())
