"""The click model and its config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swpipe.tasks.clicks.config import ModelConfig
from swpipe.tasks.clicks.decode import decode
from swpipe.tasks.clicks.encode import ClickBatch, encode
from swpipe.tasks.clicks.log import ClickLog
from swpipe.tasks.clicks.model import ClickModel, click_loss, make_optimizer

SMALL = ModelConfig(buckets=50, embedding_dim=4, bottom_layers=(8,), cross_rank=3, top_layers=(8,))


@pytest.fixture
def batch(small_log: Path) -> ClickBatch:
    """50 rows."""
    (spec,) = ClickLog([small_log], 50).batches()
    return encode(decode(small_log.read_bytes(), spec.ranges).frame, SMALL.buckets)


def test_a_row_has_a_logit(batch: ClickBatch) -> None:
    """One number per row."""
    logits = ClickModel(SMALL, seed=0)(batch)
    assert logits.shape == (50,)
    assert logits.dtype == torch.float32


def test_the_seed_fixes_the_model() -> None:
    """Equal seeds give equal parameters, bit for bit; another seed gives others."""
    a, b, c = (ClickModel(SMALL, seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, a.parameters(), b.parameters()))
    assert not all(map(torch.equal, a.parameters(), c.parameters()))


def test_making_a_model_leaves_the_generator_alone() -> None:
    """Who draws before and after draws as if no model had been made."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    ClickModel(SMALL, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_every_parameter_learns(batch: ClickBatch) -> None:
    """A step moves each of them: nothing hangs loose."""
    model = ClickModel(SMALL, seed=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = make_optimizer(list(model.parameters()), SMALL.learning_rate)
    for _ in range(
        2
    ):  # a cross layer that begins at zero moves its partner from the second step on
        optimizer.zero_grad()
        click_loss(model(batch), batch.labels).backward()
        optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_the_loss_is_the_mean_over_rows(batch: ClickBatch) -> None:
    """As torch works it out."""
    logits = ClickModel(SMALL, seed=0)(batch)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
    assert torch.allclose(click_loss(logits, batch.labels), expected)


def test_a_batch_without_rows_has_loss_zero_and_no_gradient(tmp_path: Path) -> None:
    """A mean over nothing would be NaN, and stop the training."""
    path = tmp_path / "malformed.tsv"
    path.write_text("not\na row\n")
    (spec,) = ClickLog([path], 2).batches()
    empty = encode(decode(path.read_bytes(), spec.ranges).frame, SMALL.buckets)
    model = ClickModel(SMALL, seed=0)
    loss = click_loss(model(empty), empty.labels)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"buckets": 0}, "buckets 0"),
        ({"embedding_dim": -1, "cross_rank": 0}, "embedding_dim -1, cross_rank 0"),
        ({"top_layers": (8, 0)}, "top_layers 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
    ],
)
def test_sizes_are_checked(sizes: dict[str, object], message: str) -> None:
    """All that is wrong is named."""
    with pytest.raises(ValueError, match=message):
        ModelConfig(**sizes)  # type: ignore[arg-type]
