"""A small GPT, whole or in chunks for pipeline-parallel ranks."""

from swpipe.tasks.transformer.gpt import GPTModel, mean_loss, token_losses
from swpipe.tasks.transformer.transformer_config import TransformerConfig

__all__ = ["GPTModel", "TransformerConfig", "mean_loss", "token_losses"]
