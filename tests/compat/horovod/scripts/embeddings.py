"""Texts with sparse embeddings: gradients of few rows are gathered, those of layers reduced."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORDS, LENGTH = 5000, 12

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--sparse-as-dense", action="store_true")
parser.add_argument("--save")


class TextClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, 16, sparse=True, mode="mean")
        self.fc = nn.Linear(16, 4)

    def forward(self, text):
        return self.fc(self.embedding(text))


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 4, (512,), generator=generator)
    texts = torch.randint(0, WORDS // 4, (512, LENGTH), generator=generator)
    texts += labels.unsqueeze(1) * (WORDS // 4)
    dataset = TensorDataset(texts, labels)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = TextClassifier()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        sparse_as_dense=args.sparse_as_dense,
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for text, label in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(text), label)
            loss.backward()
            optimizer.step()
        total = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch} loss {total:.4f}")
    if hvd.rank() == 0 and args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
