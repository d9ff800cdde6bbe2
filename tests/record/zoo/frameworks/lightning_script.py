"""An autoencoder with Lightning's Trainer; by torchrun, or alone."""

import argparse
import os
import tempfile

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(L.LightningModule):
    def __init__(self, width=512):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64))
        self.decoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()

    L.seed_everything(0, verbose=False)
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    basis = torch.randn(32, 512)
    train = TensorDataset(torch.randn(10 * args.batch * devices, 32) @ basis)
    valid = TensorDataset(torch.randn(3 * args.batch * devices, 32) @ basis)

    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy="ddp",
            max_steps=args.steps,
            max_epochs=-1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(
            AutoEncoder(),
            DataLoader(train, batch_size=args.batch, shuffle=True),
            DataLoader(valid, batch_size=args.batch),
        )
        if trainer.is_global_zero:
            print(f"final loss {trainer.callback_metrics['train_loss'].item():.4f}")


if __name__ == "__main__":
    main()
