"""A GRU tagger on sentences of different lengths; gradients are exchanged with dist.all_reduce.

All gradients of one dtype travel in one flat tensor. The loss is a sum over words, divided by the
number of words of all ranks, so that ranks with more words count for more.
"""

import os
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

WORDS, TAGS, PAD = 40, 5, -1
GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", 24))
EPOCHS = int(os.environ.get("EPOCHS", 3))


def sentences(count, seed):
    """The tag of a word depends on the words since the last word below 8."""
    g = torch.Generator().manual_seed(seed)
    corpus = []
    for _ in range(count):
        words = torch.randint(WORDS, (int(torch.randint(3, 20, (), generator=g)),), generator=g)
        tags, state = [], 0
        for word in words.tolist():
            state = 0 if word < 8 else (state + word) % TAGS
            tags.append(state)
        corpus.append((words, torch.tensor(tags)))
    return corpus


class Tagger(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(2 * width, TAGS)
        self.prior = nn.Parameter(torch.zeros(TAGS, dtype=torch.float64))

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embedding(words), lengths, True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.scores(states).double() + self.prior


class Exchange:
    def __init__(self, model):
        self.by_dtype = defaultdict(list)
        for p in model.parameters():
            self.by_dtype[p.dtype].append(p)

    def sum_gradients(self):
        for params in self.by_dtype.values():
            flat = torch.cat([p.grad.reshape(-1) for p in params])
            dist.all_reduce(flat)
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(part.view_as(p))


def batches(corpus, epoch, rank, world):
    """Rank's parts of the global batches; the last one is smaller, and may be uneven."""
    order = list(range(len(corpus)))
    if epoch is not None:
        g = torch.Generator().manual_seed(1000 + epoch)
        order = torch.randperm(len(corpus), generator=g).tolist()
    for at in range(0, len(order), GLOBAL_BATCH):
        mine = [corpus[i] for i in order[at : at + GLOBAL_BATCH][rank::world]]
        words, tags = zip(*mine)
        lengths = torch.tensor([len(one) for one in words])
        yield pad_sequence(words, True), lengths, pad_sequence(tags, True, PAD)


def losses(model, words, lengths, tags):
    scores = model(words, lengths)
    summed = nn.functional.cross_entropy(
        scores.flatten(0, 1), tags.flatten(), ignore_index=PAD, reduction="sum"
    )
    right = (scores.argmax(-1) == tags).sum()
    return summed, right


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, held_out = sentences(185, seed=0), sentences(61, seed=1)
    torch.manual_seed(8)
    model = Tagger()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    exchange = Exchange(model)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        train_sums = torch.zeros(2)
        for words, lengths, tags in batches(train, epoch, rank, world):
            count = lengths.sum().float()
            dist.all_reduce(count)
            summed, _ = losses(model, words, lengths, tags)
            optimizer.zero_grad()
            (summed / count).backward()
            exchange.sum_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
            train_sums += torch.stack([summed.detach().float(), lengths.sum()])
        test_sums = torch.zeros(2)
        with torch.no_grad():
            for words, lengths, tags in batches(held_out, None, rank, world):
                test_sums += torch.stack([losses(model, words, lengths, tags)[1], lengths.sum()])
        dist.all_reduce(train_sums)
        dist.all_reduce(test_sums)
        if rank == 0:
            nll, accuracy = train_sums[0] / train_sums[1], test_sums[0] / test_sums[1]
            print(f"epoch {epoch}  nll/word {nll:.4f}  held-out accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
