"""Tabular regression with Lightning: OneCycle per step, clipping, a metric that is exact."""

import os

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(L.LightningModule):
    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(12, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )
        self.val_mse = torchmetrics.MeanSquaredError()

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_mse(self(x), y)
        self.log("val_mse", self.val_mse, on_epoch=True)

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics
        if self.trainer.is_global_zero and "train_loss" in metrics:
            print(
                f"epoch {self.current_epoch}: train {metrics['train_loss']:.5f} "
                f"val {metrics['val_mse']:.5f}"
            )

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Data(L.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        g = torch.Generator().manual_seed(3)
        x = torch.randn(320, 12, generator=g)
        y = torch.sin(x[:, 0]) + x[:, 1] * x[:, 2]
        self.train_set = TensorDataset(x[:256], y[:256])
        self.val_set = TensorDataset(x[256:], y[256:])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=16)


def main():
    L.seed_everything(7)
    model = Regressor()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy="ddp",
        max_epochs=int(os.environ.get("EPOCHS", 3)),
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, Data(int(os.environ.get("BATCH_SIZE", 8))))


if __name__ == "__main__":
    main()
