"""The configuration of one training job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the click model. The defaults are modest: they suit two CPU cores.

    Attributes:
        buckets: Rows of each of the 26 embedding tables, into which the ids are hashed.
        embedding_dim: Width of an embedding.
        bottom_layers: Hidden widths of the network over the 13 integers.
        cross_layers: Layers of the cross network, in which the features interact.
        cross_rank: Rank of each cross layer's matrix.
        top_layers: Hidden widths of the network that ends in the logit.
        learning_rate: Of Adagrad, for all parameters.
    """

    buckets: int = 4096
    embedding_dim: int = 8
    bottom_layers: tuple[int, ...] = (64,)
    cross_layers: int = 1
    cross_rank: int = 16
    top_layers: tuple[int, ...] = (64,)
    learning_rate: float = 0.03

    def __post_init__(self) -> None:
        wrong = [
            f"{name} {size}"
            for name, given in asdict(self).items()
            for size in (given if isinstance(given, tuple) else (given,))
            if name != "learning_rate" and size < 1
        ]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: the sizes of a model are 1 or more")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}: it must be above 0")


@dataclass(frozen=True, slots=True)
class ClickConfig:
    """One job. Two jobs of the same configuration give the same results, bit for bit.

    Attributes:
        data: Click logs to train on, in order; repeated where there are more steps than batches.
        held_out: Click logs to evaluate on.
        batch_size: Rows per step, malformed ones included.
        device: Where the model lives, in torch's words.
        seed: Of the model's first parameters.
        strict: The first malformed row is an error; otherwise such rows are dropped and reported.
        model: The model's sizes.
    """

    data: Sequence[str | Path]
    held_out: Sequence[str | Path] = ()
    batch_size: int = 2048
    device: str = "cpu"
    seed: int = 0
    strict: bool = False
    model: ModelConfig = ModelConfig()
