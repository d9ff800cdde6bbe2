"""A potential of small molecules, fitted to energies and forces. The parameters are a dict of
tensors, and all that is done with them is a function.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

BATCH = int(os.environ.get("MOLECULES", 12))  # of a step, on all ranks
EPOCHS = int(os.environ.get("EPOCHS", 4))
MOST = 9  # atoms of a molecule


def pairs(positions, mask):
    """Distances of all pairs of atoms, and which of the pairs are there."""
    there = mask[:, :, None] & mask[:, None, :] & ~torch.eye(MOST, dtype=torch.bool)
    between = positions[:, :, None] - positions[:, None, :]
    squares = torch.where(there, between.square().sum(-1), 1.0)
    return squares.sqrt(), there


def morse(kinds, positions, mask):
    """The reference: a Morse potential between atoms of two kinds."""
    distance, there = pairs(positions, mask)
    depth = 0.5 + 0.25 * (kinds[:, :, None] + kinds[:, None, :])
    energy = depth * ((1 - (-1.5 * (distance - 1.2)).exp()) ** 2 - 1)
    return torch.where(there, energy, 0.0).sum((1, 2)) / 2


def forces_of(energy_of, positions, **more):
    positions = positions.detach().requires_grad_()
    energy = energy_of(positions)
    (slope,) = torch.autograd.grad(energy.sum(), positions, **more)
    return energy, -slope


def molecules(count, seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(MOST) < torch.randint(2, MOST + 1, (count, 1), generator=g)
    grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3)
    sites = torch.stack([grid[torch.randperm(27, generator=g)[:MOST]] for _ in range(count)])
    positions = 1.2 * sites + 0.1 * torch.randn(count, MOST, 3, generator=g)
    kinds = torch.randint(2, (count, MOST), generator=g)
    energy, forces = forces_of(lambda at: morse(kinds, at, mask), positions)
    return kinds, positions, mask, energy.detach(), forces


class Potential(nn.Module):
    def __init__(self, width=24, radial=12):
        super().__init__()
        self.register_buffer("centres", torch.linspace(0.6, 4.0, radial))
        self.species = nn.Embedding(2, radial)
        self.atom = nn.Sequential(
            nn.Linear(2 * radial, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.energy = nn.Linear(width, 1)

    def forward(self, kinds, positions, mask):
        distance, there = pairs(positions, mask)
        basis = (-4 * (distance[..., None] - self.centres) ** 2).exp() * there[..., None]
        species = self.species(kinds)
        around = torch.einsum("bijr,bjr->bir", basis, 1 + species)
        energy = self.energy(self.atom(torch.cat([around, species], -1))).squeeze(-1)
        return (energy * mask).sum(1)


def errors(model, params, batch):
    """Sums of squared errors of energies and of components of forces."""
    kinds, positions, mask, energy, forces = batch
    call = partial(functional_call, model, params)
    told, pull = forces_of(lambda at: call((kinds, at, mask)), positions, create_graph=True)
    off = (pull - forces) * mask[..., None]
    return (told - energy).square().sum(), off.square().sum()


def counts(batch):
    """Molecules, and components of the forces on their atoms."""
    mask = batch[2]
    return torch.tensor([float(len(mask)), 3.0 * mask.sum().item()])


def summed(tensors):
    """The sums of tensors over the ranks, in one exchange."""
    flat = torch.cat([one.reshape(-1) for one in tensors])
    dist.all_reduce(flat)
    parts = flat.split([one.numel() for one in tensors])
    return [part.view_as(one) for part, one in zip(parts, tensors)]


def update(model, params, optimizer, batch):
    (total,) = summed([counts(batch)])
    energy, force = errors(model, params, batch)
    loss = 0.1 * energy / total[0] + force / total[1]
    grads = torch.autograd.grad(loss, list(params.values()))
    for tensor, grad in zip(params.values(), summed(grads)):
        tensor.grad = grad
    nn.utils.clip_grad_norm_(params.values(), 25.0)
    optimizer.step()
    return torch.stack([energy.detach(), force.detach(), *counts(batch)])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = molecules(173, seed=3), molecules(50, seed=4)
    torch.manual_seed(0)
    model = Potential()
    params = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(params.values(), lr=0.01, momentum=0.9, nesterov=True)
    shuffle = torch.Generator().manual_seed(5)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train[0]), generator=shuffle)
        sums = torch.zeros(4)
        for step in order.split(BATCH):
            own = step[rank::world]
            sums += update(model, params, optimizer, [one[own] for one in train])
        own = [one[rank::world] for one in test]
        held = torch.stack([one.detach() for one in errors(model, params, own)])
        sums, held, total = summed([sums, held, counts(own)])
        if rank == 0:
            (e, f), (te, tf) = (sums[:2] / sums[2:]).sqrt(), (held / total).sqrt()
            print(f"epoch {epoch}  train E {e:.4f} F {f:.4f}  test E {te:.4f} F {tf:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
