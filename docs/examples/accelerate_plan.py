"""Accelerate's gradient accumulation under a hand-written plan."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe.loops import AccelerateLoader, ResumableLoop
from swpipe.plans import prefetch_plan

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


@swpipe.task(pure=True)
def decode(ctx):
    ctx.x = ctx.batch[0] * 2


def train(ctx):
    with accelerator.accumulate(model):
        ctx.loss = model(ctx.x).square().mean()
        accelerator.backward(ctx.loss)
        optimizer.step()
        optimizer.zero_grad()


loader = AccelerateLoader(loader)
tasks = loader.tasks([decode, swpipe.task(train)])
plan = prefetch_plan(["unpack batch", "decode"], ["show end_of_dataloader", "train"], depth=4)
with swpipe.SWPipeline(plan, tasks) as pipe:
    loop = ResumableLoop(pipe, loader)
    for epoch in range(2):
        steps = [ctx.iter_idx for ctx in loop if accelerator.sync_gradients]
        print(f"epoch {epoch}: steps at {steps}")
