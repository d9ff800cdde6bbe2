"""Lightning: a convolutional classifier with accumulation over two batches, and checkpoints."""

import os

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy


class Stripes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 3, (n,), generator=g)
        wave = torch.arange(14).float()
        waves = torch.stack([(wave * k).sin() for k in (0.5, 1.0, 2.0)])
        self.x = waves[self.y][:, None, :, None] + 0.8 * torch.randn(n, 1, 14, 14, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3)
        self.norm = nn.GroupNorm(3, 12)
        self.fc = nn.Linear(12 * 6 * 6, 3)
        self.val_acc = MulticlassAccuracy(3, average="micro")

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.val_acc.update(self(x), y)

    def on_validation_epoch_end(self):
        acc = self.val_acc.compute()
        self.val_acc.reset()
        self.print(f"val_acc={acc.item():.4f}")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], 0.3)]


if __name__ == "__main__":
    pl.seed_everything(1, workers=True)
    batch_size = int(os.environ.get("BATCH_SIZE", "8"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        max_epochs=3,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath="checkpoints", save_last=True)],
    )
    trainer.fit(
        Classifier(),
        DataLoader(Stripes(256, 0), batch_size=batch_size, shuffle=True),
        DataLoader(Stripes(64, 1), batch_size=16),
    )
