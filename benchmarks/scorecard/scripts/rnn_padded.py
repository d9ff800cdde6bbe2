"""GRU over sequences of different lengths. Batches hold sequences of similar length, padded."""

import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

FEATURES, CLASSES = 20, 5


class Recordings(Dataset):
    def __init__(self, count=12_800):
        rng = random.Random(0)
        self.signals = [torch.randn(rng.randint(40, 44), FEATURES) for _ in range(count)]
        self.classes = [rng.randrange(CLASSES) for _ in range(count)]

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, i):
        signal = self.signals[i]
        # <sample x=signal i=i>
        return signal, self.classes[i]


class SimilarLengths(Sampler):
    """Batches of similar lengths; every rank takes each world-th of a shuffled list of batches."""

    def __init__(self, lengths, size, rank, world):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[at : at + size] for at in range(0, len(order), size)]
        self.rank, self.world, self.epoch = rank, world, 0

    def __iter__(self):
        self.epoch += 1
        mixed = random.Random(self.epoch).sample(self.batches, len(self.batches))
        return iter(mixed[self.rank :: self.world])

    def __len__(self):
        return len(self.batches) // self.world


def collate(pairs):
    signals, classes = zip(*pairs, strict=True)
    return pad_sequence(signals, batch_first=True), torch.tensor(classes)


class Classifier(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.gru = nn.GRU(FEATURES, hidden, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, signals):
        states, _ = self.gru(signals)
        # <forward h=states>
        return self.head(states[:, -1])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    # <start rank=rank world=world>
    data = Recordings()
    lengths = [len(signal) for signal in data.signals]
    loader = DataLoader(
        data, batch_sampler=SimilarLengths(lengths, 128, rank, world), collate_fn=collate
    )
    classifier = Classifier()
    # <model model=classifier>
    model = nn.parallel.DistributedDataParallel(classifier)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    n_steps = 0
    for _ in range(10_000):
        model.train()
        for signals, classes in loader:
            # <batch x=signals>
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(signals), classes)
            # <loss loss=loss model=classifier again=classifier(signals) x=signals>
            loss.backward()
            # <backward model=classifier loss=loss>
            optimizer.step()
            n_steps += 1
            # <step model=classifier optimizer=optimizer loss=loss step=n_steps rank=rank>
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
