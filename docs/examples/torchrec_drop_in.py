"""A sharded model trained by a pipeline's name: alone, or under torchrun --nproc-per-node N."""

import os
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from swpipe.tasks.torchrec import PipelineFactory

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of TorchRec
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.optimizers import in_backward_optimizer_filter

FEATURES, ROWS, DIM, USERS = ["item", "shop"], 100_000, 32, 16


@dataclass
class Batch:
    ids: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device, non_blocking=False):
        return Batch(
            self.ids.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream):
        self.ids.record_stream(stream)
        self.labels.record_stream(stream)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"{name}_table", feature_names=[name], num_embeddings=ROWS, embedding_dim=DIM
            )
            for name in FEATURES
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.top = nn.Linear(DIM * len(FEATURES), 1)

    def forward(self, batch):
        logits = self.top(self.tables(batch.ids).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


def batches(count):
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        lengths = torch.randint(0, 5, (len(FEATURES) * USERS,), generator=draws)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draws)
        labels = (torch.rand(USERS, generator=draws) < 0.3).float()
        yield Batch(KeyedJaggedTensor.from_lengths_sync(FEATURES, ids, lengths), labels)


torch.manual_seed(0)
if "RANK" in os.environ:  # under torchrun
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

model = Model()
apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.1})
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    model = DistributedModelParallel(model, device=torch.device("cpu"))
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
optimizer = torch.optim.SGD(dense.values(), lr=0.1)

with PipelineFactory.create(
    "jagged_prefetch_sparse_dist", model=model, optimizer=optimizer, device="cpu"
) as pipeline:
    data, outputs = batches(10), []
    while True:
        try:
            outputs.append(pipeline.progress(data))
        except StopIteration:
            break
    if dist.get_rank() == 0:
        print(f"{len(outputs)} batches on {dist.get_world_size()} rank(s)")
        print(*[str(module) for module in pipeline.report.modules], sep="\n")

assert len(outputs) == 10
dist.destroy_process_group()
