"""A small GPT, whole or in chunks of consecutive layers, that layer schedules can run.

Its feed-forward networks are MLPs or mixtures of experts:

    tokens (N, H) -> route: the k best of E experts each; N·k rows, those for expert 0 first
                  -> exchange: each rank gets the rows for its experts, by rank, then by expert
                  -> experts of this rank
                  -> exchange back -> merge: N tokens, weighted sums of k rows

The counts of rows are exchanged first, which ``route`` starts. Between start and wait of an
exchange there is a handle, so that other work overlaps with it, on a CPU too.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from swpipe.tasks.transformer import Linear, Routed, TransformerModelChunkSchedulePlan


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes of the whole model. ``layer_types`` has "dense" or "moe" for each layer."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_sequence_length: int
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
    ep_overlap_early_attn_memory_release: bool = False
    seed: int = 0


# --------------------------------------------------------------------------------------- experts


@dataclass
class PendingExchange:
    """Rows that are being exchanged: where they arrive, what is sent, and the collective."""

    received: torch.Tensor
    sent: torch.Tensor
    handle: dist.Work | None = None

    def wait(self):
        """Wait for the rows, and return them."""
        if self.handle is not None:
            self.handle.wait()
        return self.received


def start_exchange(rows, receive, send, group):
    """Begin to send rows to each rank; ``receive`` and ``send`` are their numbers."""
    rows = rows.detach()
    if len(send) == 1:
        return PendingExchange(rows, rows)
    rows = rows.contiguous()
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    handle = dist.all_to_all_single(received, rows, receive, send, group=group, async_op=True)
    return PendingExchange(received, rows, handle)


class Routing:
    """The places that rows go to: ``order`` sorts tokens x k; ``sent`` counts, (ranks, experts)."""

    def __init__(self, order, sent, counts, group):
        self.order, self.sent, self.counts, self.group = order, sent, counts, group
        self.tensors = (order,)
        self._received = None

    @property
    def received(self):
        """The counts of the rows that come, like ``sent``; waits for them."""
        if self._received is None:
            self._received = self.counts.wait().tolist()
        return self._received

    def start(self, rows, *, to_experts):
        """Send rows to the experts, or back from them."""
        here, there = (list(map(sum, counts)) for counts in (self.received, self.sent))
        if not to_experts:
            here, there = there, here
        return start_exchange(rows, here, there, self.group)


class Exchange(torch.autograd.Function):
    """An exchange that is waited for at once; its gradient is exchanged back."""

    @staticmethod
    def forward(ctx, rows, routing, to_experts):
        ctx.routing, ctx.to_experts = routing, to_experts
        received = routing.start(rows, to_experts=to_experts).wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx, grad):
        return ctx.routing.start(grad, to_experts=not ctx.to_experts).wait(), None, None


class Mlp(nn.Module):
    def __init__(self, size, inner):
        super().__init__()
        self.fc1, self.fc2 = Linear(size, inner), Linear(inner, size)

    def forward(self, hidden):
        return self.fc2(functional.gelu(self.fc1(hidden)))


class MixtureOfExperts(nn.Module):
    """The router, this rank's experts, and the shared expert where there is one."""

    def __init__(self, config, group=None):
        super().__init__()
        self.group, self.topk, self.num_experts = group, config.moe_router_topk, config.num_experts
        self.ranks = 1 if group is None else dist.get_world_size(group)
        if self.num_experts % self.ranks:
            raise ValueError(f"{self.num_experts} experts cannot be shared by {self.ranks} ranks")
        self.local = self.num_experts // self.ranks
        first = 0 if group is None else dist.get_rank(group) * self.local
        inner = config.moe_ffn_hidden_size or 4 * config.hidden_size
        shared = config.moe_shared_expert_size
        self.router = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        self.experts = nn.ModuleDict(
            {str(n): Mlp(config.hidden_size, inner) for n in range(first, first + self.local)}
        )
        self.shared_expert = None if shared is None else Mlp(config.hidden_size, shared)

    def route(self, hidden, padding_mask=None):
        """Return rows (N·k, hidden), weights (N, k), 0 for padding, and where the rows go."""
        flat = hidden.flatten(0, 1)
        probabilities = functional.softmax(self.router(flat).float(), dim=-1).to(flat.dtype)
        weights, chosen = probabilities.topk(self.topk, dim=-1)
        if padding_mask is not None:
            weights = weights.masked_fill(padding_mask.flatten()[:, None], 0.0)
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts).view(-1, self.local)
        each = [1] * self.ranks
        pending = start_exchange(counts, each, each, self.group)
        # A permutation, not a selection: the sum over a token's rows has a fixed order.
        rows = flat.unsqueeze(1).expand(-1, self.topk, -1).flatten(0, 1)[order]
        return rows, weights, Routing(order, counts.tolist(), pending, self.group)

    def compute(self, rows, routing):
        """Pass each row through its expert; rows come and leave by rank, then by expert."""
        parts = torch.split(rows, [count for counts in routing.received for count in counts])
        done = []
        for number, expert in enumerate(self.experts.values()):
            mine = parts[number :: self.local]
            done.append(torch.split(expert(torch.cat(mine)), [len(part) for part in mine]))
        return torch.cat([part for source in zip(*done, strict=True) for part in source])

    def merge(self, rows, weights, routing):
        """Return for each token the weighted sum of its rows, (N, hidden)."""
        places = torch.empty_like(routing.order)
        places[routing.order] = torch.arange(len(places), device=places.device)
        by_token = rows[places].view(*weights.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1)


# ---------------------------------------------------------------------------------------- layers


class SelfAttention(nn.Module):
    """Scaled dot-product attention with several heads; causal without a mask.

    The mask is True where a key is hidden from a query, as in Megatron.
    """

    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, mask=None):
        batch, length, size = hidden.shape
        # (batch, sequence, 3 x hidden) to three of (batch, heads, sequence, hidden / heads)
        split = self.qkv(hidden).view(batch, length, 3, self.heads, size // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=None if mask is None else ~mask, is_causal=mask is None
        )
        return self.proj(attended.transpose(1, 2).reshape(batch, length, size))


class TransformerLayer(nn.Module):
    """A layer with a norm before each half and a residual around it, for layer schedules."""

    def __init__(self, config, group=None):
        super().__init__()
        self.config = config
        self.input_norm = nn.LayerNorm(config.hidden_size)
        self.self_attention = SelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = self.make_mlp(group)

    def make_mlp(self, group):
        return Mlp(self.config.hidden_size, 4 * self.config.hidden_size)

    def attend(self, hidden, mask=None):
        return hidden + self.self_attention(self.input_norm(hidden), mask)

    def feed_forward(self, hidden, padding_mask=None):
        return hidden + self.mlp(self.mlp_norm(hidden))

    def forward(self, hidden, mask=None, *rest):
        return self.feed_forward(self.attend(hidden, mask), *rest)


class MoeTransformerLayer(TransformerLayer):
    """A layer with experts on the ranks of a group, and the further methods for schedules."""

    def make_mlp(self, group):
        self.expert_group = group
        return MixtureOfExperts(self.config, group)

    def route(self, hidden, padding_mask=None):
        normed = self.mlp_norm(hidden)
        rows, weights, routing = self.mlp.route(normed, padding_mask)
        return Routed(
            rows, weights, normed if self.mlp.shared_expert is not None else None, routing
        )

    def through_experts(self, rows, normed, routing):
        shared = None if normed is None else self.mlp.shared_expert(normed)
        return self.mlp.compute(rows, routing), shared

    def merge(self, rows, weights, shared, hidden, routing):
        merged = self.mlp.merge(rows, weights, routing).view(hidden.shape)
        return hidden + (merged if shared is None else merged + shared)

    def feed_forward(self, hidden, padding_mask=None):
        rows, weights, normed, routing = self.route(hidden, padding_mask)
        rows, shared = self.through_experts(Exchange.apply(rows, routing, True), normed, routing)
        return self.merge(Exchange.apply(rows, routing, False), weights, shared, hidden, routing)


LAYERS = {"dense": TransformerLayer, "moe": MoeTransformerLayer}


class MultiTokenPredictionLayer(nn.Module):
    """A further layer that predicts the token after the next.

    Layer k (from 0) sees the hidden state of the layer before it, and the embedding of the token
    that is k + 1 further on (DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", section 2.2).
    """

    def __init__(self, config, number, group=None):
        super().__init__()
        self.number = number
        self.enorm, self.hnorm = (nn.LayerNorm(config.hidden_size) for _ in "eh")
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.transformer_layer = LAYERS[config.mtp_layer_type](config, group)
        self.final_norm = nn.LayerNorm(config.hidden_size)

    def attend(self, hidden, embedded, mask=None):
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        return self.transformer_layer.attend(self.eh_proj(joined), mask)

    def moved(self, values):
        steps = self.number + 1
        return functional.pad(values[:, steps:], (0, min(steps, values.shape[1])))

    def forward(self, hidden, embedded, mask=None, *rest):
        return self.transformer_layer.feed_forward(self.attend(hidden, embedded, mask), *rest)


# ----------------------------------------------------------------------------------------- model


class GPTModel(nn.Module):
    """Some consecutive layers, and on request the model's beginning and its end.

    Parameters have the names and initial values of the whole model's: chunks that are made on
    different ranks are the parts of one model, bit for bit.
    """

    def __init__(
        self,
        config,
        layers=None,
        *,
        pre_process=True,
        post_process=True,
        expert_group=None,
        vp_stage=None,
        device=None,
    ):
        super().__init__()
        self.config, self.pre_process, self.post_process = config, pre_process, post_process
        self.expert_group, self.vp_stage = expert_group, vp_stage
        self.share_embeddings_and_output_weights = config.tie_embeddings
        if post_process and not pre_process and (config.tie_embeddings or config.mtp_num_layers):
            raise ValueError("tie_embeddings and mtp_num_layers need the embedding in the chunk")
        types = config.layer_types or ("dense",) * config.num_layers
        size = config.hidden_size
        with torch.device("meta"):  # where the layers' own initial values cost nothing
            if pre_process:
                self.word = nn.Embedding(config.vocab_size, size)
                self.position = nn.Embedding(config.max_sequence_length, size)
            self.layers = nn.ModuleDict(
                {
                    str(number): LAYERS[types[number]](config, expert_group)
                    for number in (range(config.num_layers) if layers is None else layers)
                }
            )
            self.mtp = nn.ModuleList(
                MultiTokenPredictionLayer(config, number, expert_group)
                for number in range(config.mtp_num_layers if post_process else 0)
            )
            if post_process:
                self.final_norm = nn.LayerNorm(size)
                if not config.tie_embeddings:
                    self.output_layer = nn.Linear(size, config.vocab_size, bias=False)
        self.to_empty(device=device or torch.get_default_device())
        self.init_parameters()

    @torch.no_grad()
    def init_parameters(self):
        """Set biases to 0, weights of norms to 1; draw others by seed and global name."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                digest = hashlib.sha256(f"{self.config.seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                drawn = torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
                parameter.copy_(drawn)

    @property
    def decoder_layers(self):
        return list(self.layers.values())

    @property
    def predictors(self):
        return list(self.mtp)

    def forward(
        self,
        inputs,
        position_ids=None,
        attention_mask=None,
        labels=None,
        loss_mask=None,
        padding_mask=None,
    ):
        """Return logits, or with labels the loss of each token, (batch, sequence).

        A chunk without the output layer returns hidden states. ``inputs`` are ids, or what the
        previous chunk has returned.
        """
        hidden = self.embed(inputs, position_ids) if self.pre_process else inputs
        for layer in self.decoder_layers:
            hidden = layer(hidden, attention_mask, padding_mask)
        if not self.post_process:
            return hidden
        further, last = [], hidden
        for mtp in self.predictors if labels is not None else ():
            embedded = self.embed(mtp.moved(inputs), position_ids)
            last = mtp(last, embedded, attention_mask, padding_mask)
            further.append(self.further_losses(mtp, last, labels, loss_mask))
        return self.output(hidden, labels, loss_mask, further)

    def embed(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.word(input_ids) + self.position(position_ids)

    def further_losses(self, mtp, hidden, labels, loss_mask=None):
        """Return the losses; the last positions, whose token to predict is unknown, add nothing."""
        mask = torch.ones_like(labels, dtype=hidden.dtype) if loss_mask is None else loss_mask
        losses = token_losses(self.logits(mtp.final_norm(hidden)), mtp.moved(labels))
        weight = self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers
        return losses * mtp.moved(mask) * weight

    def output(self, hidden, labels=None, loss_mask=None, further=()):
        logits = self.logits(self.final_norm(hidden))
        if labels is None:
            return logits
        losses = token_losses(logits, labels)
        if loss_mask is not None:
            losses = losses * loss_mask
        for more in further:
            losses = losses + more
        return losses

    def logits(self, hidden):
        layer = self.word if self.config.tie_embeddings else self.output_layer
        return functional.linear(hidden, layer.weight)

    def build_schedule_plan(self, *args, **more):
        """Return the nodes of this chunk for one microbatch; Megatron calls it by this name."""
        return TransformerModelChunkSchedulePlan(self, *args, **more)


def token_losses(logits, labels):
    """Return the cross entropy of each token, (batch, sequence), from logits (..., vocabulary)."""
    flat = functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="none"
    )
    return flat.view(labels.shape)


def mean_loss(logits, labels):
    """Return the mean of ``token_losses``, for a pipeline's last stage."""
    return token_losses(logits, labels).mean()
