"""The sizes and kinds of a small GPT."""

from __future__ import annotations

from dataclasses import dataclass

from swpipe.core.messages import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """What a model is made of. The same on all ranks.

    Attributes:
        num_layers: How many decoder layers the whole model has, on all its chunks.
        hidden_size: Features of a token between layers.
        num_attention_heads: Must divide ``hidden_size``.
        vocab_size: How many different tokens there are; ids start at 0.
        max_sequence_length: The most tokens of a sequence.
        ffn_hidden_size: Features inside a layer's MLP; None for 4 x ``hidden_size``.
        seed: What all initial parameters derive from.

    Raises:
        ValueError: Sizes that do not fit; the message lists all of them.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_sequence_length: int
    ffn_hidden_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {shown(value)}: give a whole number, {least} or more"
            for name, value, least in self._counts()
            if type(value) is not int or value < least
        ]
        if not problems and self.hidden_size % self.num_attention_heads:
            problems.append(
                f"hidden_size is {self.hidden_size}: num_attention_heads, "
                f"{self.num_attention_heads}, must divide it"
            )
        if problems:
            raise ValueError("the transformer's config: " + "; ".join(problems))

    def _counts(self) -> list[tuple[str, object, int]]:
        counts = ("num_layers", "hidden_size", "num_attention_heads")
        sizes = ("vocab_size", "max_sequence_length")
        return [
            *((name, getattr(self, name), 1) for name in (*counts, *sizes)),
            ("ffn_hidden_size", self.ffn_size, 1),
            ("seed", self.seed, 0),
        ]

    @property
    def ffn_size(self) -> int:
        """Features inside a layer's MLP."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size
