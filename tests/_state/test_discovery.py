"""What the tasks' functions can reach, and what they cannot."""

from __future__ import annotations

import collections
import functools
import math
import random
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swpipe import DeclaredIO, IterContext, PipelineTask
from swpipe._state.discovery import MAX_ITEMS, find_all, find_state


def found_by(fn: Callable[..., Any], io: tuple[DeclaredIO, ...] = ()) -> dict[str, Any]:
    """Path to owner, for one task."""
    return {one.path: one.owner for one in find_state([PipelineTask("task", fn, io=io)])}


@pytest.fixture
def model() -> torch.nn.Module:
    """Something to find."""
    return torch.nn.Linear(2, 2)


GLOBAL_MODEL = torch.nn.Linear(1, 1)
GLOBAL_WEIGHT = torch.nn.Parameter(torch.ones(1))


def use_global(ctx: IterContext) -> None:
    """Names a global."""
    ctx.y = GLOBAL_MODEL(ctx.batch)


def through_a_helper(ctx: IterContext) -> None:
    """Calls a function that names a global."""
    use_global(ctx)


def in_an_inner_function(ctx: IterContext) -> None:
    """Defines a function that names a global."""
    ctx.later = lambda: GLOBAL_WEIGHT * 2


def test_self_of_a_bound_method(model: torch.nn.Module) -> None:
    """A method's object is looked into, by its attributes."""

    class Job:
        def __init__(self) -> None:
            self.model = model
            self.optimizer = torch.optim.SGD(model.parameters())

        def step(self, ctx: IterContext) -> None:
            return None

    job = Job()
    assert found_by(job.step) == {"self.model": model, "self.optimizer": job.optimizer}


def test_a_bound_method_of_the_model_itself(model: torch.nn.Module) -> None:
    """The object may be what is looked for."""
    assert found_by(model.forward) == {"self": model}


def test_attributes_of_attributes_and_no_further(model: torch.nn.Module) -> None:
    """The search follows two attributes in a row."""
    near = SimpleNamespace(job=SimpleNamespace(model=model))
    far = SimpleNamespace(run=near)
    assert found_by(lambda ctx: near.job) == {"near.job.model": model}
    assert found_by(lambda ctx: far.run) == {}


def test_slots() -> None:
    """Attributes in slots are seen; those that nothing was put into are passed over."""

    class Slotted:
        __slots__ = ("empty", "model")

    job = Slotted()
    job.model = GLOBAL_MODEL
    assert found_by(lambda ctx: job) == {"job.model": GLOBAL_MODEL}


def test_closures_defaults_and_partials(model: torch.nn.Module) -> None:
    """However the function was given its model."""

    def takes(ctx: IterContext, net: Any = model, *, again: Any = None) -> None:
        return None

    def by_argument(net: Any, ctx: IterContext, **more: Any) -> None:
        return None

    assert found_by(lambda ctx: model(ctx.batch)) == {"model": model}
    assert found_by(takes) == {"default": model}
    assert found_by(functools.partial(by_argument, model)) == {"args[0]": model}
    assert found_by(functools.partial(by_argument, net=model)) == {"net": model}


def test_a_function_with_a_cache(model: torch.nn.Module) -> None:
    """What the function names is found; what the cache keeps is not looked for."""
    assert found_by(lambda ctx: functools.lru_cache(8)(lambda: model)()) == {"model": model}
    once = functools.lru_cache(8)(lambda: model)
    assert found_by(lambda ctx: once()) == {"once.model": model}


def test_globals_by_name() -> None:
    """Globals that the function mentions, itself or through functions of the user's."""
    assert found_by(use_global) == {"GLOBAL_MODEL": GLOBAL_MODEL}
    assert found_by(through_a_helper) == {"use_global.GLOBAL_MODEL": GLOBAL_MODEL}
    assert found_by(in_an_inner_function) == {"GLOBAL_WEIGHT": GLOBAL_WEIGHT}


def test_globals_of_another_module(model: torch.nn.Module) -> None:
    """``job.model`` where job is a module of the user's."""
    job = types.ModuleType("users_job")
    job.model = model
    job.unused = torch.nn.Linear(3, 3)
    scope: dict[str, Any] = {"job": job, "__name__": "users_script"}
    exec("def fn(ctx): ctx.y = job.model(ctx.batch)", scope)
    assert found_by(scope["fn"]) == {"job.model": model}


def test_what_an_io_reaches(model: torch.nn.Module) -> None:
    """State that only capture and restore touch is state of the task."""
    io = DeclaredIO(capture=lambda: model.weight, restore=lambda kept: None)
    assert found_by(lambda ctx: None, io=(io,)) == {"model": model}


def test_what_the_memory_of_a_state_reaches(model: torch.nn.Module) -> None:
    """It comes last: what functions reach goes by their path."""
    layer = torch.nn.Linear(2, 2)
    io = DeclaredIO(state="tables", memory=[model, {"last": layer}])
    found = found_by(lambda ctx: model, io=(io,))
    assert found == {"model": model, "tables.[1].last": layer}
    io = DeclaredIO(state="tables", memory=[model.weight, layer.weight])
    paths = {one.path for one in find_all([PipelineTask("a", lambda ctx: model, (io,))])}
    assert "tables.[1]" in paths
    assert "tables.[0]" not in paths


def test_items_of_containers(model: torch.nn.Module) -> None:
    """Lists and dicts are opened, unless they are so long that they must be data."""
    models = {"deep": [model]}
    data = [model] * (MAX_ITEMS + 1)
    assert found_by(lambda ctx: models) == {"models.deep.[0]": model}
    assert found_by(lambda ctx: data) == {}


def test_a_callable_object(model: torch.nn.Module) -> None:
    """An object as function: its attributes, and what its __call__ mentions."""

    class Forward:
        def __init__(self) -> None:
            self.net = model

        def __call__(self, ctx: IterContext) -> None:
            ctx.y = self.net(ctx.batch) * GLOBAL_WEIGHT

    assert found_by(Forward()) == {"net": model, "GLOBAL_WEIGHT": GLOBAL_WEIGHT}


def test_parts_of_a_found_object_are_not_listed() -> None:
    """A submodule or a parameter of a model that is found goes with it."""
    net = torch.nn.Sequential(torch.nn.Linear(1, 1))
    layer, weight = net[0], net[0].weight
    assert found_by(lambda ctx: (layer, weight, net)) == {"net": net}


def test_an_optimizer_is_put_back_whole(model: torch.nn.Module) -> None:
    """Its parameters go with it."""
    optimizer = torch.optim.SGD(model.parameters())
    assert found_by(lambda ctx: optimizer) == {"optimizer": optimizer}


def test_an_optimizer_that_a_parameters_hook_steps(model: torch.nn.Module) -> None:
    """In the backward, as soon as its gradient is there; no task leads to it otherwise."""
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    task = PipelineTask("backward", lambda ctx: model(ctx.x).sum().backward())
    assert {*optimizers.values()} <= {one.owner for one in find_state([task])}


def test_the_shortest_path_counts(model: torch.nn.Module) -> None:
    """What is two objects away on one path, and none on a longer one, is looked into."""
    inner = SimpleNamespace(trainer=SimpleNamespace(model=model))
    job, listed = SimpleNamespace(x=SimpleNamespace(inner=inner)), [[[[inner]]]]
    assert list(found_by(lambda ctx: (job, listed)).values()) == [model]


def test_generators(model: torch.nn.Module) -> None:
    """Generators of random numbers have state."""
    numpy = pytest.importorskip("numpy")
    mine, own, array = torch.Generator(), random.Random(1), numpy.random.default_rng(1)
    assert found_by(lambda ctx: (mine, own, array)) == {"mine": mine, "own": own, "array": array}


def test_self_of_a_method_that_is_written_in_c(model: torch.nn.Module) -> None:
    """A generator whose method alone was kept went on from where a recording had left it."""
    own, weight = random.Random(1), model.weight
    draw, add, make = own.random, weight.add_, collections.defaultdict(functools.partial(id, model))
    assert found_by(lambda ctx: draw) == {"draw.self": own}
    assert found_by(lambda ctx: add) == {"add.self": weight}
    of_a_module = PipelineTask("draw", functools.partial(math.sqrt, 1.0))
    assert not any(isinstance(one.owner, types.ModuleType) for one in find_all([of_a_module]))
    assert found_by(lambda ctx: make) == {"make.default_factory.args[0]": model}


def test_an_object_with_a_state_dict_is_found_and_looked_into(model: torch.nn.Module) -> None:
    """A trainer's own state_dict may leave out its model."""

    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            return None

    trainer = Trainer()
    assert found_by(lambda ctx: trainer) == {"trainer": trainer, "trainer.model": model}


def test_tensors_count_when_they_are_trained() -> None:
    """A tensor that requires grad has state; data has not."""
    weight, data = torch.ones(1, requires_grad=True), torch.ones(1)
    assert found_by(lambda ctx: (weight, data)) == {"weight": weight}


def test_the_search_runs_no_user_code() -> None:
    """Properties are not asked, and an empty cell is no error."""

    class Shy:
        @property
        def model(self) -> Any:
            raise AssertionError("asked")

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    shy = Shy()

    def uses_what_comes_later(ctx: IterContext) -> None:
        ctx.y = (shy, later)

    assert found_by(uses_what_comes_later) == {}
    later = 1


class Silent:
    """A key that must not be asked what it is called."""

    def __repr__(self) -> str:
        raise AssertionError("asked")


def test_keys_of_dicts_are_not_asked_what_they_are_called() -> None:
    """To print one may take long, or wait for a device; a recording of a test printed 53 kB."""
    weight = torch.ones(1, requires_grad=True)
    tables = {Silent(): [weight], "plain": 1}
    assert found_by(lambda ctx: tables) == {"tables.Silent.[0]": weight}


def test_cycles_end(model: torch.nn.Module) -> None:
    """Objects that hold each other are met once."""
    a, b = SimpleNamespace(), SimpleNamespace(model=model)
    a.other, b.other = b, a
    assert found_by(lambda ctx: a) == {"a.other.model": model}


@pytest.mark.parametrize("kind", [dict, list, set, collections.deque])
def test_another_thread_may_add_to_a_container_meanwhile(kind: type) -> None:
    """A check that looked for parameters failed, since a task of another thread noted a number."""
    noted: Any = kind(((1, 2), (3, 4)))

    def add(*_of_line: object) -> Any:
        """As another thread may, between any two lines of the search."""
        if len(noted) < 500:
            noted.update({f"{len(noted)}": 0}) if isinstance(noted, dict) else None
            noted.add(len(noted)) if isinstance(noted, set) else None
            noted.append(0) if isinstance(noted, list | collections.deque) else None
        return add

    sys.settrace(add)
    try:
        found = [one.path for one in find_all([PipelineTask("a", lambda ctx: noted)])]
    finally:
        sys.settrace(None)
    assert "noted" in found
    assert len(noted) == 500
