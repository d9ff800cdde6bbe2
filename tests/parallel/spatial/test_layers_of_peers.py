"""The layers and shapes of the table in docs/explanation/spatial-layouts.md, on two ranks."""

import copy
import re
import sys
from pathlib import Path

import thread_ranks
import torch
from torch import nn

import paceline

ROOT = Path(paceline.__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks/scripts/layouts"))
from spatial_models import LAYERS  # noqa: E402

PAGE = ROOT / "docs/explanation/spatial-layouts.md"
TOLERANCE = 1e-12


def differences(world):
    """Return the layers of the table that are not those of the whole sample."""
    wrong = []
    for number, (name, cases) in enumerate(LAYERS.items()):
        for case, (layer, shape) in enumerate(cases):
            torch.manual_seed(100 * number + case)
            # a layer before it, so that it gets a gradient for its input
            plain = nn.Sequential(nn.Conv2d(4, 4, 1), copy.deepcopy(layer)).double()
            model = world.distribute(copy.deepcopy(plain), layout="h2", compare=False)
            x = torch.randn(shape, dtype=torch.float64)
            found, wanted = world.whole(model(x)), plain(x)
            weights = torch.randn(wanted.shape, dtype=torch.float64)
            (found * weights).sum().backward()
            (wanted * weights).sum().backward()
            pairs = [(found, wanted)]
            pairs += [
                (a.grad, b.grad)
                for a, b in zip(model.parameters(), plain.parameters(), strict=True)
            ]
            scale = max(b.norm().item() for _, b in pairs)
            if any((a - b).norm().item() > TOLERANCE * scale for a, b in pairs):
                wrong.append(name)
    return wrong


def test_layers_that_peers_were_tried_with_are_right():
    assert thread_ranks.run(differences) == [[], []]


def test_the_table_of_the_page_has_these_layers():
    rows = re.findall(
        r"^\| ([^|]+?) \| [^|]+ \| [^|]+ \| right \|$", PAGE.read_text(), re.MULTILINE
    )
    assert rows == list(LAYERS)
