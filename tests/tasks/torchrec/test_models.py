"""The same numbers as TorchRec's unpipelined pipeline, on models of many kinds."""

from __future__ import annotations

import pytest
import torch

from swpipe.tasks.torchrec import PipelineFactory
from tests.support.ranks import Ranks
from tests.tasks.torchrec import zoo
from tests.tasks.torchrec.models import CPU, everything
from tests.tasks.torchrec.trial import EXACT, Outcome, TrainPipelineBase, to_the_end

from torchrec.optim.optimizers import in_backward_optimizer_filter  # isort: skip

STEPS = 6


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    named = in_backward_optimizer_filter(model.named_parameters())
    return torch.optim.Adam([parameter for _, parameter in named], lr=0.01)


def _differences(name: str) -> dict[str, list[str]]:
    model = zoo.sharded(name)
    theirs = TrainPipelineBase(model, _optimizer(model), CPU)
    wanted = Outcome(to_the_end(theirs, zoo.data(name, STEPS)), everything(model))
    found = {}
    for pipeline in EXACT:
        model = zoo.sharded(name)
        with PipelineFactory.create(
            pipeline, model=model, optimizer=_optimizer(model), device=CPU
        ) as ours:
            outcome = Outcome(to_the_end(ours, zoo.data(name, STEPS)), everything(model))
        if where := outcome.differences(wanted):
            found[pipeline] = where
    return found


def _report(name: str) -> str:
    model = zoo.sharded(name)
    with PipelineFactory.create(
        "jagged_split_sparse_dist", model=model, optimizer=_optimizer(model), device=CPU
    ) as pipeline:
        to_the_end(pipeline, zoo.data(name, 1))
        return str(pipeline.report)


def test_a_module_with_parameters_of_ddp_is_looked_up_with_the_dense_part(
    one_rank: Ranks,
) -> None:
    """The gradients of feature processors came after DDP's backward, and were lost."""
    assert "DDP reduces parameters of it" in one_rank.run(_report, "feature processors")[0]
    assert "DDP reduces" not in one_rank.run(_report, "weighted bags")[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in zoo.ZOO])
def test_models_of_many_kinds_on_two_ranks(two_ranks: Ranks, name: str) -> None:
    """Bit for bit, in every exact pipeline."""
    assert two_ranks.run(_differences, name) == [{}, {}]
