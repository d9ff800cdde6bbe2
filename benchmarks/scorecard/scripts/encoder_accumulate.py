"""Transformer encoder of events in a detector, with gradient accumulation and no_sync."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

HITS, CHANNELS, MICRO_BATCH, ACCUMULATE = 24, 64, 48, 2


class EventEncoder(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.inp = nn.Linear(4, CHANNELS)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(CHANNELS, 4, 128, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.out = nn.Linear(CHANNELS, 3)

    def forward(self, hits):
        z = self.inp(hits)
        for layer in self.layers:
            z = layer(z)
        # <forward h=z>
        return self.out(z.mean(1))


def events(generator):
    while True:
        hits = torch.randn(MICRO_BATCH, HITS, 4, generator=generator)
        # <sample x=hits i=0>
        yield hits, hits[..., :3].mean(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    # <start rank=rank world=dist.get_world_size()>
    encoder = EventEncoder()
    # <model model=encoder>
    ddp = DDP(encoder)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    source = events(torch.Generator().manual_seed(rank))
    for update in range(1, 100_000):
        optimizer.zero_grad()
        for part in range(ACCUMULATE):
            hits, vertex = next(source)
            # <batch x=hits>
            last = part == ACCUMULATE - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = nn.functional.mse_loss(ddp(hits), vertex) / ACCUMULATE
                # <loss loss=loss model=encoder again=encoder(hits) x=hits>
                loss.backward()
        # <backward model=encoder loss=loss>
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        # <step model=encoder optimizer=optimizer loss=loss step=update rank=rank>
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
