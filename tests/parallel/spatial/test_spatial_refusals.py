"""What parts of samples refuse, beside the operations of test_spatial_layers.py."""

import pytest
import thread_ranks
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


@pytest.mark.parametrize(
    ("layer", "name"), [(nn.Conv2d(3, 2, 3), "0"), (nn.GroupNorm(1, 3), "0"), (nn.ReLU(), "")]
)
def test_gradients_of_gradients_are_refused_with_the_name_of_the_layer(layer, name):
    """They would be those of this rank's part."""

    def train(world):
        model = nn.Sequential(layer, nn.Conv2d(2 if type(layer) is nn.Conv2d else 3, 1, 1))
        model = world.distribute(model, layout="h2", compare=False)
        found = model(torch.randn(1, 3, 8, 5))
        loss = found.local.square().sum() if name else F.mse_loss(found, torch.zeros(1, 1, 8, 5))
        where = rf"{name} \({type(layer).__name__}\)|1 \(Conv2d\)" if name else "the script"
        with pytest.raises(ValueError, match=rf"({where}): gradients of gradients .*HINT"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)

    thread_ranks.run(train)


def test_the_hint_for_a_sample_of_one_row_is_a_layout_without_the_axis():
    def train(world):
        model = world.distribute(nn.Conv2d(3, 2, 1), layout="h2", compare=False)
        with pytest.raises(
            ValueError, match=r"1 row along the height for 2 ranks\. HINT: a layout w"
        ):
            model(torch.randn(1, 3, 1, 5))

    thread_ranks.run(train)
