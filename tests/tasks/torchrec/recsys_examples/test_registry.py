"""The factory of recsys-examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from swpipe.tasks.torchrec.recsys_examples import TrainPipelineFactory, register_train_pipeline
from tests.tasks.torchrec.recsys_examples.trainer import EXACT

NAMES = (*EXACT, "jagged_semi_sync_sparse_dist")
MODEL, DEVICE = nn.Linear(1, 1), torch.device("cpu")
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


class _Mine:
    """A pipeline of the user's, which keeps its arguments."""

    def __init__(self, **given: Any) -> None:
        self.given = given


@pytest.fixture
def registry() -> Iterator[type[TrainPipelineFactory]]:
    """The factory; what a test registers is removed after it."""
    before = TrainPipelineFactory.list_available()
    yield TrainPipelineFactory
    TrainPipelineFactory.clear_registry()
    for name, made in before.items():
        TrainPipelineFactory.register(name, made)


def test_the_names_are_those_of_recsys_examples(registry: type[TrainPipelineFactory]) -> None:
    """Its three, the serial one of its successor, and two of ours; the decorator adds to them."""
    assert tuple(registry.list_available()) == NAMES
    registry.list_available().clear()  # of a copy
    assert register_train_pipeline("mine")(_Mine) is _Mine
    assert registry.is_registered("mine")
    registry.unregister("mine")
    assert tuple(registry.list_available()) == NAMES
    registry.clear_registry()
    assert registry.list_available() == {}


def test_a_pipeline_is_created_by_name(registry: type[TrainPipelineFactory]) -> None:
    """Arguments are handed on, by position, by keyword, or from a configuration that stays."""
    registry.register("mine", _Mine)
    first, config = (MODEL, OPTIMIZER, DEVICE), {"type": "mine", "depth": 2}
    wanted = {"model": MODEL, "optimizer": OPTIMIZER, "device": DEVICE, "depth": 2}
    assert registry.create("mine", *first, depth=2).given == wanted
    assert registry.create("mine", **wanted).given == wanted
    assert registry.create_from_config(config, *first).given == wanted
    assert config == {"type": "mine", "depth": 2}


def test_wrong_names_are_refused_with_those_that_exist(
    registry: type[TrainPipelineFactory],
) -> None:
    """A KeyError as in recsys-examples, and a ValueError for a name that is taken."""
    for call in (
        lambda: registry.create("none", MODEL, OPTIMIZER, DEVICE),
        lambda: registry.unregister("none"),
        lambda: registry.create_from_config({"type": "none"}, MODEL, OPTIMIZER, DEVICE),
    ):
        with pytest.raises(KeyError, match=r"no pipeline is named 'none'; there are 'jagged_none'"):
            call()
    with pytest.raises(KeyError, match=r'needs the entry "type", one of .*; it has .*depth'):
        registry.create_from_config({"depth": 2}, MODEL, OPTIMIZER, DEVICE)
    with pytest.raises(ValueError, match=r"'jagged_none' is registered already"):
        registry.register("jagged_none", _Mine)
