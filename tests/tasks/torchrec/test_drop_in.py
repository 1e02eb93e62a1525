"""A pipeline by name and its step: what is refused, with which words, and what plans promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from swpipe.analysis import verify
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec import (
    PipelineFactory,
    SparseDistTasks,
    TaskOptions,
    TrainStep,
)
from swpipe.tasks.torchrec.pipelines.drop_in import Pass, build
from swpipe.tasks.torchrec.rewriting.forwards import Kind
from tests.support.plans_for_tests import scattered
from tests.support.ranks import Ranks
from tests.tasks.torchrec.megatron import megatrons
from tests.tasks.torchrec.models import (
    CPU,
    Job,
    batches,
    combined,
    dense_optimizer,
    sharded,
)
from tests.tasks.torchrec.trial import (
    EXACT,
    create,
    outcome,
    refusal,
    to_the_end,
)

from torchrec.distributed import train_pipeline  # isort: skip

SERIAL, SPARSE = EXACT[:2]
DENSE_ADAM = Job(fused=False, optimizer=torch.optim.Adam, options={"lr": 0.01})
LAYER = nn.Linear(2, 1)
SGD = torch.optim.SGD(LAYER.parameters(), lr=0.1)


# ----------------------------------------------------------------------------- names and plans


def _misfit(job: Job, forward: str, optimizer: Any = dense_optimizer) -> str:
    """Return the error of the plan that looks up before the optimizers' step."""
    model, plan = sharded(job), plans.split(after_step=False)
    made = optimizer(job, model) if optimizer is dense_optimizer else optimizer(model)
    given = {"model": model, "optimizer": made, "device": CPU, "forward": forward}
    return refusal(lambda: build(lambda _: plan, **given).close())


def test_a_plan_that_does_not_suit_is_refused(one_rank: Ranks) -> None:
    """The early look-up needs the split forward, tables that update themselves, known rates."""
    assert one_rank.run(_misfit, Job(), "split") == ["nothing raised"]
    assert "'dense'" in one_rank.run(_misfit, Job(), "prefetch")[0]
    assert "'tables'" in one_rank.run(_misfit, Job("data_parallel"), "split")[0]
    (said,) = one_rank.run(_misfit, Job(), "split", combined)
    assert "'optimizer'" in said
    assert "'EmbForward'" in said
    assert plans.semi_sync().stale == {"tables": 1, "optimizer": 1}


def _on_streams(sharding: str) -> list[str]:
    """Return the ready-made plans that would be refused on a device with streams."""
    model = sharded(Job(sharding))
    step = TrainStep([dense_optimizer(Job(sharding), model)])
    tasks = SparseDistTasks(model, step, device="cpu")
    made = {name: plan() for name, plan in plans.PLANS.items() if name != "semi_sync"}
    if not tasks.tables_in_step:
        made |= {"early": plans.split(after_step=False), "semi_sync": plans.semi_sync()}
    said = {
        name: refusal(lambda p=plan: verify(p, tasks.tasks(), streams=True, pull_ahead=True))
        for name, plan in made.items()
    }
    return [f"{name}: {why}" for name, why in said.items() if why != "nothing raised"]


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_the_plans_hold_on_a_device_with_streams(one_rank: Ranks, sharding: str) -> None:
    """Their dependences order every state, also across streams."""
    assert one_rank.run(_on_streams, sharding) == [[]]


def _scattered(forward: Kind, sharding: str) -> list[str]:
    """Return the refusals of plans with random stages and threads but a ready-made plan's edges."""
    model = sharded(Job(sharding))
    step = TrainStep([dense_optimizer(Job(sharding), model)])
    tasks = SparseDistTasks(model, step, TaskOptions(forward=forward), device="cpu").tasks()
    made = plans.split() if forward == "split" else plans.sparse_dist()
    base = replace(made, same_period_deps=(), order=(), pipeline_depth=None)
    said = (
        refusal(lambda seed=seed: verify(scattered(base, seed), tasks, pull_ahead=True, body=False))
        for seed in range(10)
    )
    return [why for why in said if why != "nothing raised"]


@pytest.mark.parametrize("forward", ["pipelined", "split"])
def test_dependences_alone_keep_the_order_of_states(one_rank: Ranks, forward: Kind) -> None:
    """Therefore a planner may choose any other stages, threads and order."""
    for sharding in ("table_wise", "data_parallel"):
        assert one_rank.run(_scattered, forward, sharding) == [[]]


def _states_of_backward(forward: Kind) -> set[str]:
    model = sharded(Job())
    step = TrainStep([dense_optimizer(Job(), model)])
    tasks = SparseDistTasks(model, step, TaskOptions(forward=forward), device="cpu").tasks()
    return {str(io.state) for task in tasks if task.name == plans.DENSE_BACK for io in task.io}


def test_one_backward_for_both_says_that_it_updates_the_tables(one_rank: Ranks) -> None:
    """Without the cut, the dense part's backward does it."""
    assert "tables" in one_rank.run(_states_of_backward, "ahead")[0]
    assert "tables" not in one_rank.run(_states_of_backward, "split")[0]


def _prefetched_after(forward: Kind) -> list[str]:
    """Return the tasks of the previous batch before a prefetch in the plan ``split``."""
    with create(EXACT[3], forward=forward) as pipeline:
        pairs = pipeline.pipe.plan.same_period_deps
        return [before for after, before in pairs if after == plans.PREFETCH]


def test_a_prefetch_comes_after_the_backward_that_updates_tables(one_rank: Ranks) -> None:
    """It may fill their caches on another stream."""
    assert one_rank.run(_prefetched_after, "split") == [[plans.DENSE]]
    assert one_rank.run(_prefetched_after, "ahead") == [[plans.DENSE_BACK]]


# --------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: PipelineFactory.create(SERIAL, model=LAYER), "ValueError: give either optimizer="),
        (
            lambda: PipelineFactory.create(
                SERIAL, model=LAYER, optimizer=SGD, step=TrainStep([SGD])
            ),
            "ValueError: give either optimizer= or step=TrainStep(...)",
        ),
        (lambda: TrainStep([]), "ValueError: a TrainStep without an opt"),
        (lambda: TrainStep([SGD], accumulate=0), "ValueError: accumulate is 0"),
        (lambda: TrainStep([SGD], sync_interval=0), "ValueError: sync_interval is 0"),
        (lambda: TrainStep([SGD]).total(3.0), "TypeError: the losses are 3.0; give a tensor or"),
        (lambda: TrainStep([SGD]).total({}), "TypeError: the losses are {}"),
        (lambda: TrainStep([SGD]).total({"a": 1}), "TypeError: the losses are {'a': 1}"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_made(call: Callable[[], Any], said: str) -> None:
    """The error has the value and the fix."""
    assert refusal(call).startswith(said)


def _told() -> dict[str, str]:
    """Return the errors that only a process group shows."""

    def scaled(model: nn.Module, optimizer: Any, **options: Any) -> str:
        step = TrainStep([optimizer], **options)
        return refusal(lambda: create(SERIAL, model, step=step))

    model, scaler = sharded(Job()), torch.amp.GradScaler("cpu")
    found = {"fused tables": scaled(model, dense_optimizer(Job(), model), scaler=scaler)}
    found["megatron, a norm"] = scaled(*megatrons(), clip=1.0)
    found["megatron, a scaler"] = scaled(*megatrons(), scaler=scaler)
    alone = TrainStep([dense_optimizer(Job(), model)], forward=lambda batch: model(batch)[0])
    with create(SERIAL, model, step=alone) as pipeline:
        found["no pair"] = refusal(lambda: pipeline.progress(batches(1)))
    model = sharded(Job())
    with create(SPARSE, model) as pipeline:
        pipeline.progress(batches(5))
        model.module.top.eval()
        found["one module"] = refusal(pipeline.drain)
    step = TrainStep([dense_optimizer(Job(), model.train())], accumulate=4)
    with create(SPARSE, model, step=step) as pipeline:
        pipeline.progress(batches(5))
        found["flush in flight"] = refusal(pipeline.flush)
        if hasattr(train_pipeline, "GradientAccumulationWrapper"):
            found["torchrec's wrapper"] = refusal(lambda: _wrapped(pipeline, model, SGD))
    return found


def test_what_would_give_other_numbers_is_refused(one_rank: Ranks) -> None:
    """These are scaled gradients in tables, ``parameter.grad`` with Megatron, temporary modes."""
    expected = {
        "fused tables": ("with the scaled gradients: use bfloat16",),
        "megatron, a norm": ("parameter.main_grad",),
        "megatron, a scaler": ("parameter.main_grad",),
        "no pair": ("returned a Tensor, not (losses, output)",),
        "one module": ("gradients on, the model in training mode", "modules in training mode ("),
        "flush in flight": ("drain()",),
        "torchrec's wrapper": ("TrainStep(accumulate=n)",),  # it replaces what ours does not read
    }
    (said,) = one_rank.run(_told)
    assert said
    for what, text in said.items():
        assert all(part in text for part in expected[what]), text


# ------------------------------------------------------------------------------------- the step


def test_losses_become_one_number() -> None:
    """They may be a number, one per row, or a dict of these."""
    both = {"a": torch.tensor(2.0), "b": torch.tensor([3.0, 4.0])}
    assert [TrainStep([SGD]).total(one).item() for one in (both["a"], both["b"], both)] == [2, 7, 9]


def test_clipping_may_be_a_function_of_the_parameters() -> None:
    """It gets all that the optimizers step, each once."""
    seen: list[Any] = []
    TrainStep([SGD, torch.optim.SGD([LAYER.bias])], clip=seen.extend).update()
    assert [id(p) for p in seen] == [id(LAYER.weight), id(LAYER.bias)]


def _scaled() -> list[str]:
    outcomes = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0)):
        model = sharded(DENSE_ADAM)
        step = TrainStep([dense_optimizer(DENSE_ADAM, model)], scaler=scaler, clip=0.02)
        outcomes.append(outcome(create(EXACT[2], model, step=step), batches(5)))
    return outcomes[0].differences(outcomes[1])


def test_a_scaler_scales_and_unscales(two_ranks: Ranks) -> None:
    """A power of two changes no bit; gradients are clipped as without it."""
    assert two_ranks.run(_scaled) == [[], []]


def _evaluated() -> bool:
    """Return whether an evaluation leaves the gradients of the last step."""
    model = sharded(Job())
    with create(SERIAL, model) as pipeline:
        to_the_end(pipeline, batches(1))
        before = [p.grad.clone() for p in pipeline.tasks.step.parameters()]
        model.eval()
        with torch.no_grad():
            to_the_end(pipeline, batches(2, seed=1))
        after = [p.grad for p in pipeline.tasks.step.parameters()]
    return all(map(torch.equal, before, after))


def test_an_evaluation_leaves_gradients(one_rank: Ranks) -> None:
    """This is as in a plain loop, whose ``zero_grad`` belongs to the step."""
    assert one_rank.run(_evaluated) == [True]


def _wrapped(pipeline: Any, model: nn.Module, optimizer: Any) -> Any:
    config = train_pipeline.GradientAccumulationConfig(is_enabled=True, num_steps=4)
    return train_pipeline.GradientAccumulationWrapper(pipeline, optimizer, model, config)


# --------------------------------------------------------------------------------- other models


def _shortcut() -> bool:
    """Return whether a replayed backward leaves Megatron's buffer as the backward left it."""
    model, optimizer = megatrons()
    with create(SERIAL, model, step=TrainStep([optimizer])) as pipeline:
        wrapper = model._dmp_wrapped_module
        one, other = batches(2)
        pipeline.pipe.enable_shortcut("DenseBackward")
        pipeline.pipe.run_one_serial_iter(one)
        cached = wrapper._buffer.clone()
        wrapper._buffer.fill_(7.0)
        wrapper._ready.add(0)
        pipeline.pipe.run_one_serial_iter(other)
        return bool(cached.any()) and torch.equal(wrapper._buffer, cached)


def test_a_shortcut_of_the_backward_puts_megatrons_buffer_back(one_rank: Ranks) -> None:
    """``parameter.grad`` is None with Megatron: that alone would not suffice."""
    assert one_rank.run(_shortcut) == [True]


class Corrupt(Iterator[int]):
    """An iterator over 0 to 5, with an error in place of 2."""

    def __init__(self) -> None:
        self.next = 0

    def __next__(self) -> int:
        self.next += 1
        if self.next == 3:
            raise ValueError("planted")
        if self.next > 6:
            raise StopIteration
        return self.next - 1


@pytest.mark.parametrize(
    ("keep_back", "right"), [(0, [0, 1, "planted", 3, 4, 5]), (2, [0, 1, "planted", 3])]
)
def test_an_error_keeps_its_place_among_batches_that_are_kept_back(
    keep_back: int, right: list[Any]
) -> None:
    """Batches that ``execute_all_batches=False`` reads ahead come before it."""
    assert list(islice(handed_out(Pass(Corrupt(), keep_back=keep_back)), 9)) == right


def handed_out(batches: Iterator[int]) -> Iterator[Any]:
    """Yield the batches, and the texts of the errors."""
    while True:
        try:
            yield next(batches)
        except ValueError as error:
            yield str(error)
        except StopIteration:
            return


class Broken(Iterator[int]):
    """An iterator of 0 that then raises the same error forever."""

    def __init__(self) -> None:
        self.begun = False

    def __next__(self) -> int:
        if self.begun:
            raise ValueError("planted")
        self.begun = True
        return 0


def test_an_iterator_that_goes_on_failing_is_read_once_for_each_call() -> None:
    """The batch that was kept back comes first; nothing is read behind an error."""
    found = list(islice(handed_out(Pass(Broken(), keep_back=2)), 3))
    assert found == [0, "planted", "planted"]
