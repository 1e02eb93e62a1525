"""Modules that compute inputs of sharded modules run in a separate task, ahead of the forward.

TorchRec calls them postprocs (``pipeline_postproc=True``). The numbers are those of TorchRec's
``TrainPipelineBase``, which runs the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from swpipe.plans.torchrec.sparse_dist import POSTPROC
from swpipe.tasks.torchrec.shuffling.shuffle import KarmarkarKarpShuffler
from tests.support.ranks import Ranks
from tests.tasks.torchrec import computing as kinds
from tests.tasks.torchrec.computing import TWO, Kind, computing, refused
from tests.tasks.torchrec.models import Batch, batches
from tests.tasks.torchrec.trial import (
    EXACT,
    by_torchrec,
    create,
    dealt,
    outcome,
    refusal,
    to_the_end,
)

AHEAD = partial(refused, pipeline_postproc=True)


def _made(name: str, model: nn.Module, **options: Any) -> Any:
    return create(name, model, TWO, **{"pipeline_postproc": True, **options})


def _different(
    kind: Kind,
    names: tuple[str, ...],
    data: Callable[[int], Iterator[Batch]] = batches,
    **options: Any,
) -> dict[str, list[str]]:
    """Return the differences of these plans from TorchRec's base, if any."""
    model = computing(kind)
    torch.manual_seed(11)
    wanted, found = by_torchrec(TWO, data(4), model), {}
    for name in names:
        shuffler = KarmarkarKarpShuffler(Batch.work) if data is dealt else None
        pipeline = _made(name, computing(kind), shuffler=shuffler, **options)
        torch.manual_seed(11)
        if where := outcome(pipeline, batches(4)).differences(wanted):
            found[name] = where
        if shuffler is not None:
            shuffler.close()
    return found


KINDS = (kinds.one, kinds.each, kinds.chain, kinds.draws, kinds.in_place, kinds.rebound)


def _kinds_different() -> dict[str, Any]:
    """Return the differences of each kind, under one of the plans."""
    found = {}
    for k, kind in enumerate(KINDS):
        if where := _different(kind, (EXACT[1 + k % 3],)):
            found[kind.__name__] = where
    return found


def test_the_numbers_are_those_of_the_model_as_it_is(two_ranks: Ranks) -> None:
    """Modules are shared, nested, chained, random, in place; outputs and state are equal."""
    assert two_ranks.run(_kinds_different) == [{}, {}]


def _seeded() -> list[str]:
    outcomes = []
    for torch_seed, name in enumerate(EXACT[::3]):
        pipeline = _made(name, computing(kinds.draws), random=True, seed=3)
        torch.manual_seed(torch_seed)
        outcomes.append(outcome(pipeline, batches(5)))
    return [where for one in outcomes for where in one.differences(outcomes[0])]


def test_seeded_draws_are_the_same_under_every_plan(two_ranks: Ranks) -> None:
    """The task draws by the pipeline's seed and its iteration, with any state of torch."""
    assert two_ranks.run(_seeded) == [[], []]


def test_modules_see_the_shuffled_batch(two_ranks: Ranks) -> None:
    """The shuffle ends before them."""
    assert two_ranks.run(_different, kinds.chain, EXACT[1:2], dealt) == [{}, {}]


def _order(name: str) -> str:
    """Return the order of the module's runs (m) and those of the model's dense part (d)."""
    model = computing(kinds.one)
    seen: list[str] = []
    inner = model.module
    augment = inner.augment.forward
    inner.augment.forward = lambda batch: (seen.append("m"), augment(batch))[1]
    inner.bottom.register_forward_hook(lambda *_: seen.append("d"))
    outcome(_made(name, model), batches(3))
    return "".join(seen)


def test_modules_run_once_per_batch_and_ahead(two_ranks: Ranks) -> None:
    """They are as far ahead as the exchange of ids."""
    assert two_ranks.run(_order, "jagged_sw_serial") == ["mdmdmd"] * 2
    assert two_ranks.run(_order, "jagged_prefetch_sparse_dist") == ["mmmddd"] * 2


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (kinds.with_parameters, "by 'weights', which holds parameters (inner.weight)"),
        (kinds.twice, "by 'move', which is called 2 times in one forward"),
        (kinds.shares, "by 'parts', which shares modules with 'parts.inner', that is called too"),
        (kinds.in_list, "by 'choose', whose own arguments are not found"),
        (kinds.container, "its input (keyed_jagged_tensor) is computed in the forward, not"),
        (kinds.of_embeddings, "by 'tables.0', whose embeddings come after the exchange"),
        (kinds.reads_before, "module 'scales' changes its input, and runs ahead of the forward"),
        (kinds.reads_before_rebound, "module 'rebinds' changes its input, and runs ahead"),
    ],
)
def test_a_module_that_may_not_run_ahead_is_named(two_ranks: Ranks, kind: Kind, says: str) -> None:
    """Every rank names it, with the reason, at the first batch."""
    for said in two_ranks.run(AHEAD, kind):
        assert said.startswith("RewriteError: ")
        assert says in said


def test_the_option_is_named_where_it_would_help(two_ranks: Ranks) -> None:
    """Without it nothing runs ahead."""
    for said in two_ranks.run(refused, kinds.one):
        named = "tables.0: its input (getattr_2) is computed in the forward by 'augment', a module"
        assert named in said
        assert "pipeline_postproc=True" in said


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        (EXACT[0], kinds.flagged, "module 'move': its result for batch.ids was computed ahead"),
        (EXACT[1], kinds.skips, "module 'tables.0': its input move(...) was exchanged"),
        (EXACT[2], kinds.replaces_part, "module 'augment': its result for batch was computed ahe"),
        (EXACT[3], kinds.autocasts, "the forward calls it in another autocast mode"),
    ],
)
def test_a_forward_that_does_otherwise_later_is_refused(
    two_ranks: Ranks, kind: Kind, says: str, name: str
) -> None:
    """Examples are another argument, another input, a replaced part of the batch, another mode."""
    for said in two_ranks.run(AHEAD, kind, name, 2):
        assert says in said
    assert two_ranks.run(AHEAD, kind, name) == ["nothing raised"] * 2


def _changed(name: str, drained: bool, of: str) -> list[str]:
    """Return the error after 2 batches and a change of a module from outside."""
    model = computing(kinds.each)
    with _made(name, model) as pipeline:
        data = batches(7)
        for _ in range(2):
            pipeline.progress(data)
        if drained:
            pipeline.drain()
        if of == "move":
            model.module.move.ran.zero_()
        else:
            model.module.parts.inner.by = 11
        return [refusal(partial(pipeline.progress, data)), refusal(pipeline.drain)]


@pytest.mark.parametrize(
    ("name", "drained", "of", "exact"),
    [
        (EXACT[0], False, "move", True),
        (EXACT[1], False, "parts.inner", False),
        (EXACT[3], False, "move", False),
        (EXACT[3], True, "move", True),
    ],
)
def test_a_change_from_outside_comes_too_late_for_batches_in_flight(
    two_ranks: Ranks, name: str, drained: bool, of: str, exact: bool
) -> None:
    """A buffer or a number changes; ``drain`` first, or one batch at a time, are exact."""
    late = f"a buffer or attribute of module {of!r} was changed from outside"
    for found in two_ranks.run(_changed, name, drained, of):
        for said in found:
            assert (said == "nothing raised") if exact else (late in said)


def _hooked() -> str:
    def change(model: Any) -> None:
        model.augment.register_forward_hook(lambda _, args, out: replace(out, ids=args[0].ids))

    return AHEAD(kinds.one, change=change)


def test_a_hook_that_changes_the_result_is_noticed(two_ranks: Ranks) -> None:
    """Hooks run in the model's forward, after the exchange."""
    for said in two_ranks.run(_hooked):
        assert "module 'tables.0': its input augment(...).ids was exchanged" in said


def _lenient() -> tuple[str, dict[str, list[str]]]:
    found = _different(kinds.in_list, EXACT[3:], strict=False)
    with _made(EXACT[1], computing(kinds.in_list), strict=False) as pipeline:
        to_the_end(pipeline, batches(1))
        return str(pipeline.report), found


def test_without_strict_what_may_not_run_ahead_runs_in_the_forward(two_ranks: Ranks) -> None:
    """The report says so; modules that only unpipelined tables need do not run ahead."""
    for report, found in two_ranks.run(_lenient):
        assert found == {}
        assert "tables.0 (ShardedEmbeddingBagCollection) NOT pipelined" in report
        assert "tables.1 (ShardedEmbeddingBagCollection) pipelined: batch.ids" in report
        assert "computed ahead" not in report


def _left_out() -> list[int]:
    """Return how many outputs are finite and not those of the cached batch."""
    counts = []
    with _made("jagged_split_sparse_dist", computing(kinds.chain)) as pipeline:
        for task in ("H2DAndShuffle", POSTPROC, "EmbInputDistStart", "DenseForward"):
            outputs = to_the_end(pipeline, batches(1))
            pipeline.pipe.enable_shortcut(task)
            outputs += to_the_end(pipeline, batches(3, seed=2))
            pipeline.pipe.disable_shortcut()
            outputs += to_the_end(pipeline, batches(1))
            counts.append(sum(bool(torch.isfinite(output).all()) for output in outputs))
    return counts


def test_tasks_can_be_left_out(two_ranks: Ranks) -> None:
    """Results, exchanges and batches of another iteration are replayed without a false alarm."""
    assert two_ranks.run(_left_out) == [[5] * 4] * 2
