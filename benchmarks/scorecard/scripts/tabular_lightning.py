"""Tabular regression with categorical columns: a Lightning module."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CARDINALITIES = (50, 12, 7, 200, 31)
NUMERIC = 16


class TabularNet(nn.Module):
    def __init__(self, hidden=320):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, 8) for count in CARDINALITIES)
        width = 8 * len(CARDINALITIES) + NUMERIC
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.out = nn.Linear(hidden, 1)

    def forward(self, categories, numbers):
        columns = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        hidden = self.mlp(torch.cat([*columns, numbers], 1))
        # <forward h=hidden>
        return self.out(hidden)


class TabularModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = TabularNet()
        # <model model=self.net>

    def training_step(self, batch, batch_idx):
        categories, numbers, target = batch
        # <batch x=numbers>
        prediction = self.net(categories, numbers)
        loss = nn.functional.mse_loss(prediction, target)
        # <loss loss=loss model=self.net again=self.net(categories,numbers) x=numbers>
        return loss

    def on_after_backward(self):
        # <backward model=self.net>
        return

    def on_train_batch_end(self, outputs, batch, batch_idx):
        # <step model=self.net loss=outputs["loss"] step=batch_idx+1 rank=self.global_rank>
        return

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Table(Dataset):
    """Columns in memory; a batch of rows is taken at once."""

    def __init__(self, rows):
        generator = torch.Generator().manual_seed(11)
        columns = [torch.randint(count, (rows,), generator=generator) for count in CARDINALITIES]
        self.categories = torch.stack(columns, 1)
        self.numbers = torch.randn(rows, NUMERIC, generator=generator)
        self.target = self.numbers[:, :1] + 0.1 * self.categories[:, 1:2]

    def __len__(self):
        return len(self.target)

    def __getitem__(self, row):
        return self.categories[row], self.numbers[row], self.target[row]

    def __getitems__(self, rows):
        return self.categories[rows], self.numbers[rows], self.target[rows]


def as_it_is(batch):
    return batch


def main():
    L.seed_everything(0, verbose=False)
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    # <start rank=int(os.environ.get("RANK","0")) world=devices>
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp",
        max_epochs=100_000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(
        Table(204_800), batch_size=2048, shuffle=True, drop_last=True, collate_fn=as_it_is
    )
    trainer.fit(TabularModule(), loader)


if __name__ == "__main__":
    main()
