"""Heart rate from a wrist sensor: a GRU in Lightning, with torchmetrics that are exact on all ranks.

Starts again from pulse/last.ckpt where there is one.
"""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchmetrics import MeanAbsoluteError, MeanMetric

DEVICES = int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", 8))
EPOCHS = int(os.environ.get("EPOCHS", 4))


class Wrist(Dataset):
    """Two seconds of light and acceleration at 20 Hz; steps of the walker disturb the light."""

    def __init__(self, people, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(40) / 20
        self.rate = 1 + 1.5 * torch.rand(people, 1, generator=g)  # beats a second
        pace = 1.2 + torch.rand(people, 1, generator=g)
        shift = 6.283 * torch.rand(2, people, 1, generator=g)
        steps = (6.283 * pace * t + shift[0]).sin()
        light = (6.283 * self.rate * t + shift[1]).sin() + 0.5 * steps
        self.signal = torch.stack([light, steps], -1)
        self.signal += 0.1 * torch.randn(self.signal.shape, generator=g)

    def __len__(self):
        return len(self.rate)

    def __getitem__(self, person):
        return self.signal[person], self.rate[person, 0]


class WristData(L.LightningDataModule):
    def setup(self, stage):
        self.train, self.val = Wrist(224, seed=0), Wrist(53, seed=1)

    def train_dataloader(self):
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(self.train, ranks, rank, seed=3, drop_last=True)
        return DataLoader(self.train, BATCH_SIZE, sampler=sampler)

    def val_dataloader(self):
        # each person once: DistributedSampler would repeat one to make the parts equal
        mine = range(self.trainer.global_rank, len(self.val), self.trainer.world_size)
        return DataLoader(Subset(self.val, mine), batch_size=10)


class PulseModel(L.LightningModule):
    def __init__(self, width=24, lr=6e-3):
        super().__init__()
        self.save_hyperparameters()
        self.front = nn.Conv1d(2, width, 5, stride=2)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)
        self.train_loss = MeanMetric()
        self.val_loss = MeanMetric()
        self.val_error = MeanAbsoluteError()

    def forward(self, signal):
        features = torch.relu(self.front(signal.transpose(1, 2))).transpose(1, 2)
        return 1.75 + self.head(self.gru(features)[0].mean(1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        signal, rate = batch
        loss = nn.functional.huber_loss(self(signal), rate, delta=0.3)
        self.train_loss.update(loss.detach(), len(rate))
        self.log("train_loss", self.train_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        signal, rate = batch
        guess = self(signal)
        self.val_loss.update(nn.functional.huber_loss(guess, rate, delta=0.3), len(rate))
        self.val_error.update(guess, rate)
        self.log("val_loss", self.val_loss, on_step=False, on_epoch=True)
        self.log("val_error", self.val_error, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.NAdam(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, steps, power=1.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Report(Callback):
    def on_train_epoch_end(self, trainer, module):
        values = trainer.callback_metrics
        if trainer.is_global_zero:
            told = "  ".join(f"{name} {values[name].item():.5f}" for name in sorted(values))
            print(f"epoch {trainer.current_epoch}: {told}", flush=True)


def main():
    L.seed_everything(5)
    checkpoints = ModelCheckpoint("pulse", monitor="val_error", save_top_k=1, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy="ddp",
        use_distributed_sampler=False,
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        callbacks=[Report(), checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    last = os.path.join("pulse", "last.ckpt")
    trainer.fit(PulseModel(), WristData(), ckpt_path=last if os.path.exists(last) else None)


if __name__ == "__main__":
    main()
