"""What we take from TorchRec, imported without the noise that its import makes.

Importing TorchRec and fbgemm warns of parts of theirs that have moved; nothing of that concerns our
user.
"""

from __future__ import annotations

import logging
import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    from torchmetrics.classification import BinaryAUROC
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.models.dlrm import DLRM_DCN
    from torchrec.streamable import Pipelineable

__all__ = [
    "DLRM_DCN",
    "BinaryAUROC",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "KeyedJaggedTensor",
    "Pipelineable",
]
