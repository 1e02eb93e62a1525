"""A rewritten forward is called with exactly the exchanged input, or the call is refused.

The trace sees one batch in one mode. A model that chose another input later once got embeddings of
other ids than it had asked for, without an error.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from swpipe.tasks.torchrec.rewriting.exchanged import CallInputs, _same
from swpipe.tasks.torchrec.rewriting.forwards import Kind as Forward
from tests.support.ranks import Ranks
from tests.tasks.torchrec import computing as kinds
from tests.tasks.torchrec.computing import TWO, Kind, computing, refused
from tests.tasks.torchrec.models import BATCH, KeyedJaggedTensor, batches
from tests.tasks.torchrec.trial import EXACT, Outcome, by_torchrec, create, everything


@pytest.mark.parametrize(
    ("name", "forward", "kind"),
    [
        (EXACT[1], "pipelined", kinds.by_flag),
        (EXACT[2], "prefetch", kinds.by_flag),
        (EXACT[3], "split", kinds.by_keyword),
    ],
)
def test_another_input_than_the_exchanged_one_is_refused(
    two_ranks: Ranks, name: str, forward: Forward, kind: Kind
) -> None:
    """A flag changes the input at batch 2, also by keyword."""
    for said in two_ranks.run(partial(refused, kind, name, 2, forward=forward)):
        assert "module 'tables.0': its input batch.ids was exchanged" in said.replace(
            "features=", ""
        )
        assert "called with another one" in said
    assert two_ranks.run(partial(refused, kind, name, forward=forward)) == ["nothing raised"] * 2


def test_an_input_that_was_changed_in_place_is_refused(two_ranks: Ranks) -> None:
    """The unchanged ids have been exchanged."""
    for said in two_ranks.run(refused, kinds.changes, EXACT[0], 2):
        assert "which the forward has changed since" in said


def _rewrapped() -> list[str]:
    wanted = by_torchrec(TWO, batches(4), computing(kinds.by_flag))
    model = computing(kinds.rewraps)
    with create(EXACT[3], model, TWO) as pipeline:
        data, outputs = batches(4), []
        for step in range(4):
            model.module.flag = step == 0
            outputs.append(pipeline.progress(data))
    return Outcome(outputs, everything(model)).differences(wanted)


def test_the_same_ids_in_a_new_container_are_the_same_input(two_ranks: Ranks) -> None:
    """A property of the batch makes the container, or a wrapper that moves inputs."""
    assert two_ranks.run(_rewrapped) == [[], []]


def test_what_counts_as_the_same() -> None:
    """Memory and keys must be the same; equal values in other memory do not count."""
    ids = next(batches(1, rank=0)).ids
    weights = torch.rand(len(ids.values()))

    def made(**changed: Any) -> KeyedJaggedTensor:
        parts = {"keys": ids.keys(), "values": ids.values(), "weights": weights, **changed}
        return KeyedJaggedTensor(**{"lengths": ids.lengths(), **parts})

    assert _same(made(), made())
    assert not _same(made(), made(keys=ids.keys()[::-1]))
    assert not _same(made(), made(values=ids.values().clone()))
    assert not _same(made(), made(weights=weights.clone()))
    assert not _same(made(), made(weights=None))
    assert not _same(made(), made(lengths=ids.lengths().flip(0)))
    assert _same([made(), 3, {"a": None}], [made(), 3, {"a": None}])
    assert not _same([made(), 3], [made(), 4])
    assert not _same({"a": 1}, {"b": 1})
    assert _same([1, {"a": 2}], immutable_list([1, immutable_dict({"a": 2})]))
    assert not _same(weights[1:], weights[:-1])
    assert not _same(weights, weights.view(torch.int32))
    square = weights[:4].view(2, 2)
    assert not _same(square, square.t())
    assert not _same(made(), weights)


def test_what_counts_as_changed() -> None:
    """A tensor that was written to or replaced counts; one in the same memory does not."""

    def after(change: Any) -> bool:
        batch = next(batches(1, rank=0))
        inputs = CallInputs([batch], {"more": [batch.labels]})
        change(batch)
        return inputs.changed()

    assert not after(lambda batch: None)
    assert not after(lambda batch: setattr(batch, "dense", batch.dense.view(BATCH, -1)))
    assert not after(lambda batch: batch.ids.offsets())
    assert after(lambda batch: setattr(batch, "dense", batch.dense.clone()))
    assert after(lambda batch: batch.dense.mul_(2))
    assert after(lambda batch: batch.ids.values().add_(1))
