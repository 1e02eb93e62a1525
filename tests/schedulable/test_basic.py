"""``SchedulablePipeline.basic`` gives the numbers of the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.schedulable import SchedulablePipeline
from tests.schedulable.work import results

Batch = tuple[Tensor, Tensor]

WAYS: dict[str, dict[str, Any]] = {
    "one thread": {},
    "prefetch": {"prefetch": True},
    "by_stream": {"threaded": True, "prefetch": True},
    "per_task": {"threaded": True, "thread_map": "per_task"},
    "dict": {
        "threaded": True,
        "prefetch": True,
        "thread_map": {
            "h2d": "io", "forward": "compute", "backward": "compute", "optimizer_step": "compute",
        },
    },
    "function": {
        "threaded": True,
        "thread_map": lambda task: "io" if task.stream == "memcpy" else "compute",
    },
}  # fmt: skip


class Loop:
    """A training loop with common additions: clipping, a schedule, autocast."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.05)
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(5, 6, generator=generator), torch.randn(5, 1, generator=generator))
            for _ in range(9)
        ]

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        inputs, targets = batch
        with torch.autocast("cpu", torch.bfloat16):
            return {"loss": (model(inputs) - targets).square().mean(), "inputs": inputs}

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.rates.step()

    def plain(self) -> list[Tensor]:
        losses = []
        for batch in self.batches:
            self.optimizer.zero_grad()
            loss = self.forward(self.model, batch)["loss"]
            loss.backward()
            self.step()
            losses.append(loss.detach())
        return losses


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_it_gives_the_numbers_of_the_plain_loop(way: str) -> None:
    """Losses and parameters are equal bit for bit, also with the users' hooks."""
    plain, ours = Loop(), Loop()
    losses = plain.plain()
    with SchedulablePipeline.basic(
        ours.model,
        ours.optimizer,
        memcpy_stream=True,
        forward_fn=ours.forward,
        backward_fn=lambda loss: loss.backward(),
        optimizer_step_fn=ours.step,
        **WAYS[way],
    ) as pipe:
        assert [*pipe.plan.schedule] == [
            "h2d",
            "zero_grad",
            "forward",
            "backward",
            "optimizer_step",
        ]
        found = [output["loss"].detach() for output in results(pipe, ours.batches[:6])]
        found += [pipe.step(batch)["loss"].detach() for batch in ours.batches[6:]]
    assert len(losses) == len(found)
    assert all(map(torch.equal, losses, found))
    assert all(map(torch.equal, plain.model.parameters(), ours.model.parameters()))


@pytest.mark.parametrize(
    ("returned", "loss_fn"),
    [
        (lambda x: x.sum(), None),
        (lambda x: (x.sum(), x), None),
        (lambda x: {"logits": x, "loss": x.sum()}, None),
        (lambda x: x, lambda out: out.sum()),
    ],
)
def test_the_loss_is_found_in_what_the_model_returns(returned: Any, loss_fn: Any) -> None:
    """Or ``loss_fn`` finds it; ``progress`` returns what the model returned."""

    class Model(nn.Linear):
        def forward(self, batch: Tensor) -> Any:
            return returned(super().forward(batch))

    model = Model(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with SchedulablePipeline.basic(model, optimizer, loss_fn=loss_fn) as pipe:
        output = pipe.step(torch.ones(3, 2))
    assert type(output) is type(returned(torch.ones(3)))
    assert model.weight.grad is not None


def test_batches_go_to_the_device_in_whatever_they_are_nested() -> None:
    """They are moved by ``to``; everything else stays. A model without a loss is an error."""

    class Slow:
        def __init__(self, moves: int = 0) -> None:
            self.moves = moves

        def to(self, device: torch.device, non_blocking: bool) -> Slow:
            assert (device.type, non_blocking) == ("cpu", True)
            return Slow(self.moves + 1)

    seen: list[Any] = []
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for returned in (None, (), {"logits": 1}, 3.0, (1, 2)):

        def forward(model: nn.Module, batch: Any, out: Any = returned) -> Any:
            seen.append(batch)
            return out

        with SchedulablePipeline.basic(model, optimizer, forward_fn=forward) as pipe:
            with pytest.raises(TypeError, match=r"no loss is found.*give basic\(\) a loss_fn"):
                pipe.step({"a": [Slow(), torch.ones(1)], "name": "x", "none": None})
    assert seen[0]["a"][0].moves == 1
    assert (seen[0]["name"], seen[0]["none"]) == ("x", None)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"threaded": True, "executor": "threaded"}, "leave one of them out"),
        ({"thread_map": "per_task"}, "without threaded=True"),
        ({"threaded": True, "thread_map": {"h2": "io"}}, "names task 'h2', which the schedule"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    fields: dict[str, Any], text: str
) -> None:
    """The error says what to do."""
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=text):
        SchedulablePipeline.basic(model, torch.optim.SGD(model.parameters(), 0.1), **fields)
