"""Mistakes of replicas and of states that have to be equal."""

from cases import Planted

QUANTIZED = '''"""Vector quantization of short windows of a signal: encoder, codebook and decoder, with DDP."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", 16))
CODES, RESTART_EVERY = 24, 5


def windows(n, seed):
    g = torch.Generator().manual_seed(seed)
    pitch = torch.randint(1, 7, (n, 1), generator=g)
    phase = 6.283 * torch.rand(n, 1, generator=g)
    return (pitch * torch.linspace(0, 6.283, 32) + phase).sin()


class Quantized(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, dim))
        self.decoder = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, 32))
        self.codes = nn.Parameter(torch.randn(CODES, dim))

    def forward(self, x):
        latent = self.encoder(x)
        nearest = torch.cdist(latent.detach(), self.codes.detach()).argmin(1)
        code = self.codes[nearest]
        passed = latent + (code - latent).detach()  # straight through
        loss = F.mse_loss(self.decoder(passed), x)
        loss = loss + F.mse_loss(code, latent.detach()) + 0.25 * F.mse_loss(latent, code.detach())
        return loss, latent.detach(), nearest


class Restarts:
    """Puts codes that are not used any more at latents of the batch."""

    def __init__(self, codes):
        self.codes, self.uses, self.steps = codes, torch.zeros(len(codes)), 0

    @torch.no_grad()
    def after_step(self, latent, nearest):
        self.uses += torch.bincount(nearest, minlength=len(self.codes))  # <mistake>
        self.steps += 1
        if self.steps % RESTART_EVERY == 0:
            unused = (self.uses == 0).nonzero().flatten()  # <mistake>
            chosen = torch.randint(len(latent), (len(unused),))
            self.codes[unused] = latent[chosen]  # <mistake>
            self.uses.zero_()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    net = Quantized()
    model = DDP(net)
    restarts = Restarts(net.codes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train = TensorDataset(windows(192, seed=0))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, GLOBAL_BATCH // world_size, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        mean = torch.zeros(())
        for (x,) in loader:
            loss, latent, nearest = model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            restarts.after_step(latent, nearest)  # <mistake>
            mean += loss.detach() / len(loader)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / world_size:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

CASES = [
    Planted(
        "replicas-start-different",
        "bias-from-own-part",
        "parts_ddp",
        (
            (
                "@torch.no_grad()\ndef mean_iou",
                '''def log_shares(loader):
    """Logarithms of the parts' shares of the points."""
    counts = sum(labels.flatten().bincount(minlength=PARTS) for _, labels in loader)  # <mistake>
    return (counts / counts.sum()).log()


@torch.no_grad()
def mean_iou''',
            ),
            (
                "    model = DistributedDataParallel(net)\n",
                """    model = DistributedDataParallel(net)
    net.head.bias.data.copy_(log_shares(train_loader))  # begin with the shares  # <mistake>
""",
            ),
        ),
    ),
    Planted(
        "replicas-diverge",
        "codebook-restart",
        source=QUANTIZED,
        true=("different-random-numbers",),
    ),
    Planted(
        "replicas-diverge",
        "embedding-max-norm",
        "tagger_flat",
        (
            (
                "        self.embedding = nn.Embedding(WORDS, width)\n",
                "        self.embedding = nn.Embedding(WORDS, width, max_norm=4.0)  # <mistake>\n",
            ),
            (
                "        packed = pack_padded_sequence(self.embedding(words), lengths, True, enforce_sorted=False)\n",
                """        embedded = self.embedding(words)  # <mistake>
        packed = pack_padded_sequence(embedded, lengths, True, enforce_sorted=False)
""",
            ),
        ),
    ),
]
