"""Digits, in the shape of Horovod's elastic MNIST example: state, commits and ElasticSampler."""

import argparse
import os
import signal

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--batches-per-commit", type=int, default=4)
parser.add_argument("--kill-at", type=int, default=-1, help="batch in which the last rank ends")
parser.add_argument("--save")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
train_dataset = TensorDataset(images[:1280], torch.tensor(digits.target)[:1280])
train_sampler = hvd.elastic.ElasticSampler(train_dataset)
train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def end_once(state, batch_idx):
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    last = hvd.rank() == hvd.size() - 1
    if first and last and state.epoch == 1 and batch_idx == args.kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    while state.epoch <= args.epochs:
        state.model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            end_once(state, batch_idx)
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            train_sampler.record_batch(batch_idx, args.batch_size)
            state.batch = batch_idx
            if batch_idx % args.batches_per_commit == 0:
                state.commit()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch} loss {loss.item():.4f}")
        state.epoch += 1
        state.batch = 0
        train_sampler.set_epoch(state.epoch)
        state.commit()


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, train_sampler=train_sampler, epoch=1, batch=0
)
state.register_reset_callbacks([on_state_reset])
train(state)
if hvd.rank() == 0 and args.save:
    torch.save(model.state_dict(), args.save)
