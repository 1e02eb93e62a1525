"""``assert_same_numbers`` finds and names what a check of operators cannot see."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import swpipe
from swpipe.testing import Loop, assert_same_numbers
from swpipe.testing.compared_values import first_unequal, leaves_by_name

BATCHES = 8


class Job:
    """A model that learns from scaled batches; the scale is a Python number."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scale = 1.0

    def batches(self) -> Iterator[Tensor]:
        draws = torch.Generator().manual_seed(1)
        for _ in range(BATCHES):
            yield torch.rand(2, 3, generator=draws) * self.scale

    def train(self, ctx: Any) -> None:
        ctx.loss = self.model(ctx.x).square().sum()
        self.optimizer.zero_grad()
        ctx.loss.backward()
        self.optimizer.step()

    def loop(self, decode: Any, **options: Any) -> Loop:
        options = {"loader": list(self.batches()), **options}
        return Loop(
            tasks=[swpipe.PipelineTask("decode", decode, pure=True), self.train],
            state=lambda: {"model": self.model, "optimizer": self.optimizer},
            **options,
        )


def test_a_tensor_of_another_type_differs_whatever_its_bits() -> None:
    """Zeros of floating-point numbers and of integers have the same bits."""
    zeros = torch.zeros(2)
    assert first_unequal({"x": zeros}, {"x": zeros.clone()}) is None
    assert first_unequal({"x": zeros}, {"x": torch.zeros(2, dtype=torch.int32)}) is not None


def test_an_overlapped_loop_that_ends_early_is_told() -> None:
    """Its loader is an iterator, which the plain loop has used up."""
    job = Job()
    used_up = job.batches()

    def make() -> Loop:
        return job.loop(lambda ctx: setattr(ctx, "x", ctx.batch), loader=used_up, pull_ahead=True)

    with pytest.raises(AssertionError, match=r"iteration 0: ctx\.batch .*, overlapped nothing\."):
        assert_same_numbers(make)


def test_an_honest_loop_passes() -> None:
    """Random tasks, and draws of the others, are the same in both runs."""

    def make() -> Loop:
        job, noise = Job(), nn.Dropout(0.5)

        def blur(ctx: Any) -> None:
            ctx.x = ctx.batch + torch.rand(2, 3)

        def drop(ctx: Any) -> None:
            ctx.x = noise(ctx.x)

        tasks = [swpipe.PipelineTask("blur", blur, pure=True, random=True), drop, job.train]
        return Loop(list(job.batches()), tasks, lambda: [job.model, job.optimizer])

    assert_same_numbers(make)


def test_both_runs_begin_with_the_same_random_states() -> None:
    """They are of torch, Python and numpy: ``make_loop`` need not seed anything."""

    def make() -> Loop:
        job = Job()
        torch.rand(random.randrange(9))  # whatever has been drawn before

        def decode(ctx: Any) -> None:
            ctx.x = ctx.batch

        loop = job.loop(decode, loader=[torch.rand(2, 3), torch.rand(2, 3)])
        drawn = [torch.rand(3), random.random(), np.random.rand()]
        return Loop(loop.loader, loop.tasks, lambda: [job.model, drawn])

    torch.seed()
    assert_same_numbers(make)


def test_a_lie_about_a_python_value_is_found() -> None:
    """No operator shows it: the iteration, the attribute and the element are named."""

    def make() -> Loop:
        job = Job()

        def decode(ctx: Any) -> None:
            ctx.x = ctx.batch * job.scale

        def body(ctx: Any) -> None:
            if ctx.iter_idx >= 3:
                job.scale += 1

        return job.loop(decode, body=body)

    said = r"iteration [4-7]: ctx\.x\[0, 0\] differs: plainly \d\.\d+, overlapped \d\.\d+\. A pure"
    with pytest.raises(AssertionError, match=said):
        assert_same_numbers(make)
    assert_same_numbers(make, iterations=4)


def test_a_lie_about_the_loader_is_found() -> None:
    """``pull_ahead=True`` says that it does not read what the loop changes."""

    def make() -> Loop:
        job = Job()

        def decode(ctx: Any) -> None:
            ctx.x = ctx.batch + 1

        def body(ctx: Any) -> None:
            job.scale += 1

        return job.loop(decode, loader=job.batches(), body=body, pull_ahead=True)

    with pytest.raises(AssertionError, match=r"iteration [1-7]: ctx\.batch\[0, 0\] differs"):
        assert_same_numbers(make)


def test_what_a_pure_task_changes_is_found_in_the_state() -> None:
    """The state has its path."""

    def make() -> Loop:
        job, counts = Job(), {"seen": [0]}

        def decode(ctx: Any) -> None:
            ctx.x = ctx.batch
            counts["seen"][0] += 1

        loop = job.loop(decode)
        return Loop(loop.loader, loop.tasks, lambda: [job.model, counts])

    said = r"iteration \d: state\(\)\[1\]\['seen'\]\[0\] differs: plainly \d, overlapped \d\."
    with pytest.raises(AssertionError, match=said):
        assert_same_numbers(make)


def on_main_thread() -> bool:
    """Return whether nothing runs ahead here, so that a test does not depend on timing."""
    return threading.current_thread() is threading.main_thread()


def jagged(*rows: list[float]) -> Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@dataclass
class Batch:
    rows: Tensor
    name: str


NESTED = jagged([1.0, 2.0], [-0.0])
NOT_COMPARED = [torch.tensor([float("nan")]), float("nan"), object(), print, Batch]


@pytest.mark.parametrize(
    ("plain", "ahead", "place"),
    [
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), ("y", (1,))),
        (torch.tensor(1.0), torch.tensor(2.0), ("y", ())),
        (torch.zeros(2), torch.zeros(3), ("y", ())),
        (torch.zeros(2), torch.zeros(2).double(), ("y", ())),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), ("y", ())),
        (np.zeros(2), np.array([0.0, 1.0]), ("y", ())),
        (Batch(torch.ones(2), "a"), Batch(torch.ones(2), "b"), ("y['name']", ())),
        ({"a": 1}, {"b": 1}, ("y['a']", ())),
        (1, True, ("y", ())),
        (NESTED, jagged([1.0, 2.0], [0.0]), ("y", ())),
        (NESTED, jagged([1.0], [2.0, -0.0]), ("y", ())),
        (NESTED, jagged([1.0, 2.0], [-0.0], [3.0]), ("y", ())),
        (NESTED, torch.tensor([[1.0, 2.0], [-0.0, 0.0]]), ("y", ())),
        (NESTED, jagged([1.0, 2.0], [-0.0]), None),  # ragged sizes are new symbols in each
        (NOT_COMPARED, [torch.tensor([float("nan")]), float("nan"), object(), max, Batch], None),
    ],
)
def test_a_difference_of_any_kind_is_told(plain: Any, ahead: Any, place: Any) -> None:
    """Bits of tensors, arrays, fields of dataclasses, keys, types; NaN equals NaN."""
    found = first_unequal(leaves_by_name({"y": plain}), leaves_by_name({"y": ahead}))
    assert (found and found[:2]) == place


@pytest.mark.parametrize(
    ("plain", "ahead", "said"),
    [
        ({"a": 1}, {"b": 1}, r"ctx\.y\['a'\] differs: plainly 1, overlapped nothing"),
        (1, True, r"ctx\.y differs: plainly 1, overlapped True"),
    ],
)
def test_both_values_are_told(plain: Any, ahead: Any, said: str) -> None:
    """The message has the iteration, and a possible cause."""

    def make() -> Loop:
        def decode(ctx: Any) -> None:
            ctx.x = ctx.batch
            ctx.y = plain if on_main_thread() else ahead

        return Job().loop(decode)

    with pytest.raises(AssertionError, match=f"iteration 0: {said}.*A pure task or the loader"):
        assert_same_numbers(make)


def test_another_number_of_iterations_is_told() -> None:
    """A loader ends early on the thread of a plain loop; five pulls are made there anyway."""

    def make() -> Loop:
        job = Job()

        def batches() -> Iterator[Tensor]:
            for number, batch in enumerate(job.batches()):
                if number == 6 and on_main_thread():
                    return
                yield batch

        def decode(ctx: Any) -> None:
            ctx.x = ctx.batch

        return job.loop(decode, loader=batches(), pull_ahead=True)

    with pytest.raises(AssertionError, match=r"iteration 6: ctx\.batch differs: plainly nothing"):
        assert_same_numbers(make)
