#!/usr/bin/env python
"""Text classification with Accelerate: padded batches, a prepared schedule, exact metrics."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm.auto import tqdm


class BagOfWords(nn.Module):
    def __init__(self, vocab=60, dim=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=0)
        self.hidden = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, 3)

    def forward(self, input_ids):
        mask = (input_ids != 0).unsqueeze(-1)
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return self.output(torch.relu(self.hidden(mean)))


def make_texts(n, seed):
    g = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(n):
        label = int(torch.randint(3, (), generator=g))
        length = int(torch.randint(4, 20, (), generator=g))
        words = torch.randint(1, 60, (length,), generator=g)
        words[: length // 2] = words[: length // 2] % 20 + 1 + 19 * label
        texts.append((words, label))
    return texts


def collate_fn(examples):
    words, labels = zip(*examples)
    return {"input_ids": pad_sequence(words, True), "labels": torch.tensor(labels)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = BagOfWords()
    train_loader = DataLoader(
        make_texts(192, 0), args.per_device_batch, shuffle=True, collate_fn=collate_fn
    )
    eval_loader = DataLoader(make_texts(53, 1), args.per_device_batch, collate_fn=collate_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # A prepared schedule steps once for each rank: its length is that of the whole loader.
    steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / steps))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in range(args.epochs):
        model.train()
        losses = []
        for batch in tqdm(train_loader, disable=not accelerator.is_local_main_process):
            logits = model(batch["input_ids"])
            loss = nn.functional.cross_entropy(logits, batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        model.eval()
        correct, total = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model(batch["input_ids"]).argmax(-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == labels).sum().item()
            total += len(labels)
        mean_loss = accelerator.gather(torch.stack(losses)).mean().item()
        accelerator.print(f"epoch {epoch}: loss {mean_loss:.4f} accuracy {correct / total:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
