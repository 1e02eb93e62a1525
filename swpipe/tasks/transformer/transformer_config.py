"""The sizes and kinds of a small GPT."""

from __future__ import annotations

from dataclasses import dataclass

from swpipe.core.messages import shown

LAYER_TYPES = ("dense", "moe")
"""What a layer's feed-forward network is: one MLP, or a mixture of experts."""

_FROM_0 = ("mtp_num_layers", "seed")
_FROM_1 = (
    *("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_sequence_length"),
    *("num_experts", "moe_router_topk", "ffn_size", "moe_ffn_size"),
)


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
        layer_types: "dense" or "moe" for each layer; None for all dense.
        num_experts: How many experts a "moe" layer has, on all ranks of the expert group.
        moe_router_topk: How many experts compute each token.
        moe_ffn_hidden_size: Features inside an expert; None for those inside an MLP.
        moe_shared_expert_size: Features inside an expert for all tokens; None for no such expert.
        mtp_num_layers: How many layers for multi-token prediction follow the others.
        mtp_layer_type: "dense" or "moe".
        mtp_loss_scaling_factor: The weight of their losses: of each of L layers this / L.
        tie_embeddings: The output layer's weight is the word embedding's.
        delay_wgrad_compute: Schedules compute weight gradients of attention and MLPs later than
            their input gradients.
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
    layer_types: tuple[str, ...] | None = None
    num_experts: int = 1
    moe_router_topk: int = 1
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_size: int | None = None
    mtp_num_layers: int = 0
    mtp_layer_type: str = "dense"
    mtp_loss_scaling_factor: float = 0.1
    tie_embeddings: bool = False
    delay_wgrad_compute: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        counts = dict.fromkeys(_FROM_1, 1) | dict.fromkeys(_FROM_0, 0)
        if self.moe_shared_expert_size is not None:
            counts["moe_shared_expert_size"] = 1
        problems = [
            f"{name.replace('ffn_size', 'ffn_hidden_size')} is {shown(value)}: "
            f"give a whole number, {least} or more"
            for name, least in counts.items()
            if type(value := getattr(self, name)) is not int or value < least
        ]
        if problems := problems or self._misfits():
            raise ValueError("the transformer's config: " + "; ".join(problems))

    def _misfits(self) -> list[str]:
        """Values that do not fit each other."""
        heads, experts, kinds = self.num_attention_heads, self.num_experts, self.types
        unknown = [one for one in (*kinds, self.mtp_layer_type) if one not in LAYER_TYPES]
        checks = {
            f"hidden_size is {self.hidden_size}: num_attention_heads, {heads}, must divide it": (
                self.hidden_size % heads
            ),
            f"moe_router_topk is {self.moe_router_topk}: there are {experts} experts": (
                self.moe_router_topk > experts
            ),
            f"layer_types has {len(kinds)} entries: give {self.num_layers}, one for each layer": (
                len(kinds) != self.num_layers
            ),
            **{
                f"layer type {shown(one)} is unknown: give one of {', '.join(LAYER_TYPES)}": True
                for one in unknown
            },
        }
        return [told for told, wrong in checks.items() if wrong]

    @property
    def types(self) -> tuple[str, ...]:
        """The type of each layer."""
        return ("dense",) * self.num_layers if self.layer_types is None else tuple(self.layer_types)

    @property
    def ffn_size(self) -> int:
        """Features inside a layer's MLP."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def moe_ffn_size(self) -> int:
        """Features inside an expert."""
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size
