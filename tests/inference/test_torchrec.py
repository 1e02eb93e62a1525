"""Recordings of TorchRec's containers and models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.inference.helpers import orders, reads, recorded, writes

torchrec = pytest.importorskip("torchrec")


def ids() -> Any:
    """Two features of two rows."""
    return torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b"],
        values=torch.tensor([0, 1, 2, 0, 1]),
        lengths=torch.tensor([1, 2, 1, 1]),
    )


def test_a_keyed_jagged_tensor_that_computes_offsets_is_not_modified() -> None:
    """Offsets computed on demand are no change; overwritten values are."""

    def ask(ctx: Any) -> None:
        ctx.total = ctx.batch.offsets()[-1] + ctx.batch.length_per_key()[0]

    def overwrite(ctx: Any) -> None:
        ctx.batch.values().zero_()

    batch = ids()
    found = recorded(ask, overwrite, batch=batch)
    assert writes(found, "ask") == {"ctx.total"}
    assert writes(found, "overwrite") == {"ctx.batch"}
    assert ("overwrite", "ask", 0) in orders(found)
    assert batch.values().tolist() == [0, 1, 2, 0, 1]


def test_an_embedding_bag_collection_is_read_and_trained() -> None:
    """The tables are named."""
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"t_{name}", feature_names=[name], num_embeddings=4, embedding_dim=2
        )
        for name in ("a", "b")
    ]
    model = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(ctx: Any) -> None:
        ctx.loss = model(ctx.batch).values().sum()

    def backward(ctx: Any) -> None:
        optimizer.zero_grad()
        ctx.loss.backward()

    def step(ctx: Any) -> None:
        optimizer.step()

    found = recorded(forward, backward, step, batch=ids())
    assert reads(found, "forward") == {"ctx.batch", "EmbeddingBagCollection parameters"}
    assert ("forward", "step", 1) in orders(found)
    assert set(found.states["EmbeddingBagCollection parameters"]) == {
        "EmbeddingBagCollection.embedding_bags.t_a.weight",
        "EmbeddingBagCollection.embedding_bags.t_b.weight",
    }
