"""Modules that compute inputs of sharded modules run in a task of their own, ahead of the forward.

TorchRec calls them postprocs (``pipeline_postproc=True``). The numbers are those of TorchRec's
``TrainPipelineBase``, which runs the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from swpipe.plans.torchrec.sparse_dist import POSTPROC
from swpipe.tasks.torchrec import PipelineFactory, RewriteError
from swpipe.tasks.torchrec.shuffle import KarmarkarKarpShuffler
from tests.support.ranks import Ranks
from tests.tasks.torchrec.computing import (
    TWO,
    Autocasts,
    Chain,
    Container,
    Draws,
    Each,
    Flagged,
    InList,
    InPlace,
    OfEmbeddings,
    One,
    ReadsBefore,
    ReadsBeforeRebound,
    Rebound,
    ReplacesPart,
    Skips,
    Twice,
    WithParameters,
    computing,
)
from tests.tasks.torchrec.models import CPU, Batch, Model, batches, dense_optimizer
from tests.tasks.torchrec.trial import (
    EXACT,
    Outcome,
    by_torchrec,
    dealt,
    everything,
    to_the_end,
)

SEMI_SYNC = "jagged_semi_sync_sparse_dist"


def _trained(
    name: str, model: nn.Module, data: Iterator[Batch], torch_seed: int = 11, **options: Any
) -> Outcome:
    torch.manual_seed(torch_seed)
    with PipelineFactory.create(
        name, model=model, optimizer=dense_optimizer(TWO, model), device=CPU, **options
    ) as pipeline:
        outputs = to_the_end(pipeline, data)
    return Outcome(outputs, everything(model))


def _different(kind: type[Model], steps: int = 6) -> dict[str, list[str]]:
    """For each exact plan that differs from TorchRec's base, where it does."""
    model = computing(kind)
    torch.manual_seed(11)  # as _trained
    wanted = by_torchrec(TWO, batches(steps), model)
    found = {
        name: _trained(name, computing(kind), batches(steps), pipeline_postproc=True)
        for name in EXACT
    }
    return {name: w for name, one in found.items() if (w := one.differences(wanted))}


@pytest.mark.parametrize("kind", [One, Each, Chain, Draws, InPlace, Rebound])
def test_the_numbers_are_those_of_the_model_as_it_is(two_ranks: Ranks, kind: type[Model]) -> None:
    """Shared, nested, chained, random, in place; outputs, parameters and modules' buffers."""
    assert two_ranks.run(_different, kind) == [{}, {}]


def _seeded() -> list[str]:
    options = {"pipeline_postproc": True, "random": True, "seed": 3}
    outcomes = [
        _trained(name, computing(Draws), batches(5), torch_seed, **options)
        for torch_seed, name in enumerate(EXACT)
    ]
    return [where for one in outcomes for where in one.differences(outcomes[0])]


def test_seeded_draws_are_the_same_under_every_plan(two_ranks: Ranks) -> None:
    """The task draws by the pipeline's seed and its iteration, whatever torch's own state is."""
    assert two_ranks.run(_seeded) == [[], []]


def _shuffled() -> dict[str, list[str]]:
    wanted = by_torchrec(TWO, dealt(5), computing(Chain))
    found = {}
    for name in EXACT:
        shuffler = KarmarkarKarpShuffler(Batch.work)
        model = computing(Chain)
        outcome = _trained(name, model, batches(5), shuffler=shuffler, pipeline_postproc=True)
        shuffler.close()
        if where := outcome.differences(wanted):
            found[name] = where
    return found


def test_modules_see_the_shuffled_batch(two_ranks: Ranks) -> None:
    """The shuffle is finished before them."""
    assert two_ranks.run(_shuffled) == [{}, {}]


def _order(name: str) -> str:
    """When the module runs (m) and when the model's dense part does (d)."""
    model = computing(One)
    seen: list[str] = []
    inner = model.module
    augment = inner.augment.forward
    inner.augment.forward = lambda batch: (seen.append("m"), augment(batch))[1]
    inner.bottom.register_forward_hook(lambda *_: seen.append("d"))
    _trained(name, model, batches(3), pipeline_postproc=True)
    return "".join(seen)


def test_modules_run_once_per_batch_and_ahead(two_ranks: Ranks) -> None:
    """As far ahead as the exchange of ids."""
    assert two_ranks.run(_order, "jagged_sw_serial") == ["mdmdmd"] * 2
    assert two_ranks.run(_order, "jagged_sparse_dist") == ["mmdmdd"] * 2
    assert two_ranks.run(_order, "jagged_prefetch_sparse_dist") == ["mmmddd"] * 2


def _detached() -> tuple[list[str], list[str]]:
    """Whether a detached model is as before, and a training with detours differs."""
    wanted = by_torchrec(TWO, batches(6), computing(One))
    model = computing(One)
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    keys = list(model.state_dict())
    outputs, changed = [], []
    with PipelineFactory.create(
        "jagged_split_sparse_dist", model=model, optimizer=dense_optimizer(TWO, model), device=CPU,
        pipeline_postproc=True,
    ) as pipeline:  # fmt: skip
        data = batches(6)
        for _ in range(3):
            outputs.append(pipeline.progress(data))
            assert list(model.state_dict()) == keys
            with torch.no_grad():
                pipeline.detach()(next(batches(1, seed=5)))
            now = {name: set(vars(m)) for name, m in model.named_modules()}
            changed += [n for n in before if "forward" in now[n] - before[n]]
            pipeline.attach()
        outputs += to_the_end(pipeline, data)
    return changed, Outcome(outputs, everything(model)).differences(wanted)


def test_a_detached_model_has_its_own_forwards(two_ranks: Ranks) -> None:
    """It computes by itself; batches in flight keep what was computed for them."""
    assert two_ranks.run(_detached) == [([], [])] * 2


def _refusal(
    kind: type[Model],
    name: str = "jagged_split_sparse_dist",
    flip: int = 9,
    change: Callable[[nn.Module], object] | None = None,
    **options: Any,
) -> str:
    """What is said in a training of 6 batches, with the flag off from one of them on."""
    model = computing(kind)
    options = {"pipeline_postproc": True, **options}
    data = batches(6)
    with PipelineFactory.create(
        name, model=model, optimizer=dense_optimizer(TWO, model), device=CPU, **options
    ) as pipeline:
        if change is not None:
            change(model.module)
        try:
            for step in range(6):
                model.module.flag = step < flip
                pipeline.progress(data)
        except RewriteError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (WithParameters, "by 'weights', which holds parameters (inner.weight)"),
        (Twice, "by 'move', which is called 2 times in one forward"),
        (InList, "by 'choose', whose own arguments are not found"),
        (Container, "its input (keyed_jagged_tensor) is computed in the forward, not"),
        (OfEmbeddings, "by 'tables.0', whose embeddings come after the exchange"),
        (ReadsBefore, "reads what it changes before it calls the module (aten.add.Tensor)"),
        (ReadsBeforeRebound, "module 'rebinds' changes its input, and runs ahead"),
    ],
)
def test_a_module_that_may_not_run_ahead_is_named(
    two_ranks: Ranks, kind: type[Model], says: str
) -> None:
    """With the reason, on every rank, at the first batch."""
    for said in two_ranks.run(_refusal, kind):
        assert says in said


def _without() -> str:
    return _refusal(One, pipeline_postproc=False)


def test_the_option_is_named_where_it_would_help(two_ranks: Ranks) -> None:
    """Without it nothing runs ahead."""
    for said in two_ranks.run(_without):
        assert (
            "tables.0: its input (getattr_2) is computed in the forward by 'augment', a module"
            in said
        )
        assert "pipeline_postproc=True" in said


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        (EXACT[0], Flagged, "module 'move': its result for batch.ids was computed ahead"),
        (EXACT[1], Skips, "module 'tables.0': its input move(...) was exchanged"),
        (EXACT[2], ReplacesPart, "module 'augment': its result for batch was computed ahead"),
        (EXACT[3], Autocasts, "the forward calls it in another autocast mode"),
    ],
)
def test_a_forward_that_does_otherwise_later_is_refused(
    two_ranks: Ranks, kind: type[Model], says: str, name: str
) -> None:
    """Another argument, another input, a part of the batch replaced, another mode."""
    for said in two_ranks.run(_refusal, kind, name, 2):
        assert says in said
    assert two_ranks.run(_refusal, kind, name) == ["", ""]


def _changed(name: str, change: str, drained: bool) -> str:
    """Train 3 batches, change a module from outside, and go on."""
    model = computing(Each)
    with PipelineFactory.create(
        name, model=model, optimizer=dense_optimizer(TWO, model), device=CPU,
        pipeline_postproc=True,
    ) as pipeline:  # fmt: skip
        data = batches(8)
        for _ in range(3):
            pipeline.progress(data)
        if drained:
            pipeline.drain()
        if change == "buffer":
            model.module.move.ran.zero_()
        else:
            model.module.parts.inner.by = 11
        for go_on in (pipeline.progress, lambda _: pipeline.drain()):
            try:
                go_on(data)
            except RuntimeError as error:
                said = str(error)
            else:
                return ""
    return said


@pytest.mark.parametrize(("change", "of"), [("buffer", "move"), ("number", "parts.inner")])
def test_a_change_from_outside_comes_too_late_for_batches_in_flight(
    two_ranks: Ranks, change: str, of: str
) -> None:
    """By any plan that computes ahead; ``drain`` first, or one batch at a time, are exact."""
    for name in EXACT[1:]:
        for said in two_ranks.run(_changed, name, change, False):
            assert f"a buffer or attribute of module {of!r} was changed from outside" in said
        assert two_ranks.run(_changed, name, change, True) == ["", ""]
    assert two_ranks.run(_changed, EXACT[0], change, False) == ["", ""]


def _hooked() -> str:
    def change(model: Any) -> None:
        model.augment.register_forward_hook(lambda _, args, out: replace(out, ids=args[0].ids))

    return _refusal(One, change=change)


def test_a_hook_that_changes_the_result_is_noticed(two_ranks: Ranks) -> None:
    """Hooks run in the model's forward, after the exchange."""
    for said in two_ranks.run(_hooked):
        assert "module 'tables.0': its input augment(...).ids was exchanged" in said


def _lenient(kind: type[Model]) -> tuple[str, dict[str, list[str]]]:
    wanted = by_torchrec(TWO, batches(5), computing(kind))
    found, report = {}, ""
    for name in EXACT:
        model = computing(kind)
        with PipelineFactory.create(
            name, model=model, optimizer=dense_optimizer(TWO, model), device=CPU,
            pipeline_postproc=True, strict=False,
        ) as pipeline:  # fmt: skip
            outcome = Outcome(to_the_end(pipeline, batches(5)), everything(model))
            report = str(pipeline.report)
        if where := outcome.differences(wanted):
            found[name] = where
    return report, found


@pytest.mark.parametrize("kind", [InList])
def test_without_strict_what_may_not_run_ahead_runs_in_the_forward(
    two_ranks: Ranks, kind: type[Model]
) -> None:
    """The report says so; modules that only unpipelined tables need do not run ahead."""
    for report, found in two_ranks.run(_lenient, kind):
        assert found == {}
        assert "tables.0 (ShardedEmbeddingBagCollection) NOT pipelined" in report
        assert "tables.1 (ShardedEmbeddingBagCollection) pipelined: batch.ids" in report
        assert "computed ahead" not in report


def _outside() -> str:
    model = computing(One)
    with PipelineFactory.create(
        "jagged_sparse_dist", model=model, optimizer=dense_optimizer(TWO, model), device=CPU,
        pipeline_postproc=True,
    ) as pipeline:  # fmt: skip
        pipeline.progress(batches(3))
        try:
            model(next(batches(1)))
        except RuntimeError as error:
            return str(error)
    return ""


def test_calling_an_attached_model_is_an_error(two_ranks: Ranks) -> None:
    """It must not get what was computed for a batch in flight."""
    for said in two_ranks.run(_outside):
        assert "module 'augment' is called outside of its pipeline" in said


def _left_out(name: str, task: str) -> int:
    """Outputs of other batches than the one that a shortcut has kept."""
    model = computing(Chain)
    with PipelineFactory.create(
        name, model=model, optimizer=dense_optimizer(TWO, model), device=CPU,
        pipeline_postproc=True,
    ) as pipeline:  # fmt: skip
        outputs = to_the_end(pipeline, batches(1))
        pipeline.pipe.enable_shortcut(task)
        outputs += to_the_end(pipeline, batches(5, seed=2))
        pipeline.pipe.disable_shortcut()
        outputs += to_the_end(pipeline, batches(1))
    return sum(bool(torch.isfinite(output).all()) for output in outputs)


@pytest.mark.parametrize("task", ["H2DAndShuffle", POSTPROC, "EmbInputDistStart", "DenseForward"])
def test_tasks_can_be_left_out(two_ranks: Ranks, task: str) -> None:
    """Results, exchanges and batches of another iteration are replayed without a false alarm."""
    for name in ("jagged_sparse_dist", "jagged_split_sparse_dist"):
        assert two_ranks.run(_left_out, name, task) == [7, 7]
