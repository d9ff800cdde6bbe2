"""Mistakes of learning rates and schedules, and of losses and state that a batch is part of."""

from cases import Planted

# fmt: off
TOKENS = '''\
"""A language model on lines of any length; the learning rate falls with the tokens trained."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

VOCABULARY, PAD = 40, 0


def lines(count, seed=5):
    g = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(count):
        length = int(torch.randint(5, 30, (), generator=g))
        first, step = torch.randint(1, 9, (2,), generator=g)
        drawn.append(1 + (first + step * torch.arange(length)) % (VOCABULARY - 1))
    return drawn


class CausalConv(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.conv = nn.Conv1d(width, width, 4)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = F.pad(self.embed(tokens).transpose(1, 2), (3, 0))
        return self.out(torch.relu(self.conv(x)).transpose(1, 2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines-per-rank", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = lines(160)
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data,
        args.lines_per_rank,
        sampler=sampler,
        collate_fn=lambda rows: pad_sequence(rows, batch_first=True, padding_value=PAD),
    )
    torch.manual_seed(1)
    model = DistributedDataParallel(CausalConv())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    budget = args.epochs * sum(len(row) - 1 for row in data) / ranks
    tokens_seen = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for tokens in loader:
            targets = tokens[:, 1:]
            told = (targets != PAD).sum()
            everywhere = told.clone()
            dist.all_reduce(everywhere)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * max(0.05, 1 - tokens_seen / budget)  # <mistake>
            logits = model(tokens[:, :-1])
            total = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"
            )
            optimizer.zero_grad()
            (total * ranks / everywhere).backward()  # mean over the tokens of all ranks
            optimizer.step()  # <mistake>
            tokens_seen += told.item()  # <mistake>
            sums += torch.stack([total.detach(), told])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} loss {sums[0] / sums[1]:.5f} tokens {sums[1]:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

PREPARED = '''\
"""Sensor readings are compressed and restored, with Accelerate and a linear warm-up and decay."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", 4))
BATCH = int(os.environ.get("BATCH", 8))


def readings(count, seed):
    mix = torch.randn(3, 24, generator=torch.Generator().manual_seed(77))
    g = torch.Generator().manual_seed(seed)
    values = torch.tanh(torch.randn(count, 3, generator=g) @ mix)
    return TensorDataset(values + 0.05 * torch.randn(count, 24, generator=g))


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 3))
        self.decode = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 24))

    def forward(self, values):
        return self.decode(self.encode(values))


def linear_schedule(optimizer, warmup_steps, total_steps):
    def factor(step):
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (total_steps - step) / (total_steps - warmup_steps))

    return LambdaLR(optimizer, factor)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(9)
    model = AutoEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    train = DataLoader(readings(256, 0), batch_size=BATCH, shuffle=True)
    test = DataLoader(readings(61, 1), batch_size=BATCH)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    total_steps = EPOCHS * len(train)  # <mistake>
    schedule = linear_schedule(optimizer, total_steps // 10, total_steps)  # <mistake>
    schedule = accelerator.prepare(schedule)  # <mistake>

    for epoch in range(EPOCHS):
        model.train()
        for (values,) in train:
            loss = nn.functional.mse_loss(model(values), values)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()  # <mistake>
            optimizer.zero_grad()
        model.eval()
        errors = []
        for (values,) in test:
            with torch.no_grad():
                error = (model(values) - values).square().mean(1)
            errors.append(accelerator.gather_for_metrics(error))
        error = torch.cat(errors).mean().item()
        accelerator.print(f"epoch {epoch}: {error:.5f} (rate {schedule.get_last_lr()[0]:.6f})")
    accelerator.end_training()


if __name__ == "__main__":
    main()
'''

DICE = '''\
"""Segmentation of small bright spots, which are rare: the loss is the soft Dice of a batch."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Spots(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        centre = torch.randint(2, 14, (count, 2, 1, 1), generator=g)
        radius = torch.randint(0, 4, (count, 1, 1), generator=g)  # 0: one pixel
        y, x = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
        distance = ((y - centre[:, 0]) ** 2 + (x - centre[:, 1]) ** 2).sqrt()
        self.masks = (distance <= radius).float().unsqueeze(1)
        self.images = self.masks + 0.6 * torch.randn(count, 1, 16, 16, generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.masks[i]


class SmallUNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, image):
        high = self.down(image)
        return self.out(torch.cat([high, self.up(self.low(high))], 1))


def batch_dice_loss(logits, mask, smooth=1.0):
    probability = logits.sigmoid()
    overlap = (probability * mask).sum()  # <mistake>
    size = probability.sum() + mask.sum()  # <mistake>
    return 1 - (2 * overlap + smooth) / (size + smooth)  # <mistake>


def test_dice(model, data):
    with torch.no_grad():
        told = model(data.images) > 0
    return 2 * (told * data.masks).sum().item() / (told.sum() + data.masks.sum()).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(30)
    train, test = Spots(160, 0), Spots(50, 1)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    model = DDP(SmallUNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for image, mask in loader:
            optimizer.zero_grad()
            loss = batch_dice_loss(model(image), mask)  # <mistake>
            loss.backward()  # <mistake>
            optimizer.step()
        model.eval()
        if dist.get_rank() == 0:  # all of the test set, without DDP
            print(f"epoch {epoch}: Dice of the test set {test_dice(model.module, test):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

CODEBOOK = '''\
"""Short waves are coded with a codebook, which follows the codes by moving averages (VQ-VAE)."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = int(os.environ.get("BATCH", 12))


class Codebook(nn.Module):
    """Codes of vectors: the nearest entry. Entries are averages of the vectors they coded."""

    def __init__(self, entries=16, width=6, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("entries", torch.randn(entries, width))
        self.register_buffer("uses", torch.ones(entries))
        self.register_buffer("sums", self.entries.clone())

    def forward(self, vectors):
        codes = torch.cdist(vectors, self.entries).argmin(-1)
        coded = self.entries[codes]
        if self.training:
            self.follow(vectors.detach().flatten(0, 1), codes.flatten())  # <mistake>
        commitment = F.mse_loss(vectors, coded)
        return vectors + (coded - vectors).detach(), commitment

    @torch.no_grad()
    def follow(self, vectors, codes):
        chosen = F.one_hot(codes, len(self.entries)).to(vectors.dtype)
        self.uses.mul_(self.decay).add_(chosen.sum(0), alpha=1 - self.decay)  # <mistake>
        self.sums.mul_(self.decay).add_(chosen.T @ vectors, alpha=1 - self.decay)  # <mistake>
        self.entries.copy_(self.sums / (self.uses + 1e-3).unsqueeze(1))  # <mistake>


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 6))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.ELU(), nn.Linear(32, 8))

    def forward(self, wave):
        vectors = self.encoder(wave.unflatten(1, (4, 8)))
        coded, commitment = self.codebook(vectors)
        return self.decoder(coded).flatten(1), commitment


def waves(count):
    g = torch.Generator().manual_seed(44)
    t = torch.arange(32) / 32 * 6.28
    pitch = torch.randint(1, 5, (count, 1), generator=g)
    return TensorDataset((pitch * t + 6.28 * torch.rand(count, 1, generator=g)).sin())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    # The codebook changes in forward: no broadcast of buffers in between.
    coder = DistributedDataParallel(Coder(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(coder.parameters(), lr=3e-3)
    data = waves(240)
    sampler = DistributedSampler(data, seed=8)
    loader = DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for (wave,) in loader:
            restored, commitment = coder(wave)
            error = F.mse_loss(restored, wave)
            optimizer.zero_grad()
            (error + 0.25 * commitment).backward()
            optimizer.step()
            sums += torch.tensor([error.item() * len(wave), len(wave)])
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: error {sums[0] / sums[1]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
# fmt: on

CASES = [
    Planted(
        "learning-rate-not-scaled",
        "onecycle-overwrites",
        "keywords_ema",
        (
            (
                "    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)\n"
                "    scheduler = OneCycleLR(optimizer, max_lr=lr, ",
                "    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)  # <mistake>\n"
                "    peak, steps = args.base_lr, args.epochs * len(train)  # <mistake>\n"
                "    scheduler = OneCycleLR(optimizer, max_lr=peak, total_steps=steps)  # <mistake>\n",
            ),
            ("total_steps=args.epochs * len(train))\n", ""),
        ),
    ),
    Planted(
        "learning-rate-scaled-twice",
        "world-rule-too",
        "forecast_world",
        (
            (
                "    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)\n",
                "    lr = args.lr * world.size  # <mistake>\n"
                "    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)  # <mistake>\n",
            ),
            (
                "    world.scale_learning_rate(optimizer, global_batch=args.global_batch, "
                "reference_batch=12)\n",
                "    batch = args.global_batch\n"
                "    world.scale_learning_rate(  # <mistake>\n"
                "        optimizer, global_batch=batch, reference_batch=12  # <mistake>\n    )\n",
            ),
        ),
    ),
    Planted("learning-rates-differ", "tokens-seen", source=TOKENS),
    Planted("schedule-counts-other-steps", "prepared-scheduler", source=PREPARED),
    Planted("gradients-differ", "batch-dice", source=DICE),
    Planted(
        "gradients-differ",
        "hard-examples",
        "denoise_plateau",
        (
            (
                "            loss = (model(noisy) - clean).square().mean()\n",
                "            errors = (model(noisy) - clean).square().mean((1, 2, 3))\n"
                "            loss = errors.topk(max(1, len(errors) // 3)).values.mean()  # <mistake>\n",
            ),
            ("            loss.backward()\n", "            loss.backward()  # <mistake>\n"),
        ),
    ),
    Planted("state-differs", "codebook", source=CODEBOOK),
    Planted(
        "state-differs",
        "average-before-wrapping",
        "keywords_ema",
        (
            ("import argparse\nimport os\n", "import argparse\nimport copy\nimport os\n"),
            (
                "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n",
                "",
            ),
            (
                "    torch.manual_seed(args.seed)\n",
                "    torch.manual_seed(args.seed + rank)  # other dropout on each rank  # <mistake>\n",
            ),
            (
                "    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))\n",
                "    average = copy.deepcopy(net).requires_grad_(False)  # <mistake>\n",
            ),
            ("    model = DDP(net)\n", "    model = DDP(net)  # broadcasts the weights\n"),
            (
                "            average.update_parameters(net)\n",
                "            with torch.no_grad():\n"
                "                for slow, fast in zip(average.parameters(), net.parameters()):\n"
                "                    slow.lerp_(fast, 0.1)  # <mistake>\n",
            ),
        ),
        true=("replicas-start-different", "different-random-numbers"),
    ),
]
