"""Losses per token, and the values that ``progress`` reports of them.

::

                    returns="tokens"                        returns="reporting_loss"
    before forward  tokens of all ranks: all-reduce         -
    forward         losses, output                          losses, output
    LossPostprocess local sum                               sum and number of losses: all-reduce
    backward        local sum x ranks / tokens              local sum / number x ranks
    progress        (local sum, tokens, output)             ([sum, number], output)

"tokens" is the behaviour of the current version of recsys-examples, where the batch counts its own
tokens (``num_loss_tokens``); in evaluation they are None. "reporting_loss" is the behaviour of the
version before, which counts losses. ``ranks`` is the number of data-parallel ranks, over which DDP
and Megatron average the gradients. As in recsys-examples, "reporting_loss" always checks losses for
NaN, and "tokens" checks them if the environment has ``ASSERT_LOSS_HAS_NAN=1``.
"""

from __future__ import annotations

import os
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe.core.context import IterContext
from swpipe.core.messages import listed, shown
from swpipe.distributed import gather

Returns: TypeAlias = Literal["tokens", "reporting_loss"]


def collective_assert(
    flag: bool | Tensor, err_msg: str = "", group: dist.ProcessGroup | None = None
) -> None:
    """Raise on all ranks of a group unless ``flag`` is true on all of them; a collective.

    Raises:
        AssertionError: ``flag`` is false on some rank; the message says on which.
    """
    # Every rank raises, also where its own flag is true: a rank that continued would wait for the
    # others in its next collective.
    if places := [place for place, ok in enumerate(gather(bool(flag), group)) if not ok]:
        ranks = places if group is None else [dist.get_global_rank(group, p) for p in places]
        where = listed([*map(str, ranks)])
        raise AssertionError(f"{err_msg or 'collective_assert failed'} (on ranks {where})")


class PerToken:
    """The normalisation of losses per token, and the values that ``progress`` reports.

    Args:
        returns: The values that ``progress`` returns; see the module.
        group: The data-parallel ranks; None for all.
        assert_nan: Check losses for NaN, whatever the environment says.

    Raises:
        ValueError: ``returns`` is neither "tokens" nor "reporting_loss".
    """

    def __init__(
        self,
        returns: Returns = "tokens",
        group: dist.ProcessGroup | None = None,
        assert_nan: bool = False,
    ) -> None:
        if returns not in ("tokens", "reporting_loss"):
            raise ValueError(
                f"returns is {shown(returns)}; give 'tokens' for (loss, tokens, output), or "
                "'reporting_loss' for ([loss, tokens], output)"
            )
        self._by_batch = returns == "tokens"
        self._group = group
        self._alone = not dist.is_initialized()
        self._ranks = 1 if self._alone else dist.get_world_size(group)
        checks_nan = assert_nan or os.environ.get("ASSERT_LOSS_HAS_NAN", "0") == "1"
        self._checks_nan = checks_nan or not self._by_batch

    def count(self, batch: Any, device: torch.device) -> Tensor | None:
        """Return the tokens of all ranks, or None if losses are counted instead; a collective."""
        if not self._by_batch:
            return None
        if not hasattr(batch, "num_loss_tokens"):
            raise TypeError(
                f"a {type(batch).__name__} has no num_loss_tokens(), a tensor with the number of "
                "losses of this rank: add it, or give the pipeline returns='reporting_loss', which "
                "counts the losses that the model returns"
            )
        # A copy, since the all-reduce works in place and the batch may be used again.
        tokens: Tensor = batch.num_loss_tokens().to(device, copy=True)
        if not self._alone:
            dist.all_reduce(tokens)
        return tokens

    def report(self, ctx: IterContext) -> None:
        """Check, add and normalise the losses, and set what ``progress`` reports."""
        losses = ctx.losses
        tokens = ctx.tokens
        if not isinstance(losses, Tensor) or losses.ndim == 0:
            raise TypeError(
                f"the model returned {shown(losses)} as losses: return a tensor with one loss per "
                "token, not yet added or averaged"
            )
        if self._checks_nan:
            collective_assert(
                not torch.isnan(losses).any(), f"losses of batch {ctx.iter_idx} are NaN"
            )
        total = torch.sum(losses)
        if self._by_batch:
            ctx.output = total.detach(), tokens, ctx.output
            if ctx.training:
                # DDP averages gradients over the ranks, so the loss is multiplied by their number:
                # the average then is the sum over all ranks, divided by all tokens.
                ctx.loss = total * self._ranks / tokens
            return
        # Counted from the losses, since the batches of older recsys-examples do not count their
        # tokens.
        count = torch.tensor(losses.size(0), device=total.device, dtype=total.dtype)
        # One all-reduce for both numbers.
        reported = torch.stack([total.detach(), count])
        if not self._alone:
            dist.all_reduce(reported, group=self._group)
        ctx.output = reported, ctx.output
        if ctx.training:
            ctx.loss = total / reported[1] * self._ranks
