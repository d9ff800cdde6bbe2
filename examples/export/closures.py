"""Train the closures of the two solvers in this folder, and export them for Fortran and C++.

    paceline run -n 2 examples/export/closures.py --out run

A closure gives what the equations of a solver do not resolve. Both of these have a formula, so that
the solvers can compare the network with it.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline

SAMPLES, BATCH, EPOCHS = 4096, 512, 400


def conductivity(temperature, saturation):
    """Return the thermal conductivity of moist soil: conduction, and transport by vapour."""
    conduction = 0.25 + 1.5 * torch.exp(0.27 * (1 - saturation**-1.06))
    vapour = 0.5 * saturation * (1 - saturation) * torch.exp(0.05 * (temperature - 300))
    return conduction + vapour


def water_flux(water, viscosity_ratio):
    """Return the share of water in a flow of water and oil through rock."""
    return water**2 / (water**2 + (1 - water) ** 2 / viscosity_ratio)


@dataclass(frozen=True)
class Closure:
    """A formula, the ranges of its two inputs, and the units of inputs and output."""

    formula: object
    low: tuple[float, float]
    high: tuple[float, float]
    input_units: str
    output_unit: str


CLOSURES = {
    "conductivity": Closure(conductivity, (270, 0.1), (330, 1), "K, 1", "W/(m K)"),
    "water_flux": Closure(water_flux, (0, 0.5), (1, 2.5), "1, 1", "1"),
}


def sample(closure, count, seed):
    """Return random inputs [count, 2] and the outputs [count, 1], in float64."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (torch.tensor(x, dtype=torch.float64) for x in (closure.low, closure.high))
    x = low + (high - low) * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    return x, closure.formula(x[:, :1], x[:, 1:])


def build_model():
    layers = [nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
    return nn.Sequential(*layers).double()


def train(world, x, y):
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer = world.distribute(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
    loader = world.shard(loader, global_batch=BATCH)
    for _ in world.epochs(EPOCHS):
        for inputs, targets in world.batches(loader):
            world.backward(mse_loss(model(inputs), targets))
            world.step(optimizer)
        scheduler.step()
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder of the model files")
    out = parser.parse_args().out
    world = paceline.init(seed=0)
    if world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    for name, closure in CLOSURES.items():
        x, y = sample(closure, SAMPLES, seed=0)
        (x_mean, x_std), (y_mean, y_std) = ((v.mean(0), v.std(0)) for v in (x, y))
        model = train(world, (x - x_mean) / x_std, (y - y_mean) / y_std)
        fields = {  # the exported model takes and returns values in these units
            "x": {"unit": closure.input_units, "mean": x_mean.tolist(), "std": x_std.tolist()},
            "y": {"unit": closure.output_unit, "mean": y_mean.tolist(), "std": y_std.tolist()},
        }
        file = out / f"{name}.paceline"
        world.export(model, file, inputs="x: float64[batch,2]", fields=fields, backends=["builtin"])
        new_x, new_y = sample(closure, SAMPLES, seed=1)
        with torch.no_grad():
            found = model((new_x - x_mean) / x_std) * y_std + y_mean
        error = (found - new_y).square().mean().sqrt() / new_y.square().mean().sqrt()
        if world.rank == 0:
            print(f"{file}: root mean square error {100 * error:.3f} %", flush=True)


if __name__ == "__main__":
    main()
