"""A Trainer of Lightning over batches that are decoded ahead."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import swpipe


@swpipe.task(pure=True)
def decode(ctx):
    """Decode the batch; this task runs ahead of the Trainer's loop, on a separate thread."""
    ctx.x = ctx.batch[0] * 2


class Model(lightning.LightningModule):
    """An ordinary module, whose steps get contexts instead of batches."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.seen = 0

    def training_step(self, ctx, batch_idx):
        self.seen += 1
        return self.net(ctx.x).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


rows = TensorDataset(torch.randn(40, 4))
loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=1)
trainer = lightning.Trainer(
    max_epochs=2,
    accumulate_grad_batches=4,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
with swpipe.overlap(loader, [decode]) as loop:
    print("ahead: the loader,", *loop.overlap.ahead)
    trainer.fit(model, loop)
print(f"{model.seen} batches, {trainer.global_step} steps")
