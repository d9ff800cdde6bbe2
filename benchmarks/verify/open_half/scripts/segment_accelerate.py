"""Segmentation of noisy discs with Accelerate: accumulation over two batches, clipping."""

import argparse

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


class Discs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        centers = torch.randint(6, 18, (n, 2), generator=g)
        grid = torch.stack(torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij"))
        far = (grid[None] - centers[:, :, None, None]).float().norm(dim=1)
        self.masks = (far < 5).float()
        self.images = self.masks + 0.7 * torch.randn(n, 24, 24, generator=g)

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, i):
        return {"image": self.images[i, None], "mask": self.masks[i, None]}


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(42)
    model = nn.Sequential(conv(1, 8), conv(8, 16), conv(16, 8), nn.Conv2d(8, 1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    train_dataloader = DataLoader(Discs(128, 0), batch_size=args.batch_size, shuffle=True)
    eval_dataloader = DataLoader(Discs(45, 1), batch_size=args.batch_size)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    updates = args.num_epochs * len(train_dataloader) // 2
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=updates)
    loss_fn = nn.BCEWithLogitsLoss()

    for epoch in range(args.num_epochs):
        model.train()
        total_loss = 0.0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(batch["image"])
                loss = loss_fn(outputs, batch["mask"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    lr_scheduler.step()
                optimizer.zero_grad()
            total_loss += accelerator.reduce(loss.detach(), reduction="mean").item()
        model.eval()
        scores = []
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(batch["image"]) > 0
            predictions, masks = accelerator.gather_for_metrics((predictions, batch["mask"]))
            scores.append((predictions == masks.bool()).float().mean((1, 2, 3)))
        accuracy = torch.cat(scores).mean().item()
        accelerator.print(
            f"epoch {epoch}: loss {total_loss / len(train_dataloader):.5f} acc {accuracy:.5f}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
