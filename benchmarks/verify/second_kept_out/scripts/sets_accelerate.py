#!/usr/bin/env python
"""Outliers of sets, and the spread of each set, with attention over elements (Accelerate).

Sets have different sizes: the loss of elements is divided by the elements of all processes.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def make_sets(count, seed):
    """Elements around a center of their set; a fifth of them is farther out."""
    g = torch.Generator().manual_seed(seed)
    sets = []
    for _ in range(count):
        size = int(torch.randint(6, 25, (), generator=g))
        spread = 0.3 + torch.rand((), generator=g)
        outlier = (torch.rand(size, generator=g) < 0.2).float()
        offset = F.normalize(torch.randn(size, 4, generator=g), dim=-1)
        distance = spread * (1 + 2 * outlier) * (0.8 + 0.4 * torch.rand(size, generator=g))
        elements = torch.randn(4, generator=g) + offset * distance[:, None]
        sets.append((elements, outlier, spread))
    return sets


def collate(examples):
    elements, outliers, spreads = zip(*examples)
    valid = [torch.ones(len(one), dtype=torch.bool) for one in elements]
    return {
        "elements": pad_sequence(elements, batch_first=True),
        "outliers": pad_sequence(outliers, batch_first=True),
        "valid": pad_sequence(valid, batch_first=True),
        "spread": torch.stack(spreads),
    }


class SetBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, valid):
        mixed, _ = self.attention(x, x, x, key_padding_mask=~valid, need_weights=False)
        x = self.norm1(x + mixed)
        return self.norm2(x + self.feed(x))


class SetModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.ModuleList(SetBlock(width) for _ in range(2))
        self.outlier = nn.Linear(width, 1)
        self.spread = nn.Linear(width, 1)

    def forward(self, elements, valid):
        x = self.embed(elements)
        for block in self.blocks:
            x = block(x, valid)
        pooled = (x * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
        return self.outlier(x).squeeze(-1), self.spread(pooled).squeeze(-1)


def evaluate(accelerator, model, sets):
    """Every set once, whatever the number of processes; returns F1 and the error of the spread."""
    model.eval()
    rows = []
    with accelerator.split_between_processes(list(range(len(sets)))) as mine:
        for at in range(0, len(mine), 8):
            batch = collate([sets[i] for i in mine[at : at + 8]])
            with torch.no_grad():
                logits, spread = model(batch["elements"], batch["valid"])
            found, real = logits > 0, batch["outliers"] > 0
            hits = (found & real & batch["valid"]).sum(1).tolist()
            calls = (found & batch["valid"]).sum(1).tolist()
            errors = (spread - batch["spread"]).abs().tolist()
            rows += zip(hits, calls, real.sum(1).tolist(), errors)
    model.train()
    hits, calls, real, errors = map(sum, zip(*gather_object(rows)))
    return 2 * hits / (calls + real), errors / len(sets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total_batch_size", type=int, default=16, help="over all processes")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    )
    set_seed(21)
    train_sets, test_sets = make_sets(192, seed=0), make_sets(51, seed=1)
    model = SetModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    train_dataloader = DataLoader(
        train_sets, batch_size=args.total_batch_size, shuffle=True, collate_fn=collate
    )
    max_train_steps = args.num_epochs * len(train_dataloader)
    lr_scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, max_train_steps, power=0.9)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    for epoch in range(args.num_epochs):
        sums = torch.zeros(2)
        for batch in train_dataloader:
            logits, spread = model(batch["elements"], batch["valid"])
            each = F.binary_cross_entropy_with_logits(logits, batch["outliers"], reduction="none")
            element_sum = (each * batch["valid"]).sum()
            elements = accelerator.reduce(batch["valid"].sum().float(), reduction="sum")
            # the gradients are averaged over processes, which this division does too
            element_loss = element_sum * accelerator.num_processes / elements
            spread_loss = F.smooth_l1_loss(spread, batch["spread"])
            accelerator.backward(element_loss + 0.5 * spread_loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            sums += torch.stack([element_sum.detach(), batch["valid"].sum()])
        sums = accelerator.reduce(sums, reduction="sum")
        f1, error = evaluate(accelerator, model, test_sets)
        accelerator.print(
            f"epoch {epoch}: loss {sums[0] / sums[1]:.5f}, F1 {f1:.4f}, spread off by {error:.4f}"
        )
        accelerator.save_state("last", safe_serialization=False)
    accelerator.end_training()


if __name__ == "__main__":
    main()
