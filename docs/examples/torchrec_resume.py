"""A sharded training that is stopped in mid-flight and goes on, bit for bit."""

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from swpipe.loops import ResumableLoop
from swpipe.tasks.torchrec import PrefetchTrainPipelineSparseDist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of TorchRec
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

warnings.simplefilter("ignore", UserWarning)  # of torch about its checkpoints
warnings.simplefilter("ignore", FutureWarning)
CPU = torch.device("cpu")


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


class Clicks(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index)
        lengths = torch.randint(0, 5, (16,), generator=draws)
        ids = torch.randint(0, 1000, (int(lengths.sum()),), generator=draws)
        labels = (torch.rand(16, generator=draws) < 0.3).float()
        return Batch(KeyedJaggedTensor.from_lengths_sync(["item"], ids, lengths), labels)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        table = EmbeddingBagConfig(
            name="item_table", feature_names=["item"], num_embeddings=1000, embedding_dim=16
        )
        self.tables = EmbeddingBagCollection(tables=[table], device=CPU)
        self.top = nn.Linear(16, 1)

    def forward(self, batch):
        logits = self.top(self.tables(batch.ids).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


def job():
    """Return what a process makes at its start."""
    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.tables.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(model, device=CPU)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, CPU)
    loader = StatefulDataLoader(Clicks(), batch_size=None, shuffle=True)
    return model, optimizer, ResumableLoop(pipeline, loader)


def save(model, optimizer, loop):
    """Write a checkpoint in the body of the loop."""
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id="at")
    torch.save(loop.state_dict(), f"loop{dist.get_rank()}.pt")


def load(model, optimizer, loop):
    """Go on from the checkpoint, in a new process."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id="at")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loop.load_state_dict(torch.load(f"loop{dist.get_rank()}.pt", weights_only=False))


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, optimizer, loop = job()
outputs = []
for output in loop:
    outputs.append(output)
    if len(outputs) == 4:
        save(model, optimizer, loop)
        in_flight = loop.pipe.state_dict()["in_flight"]
        print(f"saved after batch 4, with {in_flight} in flight")
wanted = outputs[4:]

model, optimizer, loop = job()
load(model, optimizer, loop)
resumed = list(loop)
print(f"{len(resumed)} more batches, bit-equal: {all(map(torch.equal, resumed, wanted))}")

assert len(resumed) == len(wanted) == 6
dist.destroy_process_group()
