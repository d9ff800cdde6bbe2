"""Energies and forces of molecules from pairwise distances, with Paceline's own loop."""

import torch
from torch import nn

import paceline

ATOMS, BATCH, RADIAL = 12, 128, 24


class PairPotential(nn.Module):
    """Sum over atom pairs of a learned function of their distance."""

    def __init__(self, dim=64):
        super().__init__()
        first, second = torch.triu_indices(ATOMS, ATOMS, 1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)
        self.register_buffer("centres", torch.linspace(0.5, 5.0, RADIAL))
        self.energy = nn.Sequential(
            nn.Linear(RADIAL, dim), nn.Softplus(), nn.Linear(dim, dim), nn.Softplus(),
            nn.Linear(dim, 1),
        )  # fmt: skip

    def forward(self, positions):
        apart = positions[:, self.first] - positions[:, self.second]
        distance = apart.square().sum(-1).add(1e-6).sqrt()
        basis = torch.exp(-2 * (distance.unsqueeze(-1) - self.centres).square())
        # <forward h=basis>
        return self.energy(basis).sum((1, 2))


class Molecules(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.positions = 2 * torch.randn(count, ATOMS, 3, generator=generator)
        self.energies = self.positions.square().sum((1, 2))
        self.forces = -2 * self.positions

    def __len__(self):
        return len(self.positions)

    def __getitem__(self, number):
        place = self.positions[number]
        # <sample x=place i=number>
        return place, self.energies[number], self.forces[number]


def main():
    world = paceline.init(seed=0)
    # <start rank=world.rank world=world.size>
    potential = PairPotential()
    # <model model=potential>
    optimizer = torch.optim.Adam(potential.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Molecules(25_600), BATCH, shuffle=True, drop_last=True)
    loader = world.shard(loader)
    model, optimizer = world.distribute(potential, optimizer)
    step = 0
    for _ in world.epochs(10_000):
        for positions, energy, forces in world.batches(loader):
            positions.requires_grad_()
            # <batch x=positions>
            predicted = model(positions)
            (slope,) = torch.autograd.grad(predicted.sum(), positions, create_graph=True)
            loss = (predicted - energy).square().mean() + (slope + forces).square().mean()
            # <loss loss=loss model=potential again=potential(positions) x=positions>
            world.backward(loss)
            # <backward model=potential loss=loss>
            world.step(optimizer)
            step += 1
            # <step model=potential optimizer=optimizer loss=loss step=step rank=world.rank>


if __name__ == "__main__":
    main()
