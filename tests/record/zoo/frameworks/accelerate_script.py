"""Classify synthetic clusters with Accelerate and gradient accumulation."""

import argparse
import time

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--accumulate", type=int, default=2)
args = parser.parse_args()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)

torch.manual_seed(0)
centres = torch.randn(10, 512)


def clusters(n):
    label = torch.randint(10, (n,))
    return TensorDataset(centres[label] + 15 * torch.randn(n, 512), label)


model = nn.Sequential(
    *[nn.Linear(512, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 10)]
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
batches = 10 * args.accumulate * accelerator.num_processes
train = DataLoader(clusters(batches * args.batch), batch_size=args.batch, shuffle=True)
test = DataLoader(clusters(5 * args.batch + 7), batch_size=args.batch)
model, optimizer, train, test, schedule = accelerator.prepare(
    model, optimizer, train, test, schedule
)

step, loss = 0, None
while step < args.steps:
    model.train()
    for x, y in train:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                step += 1
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step == args.steps:
            break

    model.eval()
    right, seen = 0, 0
    for x, y in test:
        with torch.no_grad():
            guess = model(x).argmax(1)
        guess, y = accelerator.gather_for_metrics((guess, y))
        right += (guess == y).sum().item()
        seen += len(y)
    accelerator.print(f"step {step}: {right} of {seen} right")

accelerator.print(f"final loss {loss.item():.4f}")
# PyTorch 2.13's gloo threads can abort a process that ends right after a collective
time.sleep(0.2)
accelerator.end_training()
