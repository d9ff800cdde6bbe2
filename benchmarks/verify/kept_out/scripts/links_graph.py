"""Link prediction with a two-layer GraphSAGE. No DataLoader: batches are slices of a permutation.

The graph is small enough to be encoded as a whole in every step. Each process scores its part of the
step's links, and as many pairs without a link. These are drawn for all processes at once.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

NODES, GROUPS = 150, 5


def make_graph(seed=0):
    """Links within groups are frequent; features of nodes are noise around their group's."""
    g = torch.Generator().manual_seed(seed)
    group = torch.arange(NODES) % GROUPS
    chance = torch.where(group[:, None] == group[None], 0.2, 0.01)
    links = (torch.rand(NODES, NODES, generator=g) < chance).triu(1).nonzero()
    links = links[torch.randperm(len(links), generator=g)]
    features = torch.randn(GROUPS, 12, generator=g)[group]
    features = features + 1.5 * torch.randn(NODES, 12, generator=g)
    held_out = len(links) // 8
    return features, links[held_out:], links[:held_out]


def mean_of_neighbors(links):
    both = torch.cat([links, links.flip(1)])
    adjacency = torch.zeros(NODES, NODES)
    adjacency[both[:, 0], both[:, 1]] = 1
    return adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)


class SAGE(nn.Module):
    def __init__(self, inputs, hidden=24, outputs=16):
        super().__init__()
        self.self1, self.near1 = nn.Linear(inputs, hidden), nn.Linear(inputs, hidden, bias=False)
        self.self2, self.near2 = nn.Linear(hidden, outputs), nn.Linear(hidden, outputs, bias=False)

    def forward(self, features, adjacency, pairs):
        h = torch.relu(self.self1(features) + self.near1(adjacency @ features))
        z = self.self2(h) + self.near2(adjacency @ h)
        return (z[pairs[:, 0]] * z[pairs[:, 1]]).sum(1)


def area_under_curve(positive, negative):
    return (positive[:, None] > negative[None]).float().mean().item()


def train(args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    features, links, test_links = make_graph()
    adjacency = mean_of_neighbors(links)
    test_others = torch.randint(NODES, (400, 2), generator=torch.Generator().manual_seed(99))

    torch.manual_seed(args.seed)
    model = DDP(SAGE(features.shape[1]))
    global_batch = args.batch_size * world_size
    steps_per_epoch = -(-len(links) // global_batch)
    total_steps = args.epochs * steps_per_epoch
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * global_batch / 32, momentum=0.9, weight_decay=1e-4
    )
    warmup = 3
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 1 - step / total_steps),
    )
    for epoch in range(args.epochs):
        draw = torch.Generator().manual_seed(1000 * args.seed + epoch)
        order = torch.randperm(len(links), generator=draw)
        others = torch.randint(NODES, links.shape, generator=draw)
        loss_of_epoch = torch.zeros(())
        for step in range(steps_per_epoch):
            span = slice(step * global_batch, (step + 1) * global_batch)
            batch = order[span]
            mine = batch[rank::world_size]
            pairs = torch.cat([links[mine], others[span][rank::world_size]])
            linked = torch.zeros(len(pairs))
            linked[: len(mine)] = 1
            scores = model(features, adjacency, pairs)
            # The last batch may not be divisible: a mean over the pairs of all processes.
            loss = F.binary_cross_entropy_with_logits(scores, linked, reduction="sum")
            loss = loss * world_size / (2 * len(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_of_epoch += loss.detach() * len(batch) / world_size
        dist.all_reduce(loss_of_epoch)
        with torch.no_grad():
            positive = model.module(features, adjacency, test_links)
            negative = model.module(features, adjacency, test_others)
        if rank == 0:
            auc = area_under_curve(positive, negative)
            print(f"Epoch {epoch:02d} | loss {loss_of_epoch / len(links):.5f} | test AUC {auc:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32, help="links per process")
    parser.add_argument("--lr", type=float, default=0.02, help="for 32 links")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    dist.init_process_group(backend="gloo")
    train(options)
    dist.destroy_process_group()
