"""A small transformer in pipeline-parallel training: alone, or on the ranks of torchrun."""

import os

import torch
import torch.distributed as dist
from torch import nn

from swpipe import SWPipeline
from swpipe.plans.pipeline_parallel import torch_schedule
from swpipe.plans.pipeline_parallel.pipeline_training import ahead
from swpipe.tasks.pipeline_parallel import PipelineRuntime, PipelineTrainTasks, SerialRuntime

MICROBATCHES, LAYERS, WORDS, FEATURES = 4, 8, 50, 32


def load(number):
    """Return the whole batch; a rank uses what its stages need."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (8, 9), generator=generator)
    return (tokens[:, :-1],), tokens[:, 1:]


def mean_loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layer(number):
    """Return a layer; its values do not depend on the rank that makes it."""
    torch.manual_seed(number)
    if number == 0:
        return nn.Embedding(WORDS, FEATURES)
    if number == LAYERS - 1:
        return nn.Linear(FEATURES, WORDS)
    return nn.TransformerEncoderLayer(FEATURES, 4, 64, dropout=0.0, batch_first=True)


def chunk(stage, stages):
    each = LAYERS // stages
    return nn.Sequential(*map(layer, range(stage * each, (stage + 1) * each)))


def main():
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    schedule = torch_schedule("zbv", dist.get_world_size(), MICROBATCHES)
    stages = [s for s, rank in enumerate(schedule.placement) if rank == dist.get_rank()]
    chunks = {stage: chunk(stage, schedule.n_stages) for stage in stages}
    runtime = PipelineRuntime(schedule, chunks, mean_loss)
    parameters = [p for module in chunks.values() for p in module.parameters()]
    tasks = PipelineTrainTasks(runtime, torch.optim.SGD(parameters, lr=0.1), load).tasks()

    with SWPipeline(ahead(), tasks) as pipe:
        losses = [ctx.losses for ctx in pipe.iterate(range(5))]
    (inputs,), target = load(100)
    held_out = runtime.evaluate(inputs, target=target).losses

    if runtime.has_last:  # on a V: rank 0
        model = chunk(0, 1)
        serial = SerialRuntime([model], MICROBATCHES, mean_loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, loss in enumerate(losses):
            (inputs,), target = load(number)
            same = torch.equal(serial.train(inputs, target=target).losses, loss)
            optimizer.step()
            print(f"step {number}: the losses are those of a single process: {same}")
        (inputs,), target = load(100)
        same = torch.equal(serial.evaluate(inputs, target=target).losses, held_out)
        print(f"evaluation: the losses are those of a single process: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
