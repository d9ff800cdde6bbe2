"""Message passing on batches of small graphs; one loop over the layers, edges as index lists."""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Graphs:
    nodes: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    owner: torch.Tensor
    y: torch.Tensor


class GraphData(Dataset):
    def __init__(self, n_graphs, n_nodes=24, n_edges=96, width=16):
        gen = torch.Generator().manual_seed(3)
        self.x = torch.randn(n_graphs, n_nodes, width, generator=gen)
        self.edges = torch.randint(n_nodes, (n_graphs, 2, n_edges), generator=gen)
        self.y = self.x.mean((1, 2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        nodes = self.x[k]
        # <sample x=nodes i=k>
        return nodes, self.edges[k], self.y[k]


def merge(graphs):
    n = graphs[0][0].shape[0]
    shift = torch.arange(len(graphs)).view(-1, 1, 1) * n
    edges = (torch.stack([g[1] for g in graphs]) + shift).transpose(0, 1).reshape(2, -1)
    owner = torch.arange(len(graphs)).repeat_interleave(n)
    nodes = torch.cat([g[0] for g in graphs])
    return Graphs(nodes, edges[0], edges[1], owner, torch.stack([g[2] for g in graphs]))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.update = nn.Linear(2 * dim, dim)

    def forward(self, h, source, target):
        sent = self.message(torch.cat([h[source], h[target]], 1))
        received = torch.zeros_like(h).index_add_(0, target, sent)
        return h + torch.tanh(self.update(torch.cat([h, received], 1)))


class GraphNet(nn.Module):
    def __init__(self, width=16, dim=64, depth=3):
        super().__init__()
        self.embed = nn.Linear(width, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(depth)])
        self.read = nn.Linear(dim, 1)

    def forward(self, g):
        h = self.embed(g.nodes)
        for layer in self.layers:
            h = layer(h, g.source, g.target)
        # <forward h=h>
        energy = self.read(h).squeeze(1)
        return torch.zeros(len(g.y)).index_add_(0, g.owner, energy)


def train(cfg):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # <start rank=rank world=ranks>
    gnn = GraphNet()
    # <model model=gnn>
    ddp = DistributedDataParallel(gnn)
    adam = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    data = GraphData(cfg.graphs)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, cfg.batch, sampler=sampler, collate_fn=merge, drop_last=True)
    it = 0
    for ep in range(cfg.epochs):
        sampler.set_epoch(ep)
        for g in loader:
            # <batch x=g.nodes>
            adam.zero_grad(set_to_none=True)
            out = ddp(g)
            err = (out - g.y).square().mean()
            # <loss loss=err model=gnn again=gnn(g) x=g.nodes>
            err.backward()
            # <backward model=gnn loss=err>
            adam.step()
            it += 1
            # <step model=gnn optimizer=adam loss=err step=it rank=rank again=gnn(g)>


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--graphs", type=int, default=4096)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--epochs", type=int, default=10_000)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train(p.parse_args())
    dist.destroy_process_group()
