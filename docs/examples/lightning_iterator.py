"""Lightning's training_step over a loop that trains: the pipeline runs within ``next``."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe.loops import ResumableLoop
from swpipe.plans import prefetch_plan


class Model(lightning.LightningModule):
    """A module whose methods are the tasks; they step, so ``automatic_optimization`` is off."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def decode(self, ctx):
        ctx.x = ctx.batch[0] * 2

    def compute(self, ctx):
        ctx.loss = self.net(ctx.x).square().mean()

    def update(self, ctx):
        self.manual_backward(ctx.loss / 4)
        if ctx.iter_idx % 4 == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def training_step(self, dataloader_iter):
        ctx, _, _ = next(dataloader_iter)  # an iteration that is done
        self.log("loss", ctx.loss.detach(), batch_size=len(ctx.x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


model = Model()
loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4, shuffle=True)
decode = swpipe.PipelineTask("decode", model.decode, pure=True)
tasks = [decode, swpipe.task(model.compute), swpipe.task(model.update)]
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
with swpipe.SWPipeline(prefetch_plan(["decode"], ["compute", "update"]), tasks) as pipe:
    loop = ResumableLoop(pipe, loader)
    loop.counted = True  # the Trainer counts batches
    trainer.fit(model, loop)
print(f"{pipe.next_iteration} batches, {trainer.global_step} steps")
