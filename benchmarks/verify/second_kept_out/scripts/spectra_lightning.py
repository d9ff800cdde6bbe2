"""Classes of spectra, trained with sharpness-aware minimization: manual optimization in Lightning."""

import os

import torch
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", 16))  # the learning rate is for this batch
LEARNING_RATE = 0.1


class Spectra(Dataset):
    """Sums of peaks; a class has a pair of peaks at a distance of its own."""

    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.classes = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), count, True, generator=g)
        channel = torch.arange(64.0)
        first = 10 + 25 * torch.rand(count, 1, generator=g)
        second = first + 6 + 5 * self.classes[:, None]
        peaks = sum((-((channel - at) ** 2) / 5).exp() for at in (first, second))
        self.spectra = peaks + 0.15 * torch.randn(count, 64, generator=g)

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, index):
        return self.spectra[index, None], self.classes[index]


class SpectraModule(LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        self.train_set, self.val_set = Spectra(240, seed=0), Spectra(96, seed=1)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=8)


class SharpnessAware(LightningModule):
    def __init__(self, lr, rho=0.02):
        super().__init__()
        self.automatic_optimization = False
        self.lr, self.rho = lr, rho
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 7, padding=3),
            nn.GELU(),
            nn.Conv1d(16, 24, 7, stride=2, padding=3),
            nn.GroupNorm(4, 24),
            nn.GELU(),
            nn.Conv1d(24, 24, 7, stride=2, padding=3),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(24 * 16, 3),
        )
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, spectrum):
        return self.net(spectrum)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        spectrum, label = batch
        loss = self.criterion(self(spectrum), label)
        optimizer.zero_grad()
        self.manual_backward(loss)
        with torch.no_grad():  # to where the loss is higher, by the gradient of all ranks
            grads = [p.grad for p in self.parameters()]
            norm = torch.stack([g.norm() for g in grads]).norm() + 1e-12
            steps = [g * self.rho / norm for g in grads]
            for p, step in zip(self.parameters(), steps):
                p.add_(step)
        optimizer.zero_grad()
        self.manual_backward(self.criterion(self(spectrum), label))
        with torch.no_grad():
            for p, step in zip(self.parameters(), steps):
                p.sub_(step)
        optimizer.step()
        self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self):
        self.lr_schedulers().step()
        shown = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch}: accuracy {shown['accuracy'].item():.4f}")

    def validation_step(self, batch, batch_idx):
        spectrum, label = batch
        right = (self(spectrum).argmax(-1) == label).float().mean()
        self.log("accuracy", right, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def on_train_end(self):
        self.print(f"loss of the last epoch {self.trainer.callback_metrics['loss'].item():.5f}")


if __name__ == "__main__":
    seed_everything(12, workers=True)
    if GLOBAL_BATCH % WORLD_SIZE:
        raise SystemExit(f"a batch of {GLOBAL_BATCH} can't be split among {WORLD_SIZE} ranks")
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=WORLD_SIZE,
        max_epochs=4,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint("spectra", monitor="accuracy", mode="max", save_last=True)],
    )
    data = SpectraModule(GLOBAL_BATCH // WORLD_SIZE)
    trainer.fit(SharpnessAware(LEARNING_RATE), datamodule=data)
