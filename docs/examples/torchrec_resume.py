"""A sharded training that is stopped in mid-flight and goes on, bit for bit."""

import copy
import warnings
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from swpipe.tasks.torchrec_pipelines import PrefetchTrainPipelineSparseDist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what TorchRec says of itself
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

warnings.simplefilter("ignore", UserWarning)  # what torch says of its own checkpoints
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
    """What a process makes at its start."""
    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.tables.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(model, device=CPU)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, CPU)
    loader = StatefulDataLoader(Clicks(), batch_size=None, shuffle=True)
    return model, optimizer, pipeline, loader


class Batches:
    """One pass over a loader with a state, whose last states are kept."""

    def __init__(self, loader):
        self.loader, self.iterator = loader, iter(loader)
        self.states = deque(maxlen=8)  # more than any pipeline has in flight
        self.keep()

    def keep(self):
        self.states.append(copy.deepcopy(self.loader.state_dict()))

    def __next__(self):
        batch = next(self.iterator)
        self.keep()
        return batch


def save(model, optimizer, pipeline, batches):
    """A checkpoint between two calls of progress."""
    state = pipeline.state_dict()
    loader = batches.states[-1 - state["in_flight"]]  # from before the batches in flight
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id="at")
    torch.save({"pipeline": state, "loader": loader}, f"place{dist.get_rank()}.pt")
    return state


def load(model, optimizer, pipeline, loader):
    """Go on from it, in a new process."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id="at")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    place = torch.load(f"place{dist.get_rank()}.pt", weights_only=False)
    pipeline.load_state_dict(place["pipeline"])
    loader.load_state_dict(place["loader"])


def outputs_of(pipeline, batches):
    """Train to the end of the data."""
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            return outputs


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, optimizer, pipeline, loader = job()
batches = Batches(loader)
for _ in range(4):
    pipeline.progress(batches)
state = save(model, optimizer, pipeline, batches)
print(f"saved after batch {state['next_iteration']}, with {state['in_flight']} in flight")
wanted = outputs_of(pipeline, batches)

model, optimizer, pipeline, loader = job()
load(model, optimizer, pipeline, loader)
resumed = outputs_of(pipeline, Batches(loader))
print(f"{len(resumed)} more batches, bit-equal: {all(map(torch.equal, resumed, wanted))}")

assert len(resumed) == len(wanted) == 6
dist.destroy_process_group()
