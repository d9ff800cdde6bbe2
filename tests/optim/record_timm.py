"""Record updates of timm's Lars and Lamb, with which the tests compare: ``timm_updates.json``.

timm itself cannot be imported beside a PyTorch without a matching torchvision, but its optimizers
need no other file of it::

    pip download --no-deps timm && python -m zipfile -e timm-*.whl timm-files
    python tests/optim/record_timm.py timm-files
"""

import importlib
import json
import sys
import types
from pathlib import Path

import torch

OUT = Path(__file__).with_name("timm_updates.json")
SHAPES = {"layer": (8, 5), "bias": (6,), "zeros": (3, 4)}
DECAYS = {"layer": 0.01, "bias": 0.0, "zeros": 0.01}  # timm scales layers with a weight decay
OPTIONS = {
    "Lars": {"lr": 0.5, "momentum": 0.9, "trust_coeff": 0.02},
    "Lamb": {"lr": 0.5, "betas": (0.8, 0.99), "eps": 1e-6, "max_grad_norm": None},
}
STEPS = 4


def updates(kind, start, gradients):
    """Return the parameters after each step."""
    params = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    groups = [{"params": [p], "weight_decay": DECAYS[name]} for name, p in params.items()]
    optimizer, found = kind(groups, **OPTIONS[kind.__name__]), []
    for of_step in gradients:
        for name, parameter in params.items():
            parameter.grad = of_step[name].clone()
        optimizer.step()
        found.append({name: p.detach().tolist() for name, p in params.items()})
    return found


def main(folder):
    """Load the two files without ``timm/__init__.py``, and write what they compute."""
    package = types.ModuleType("timm_optim")
    package.__path__ = [str(Path(folder) / "timm/optim")]
    sys.modules["timm_optim"] = package
    version = {}
    exec((Path(folder) / "timm/version.py").read_text(), version)
    torch.manual_seed(0)
    draw = lambda name: torch.randn(SHAPES[name], dtype=torch.float64)  # noqa: E731
    start = {name: draw(name) for name in SHAPES}
    start["zeros"].zero_()
    gradients = [{name: draw(name) for name in SHAPES} for _ in range(STEPS)]
    found = {"timm": version["__version__"], "decays": DECAYS, "options": OPTIONS}
    found["start"] = {name: value.tolist() for name, value in start.items()}
    found["gradients"] = [{n: g.tolist() for n, g in of.items()} for of in gradients]
    for name in OPTIONS:
        kind = getattr(importlib.import_module(f"timm_optim.{name.lower()}"), name)
        found[name] = updates(kind, start, gradients)
    OUT.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
