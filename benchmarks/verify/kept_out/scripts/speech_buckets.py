#!/usr/bin/env python3
# Speech recognition in small: CTC on (made up) mel features.
#
# Batches have utterances of similar lengths. A batch of all ranks is made first and then divided, so
# that the ranks wait less for each other and any number of them trains on the same batches.

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

MELS, PHONES = 16, 9
LENGTHS = [(64, 24, 40), (48, 40, 56), (32, 56, 72), (8, 96, 112)]  # utterances, from, to (frames)


class Utterances(Dataset):
    """Every phone has a spectrum and lasts for some frames."""

    def __init__(self, seed, table):
        g = torch.Generator().manual_seed(seed)
        spectra = 1.5 * torch.randn(PHONES, MELS, generator=torch.Generator().manual_seed(0))
        self.features, self.phones = [], []
        for count, low, high in table:
            for _ in range(count):
                frames = int(torch.randint(low, high, (), generator=g))
                phones = torch.randint(1, PHONES, (frames // 8,), generator=g)
                spoken = phones.repeat_interleave(8)[:frames]
                noise = torch.randn(len(spoken), MELS, generator=g)
                self.features.append(spectra[spoken] + noise)
                self.phones.append(phones)
        self.lengths = [len(one) for one in self.features]

    def __len__(self):
        return len(self.features)

    def __getitem__(self, i):
        return self.features[i], self.phones[i]


class BucketBatchSampler(Sampler):
    """This rank's part of batches of similar lengths, in another order in each epoch."""

    def __init__(self, lengths, batch_size, rank, world_size, seed=0, pool=3):
        self.lengths, self.rank, self.world_size = lengths, rank, world_size
        self.batch_size, self.size = batch_size, batch_size * world_size
        self.seed, self.pool, self.epoch = seed, pool, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def batches(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=g).tolist()
        batches = []
        for start in range(0, len(order), self.pool * self.size):
            pool = order[start : start + self.pool * self.size]
            pool.sort(key=lambda i: self.lengths[i])
            batches += [pool[at : at + self.size] for at in range(0, len(pool), self.size)]
        mixed = torch.randperm(len(batches), generator=g).tolist()
        return [batches[number][self.rank :: self.world_size] for number in mixed]

    def __iter__(self):
        return iter(self.batches())

    def __len__(self):
        return len(self.batches())


def collate(rows):
    features, phones = zip(*rows)
    frames, spoken = (torch.tensor([len(one) for one in part]) for part in (features, phones))
    return pad_sequence(features, batch_first=True), frames, torch.cat(phones), spoken


def mask_frames(features, frames, width):
    """SpecAugment of time: a piece of each utterance is silent."""
    for row, length in zip(features, frames.tolist()):
        size = int(torch.randint(0, width + 1, ()))
        start = int(torch.randint(0, length - size + 1, ()))
        row[start : start + size] = 0
    return features


class Recognizer(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.front = nn.Conv1d(MELS, hidden, 5, padding=2)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, PHONES)

    def forward(self, features, frames):
        x = torch.relu(self.front(features.transpose(1, 2))).transpose(1, 2)
        packed = pack_padded_sequence(x, frames, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(x).log_softmax(-1).transpose(0, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8, help="utterances of a rank")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--peak-lr", type=float, default=1e-2)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--time-mask", type=int, default=6)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, dev_set = Utterances(1, LENGTHS), Utterances(2, [(20, 24, 72)])
    sampler = BucketBatchSampler(train_set.lengths, args.batch_size, rank, world_size, args.seed)
    loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=collate)
    dev = collate([dev_set[i] for i in range(len(dev_set))])

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Recognizer())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.peak_lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / args.warmup, (args.warmup / (step + 1)) ** 0.5)
    )
    ctc = nn.CTCLoss(reduction="none")
    torch.manual_seed(args.seed + 100 * (rank + 1))  # masks

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(2)
        for features, frames, phones, spoken in loader:
            if args.time_mask:
                features = mask_frames(features, frames, args.time_mask)
            losses = ctc(model(features, frames), phones, frames, spoken)
            optimizer.zero_grad()
            losses.mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            sums += torch.tensor([losses.sum().item(), len(losses)])
        dist.all_reduce(sums)
        model.eval()
        with torch.no_grad():
            features, frames, phones, spoken = dev
            dev_loss = ctc(model.module(features, frames), phones, frames, spoken).mean()
        if rank == 0:
            print(f"epoch {epoch + 1} train {sums[0] / sums[1]:.4f} dev {dev_loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
