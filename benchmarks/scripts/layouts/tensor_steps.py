"""Step times and bytes of parameters of a perceptron in a layout, on the ranks of the job."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  usual name
from torch import nn

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--layout", required=True)
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--layers", type=int, required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
args = parser.parse_args()

torch.set_num_threads(1)
world = paceline.init(progress=False, record=False)
torch.manual_seed(0)
layers: list[nn.Module] = []
for _ in range(args.layers):
    layers += [nn.Linear(args.width, args.width), nn.ReLU()]
model = nn.Sequential(*layers[:-1])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
options = {"compare": False} if world.size > 1 else {}
model, optimizer = world.distribute(model, optimizer, layout=args.layout, **options)
x, y = torch.randn(args.batch, args.width), torch.randn(args.batch, args.width)
times = []
for _ in range(args.steps + 1):
    start = time.perf_counter()
    world.forward_backward(model, x, y, loss=F.mse_loss)
    world.step(optimizer)
    times.append(time.perf_counter() - start)
size = sum(parameter.nbytes for parameter in model.parameters())
if world.rank == 0:
    args.out.write_text(json.dumps({"step_s": times[1:], "parameter_bytes": size}))
