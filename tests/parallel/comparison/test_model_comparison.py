"""A divided model that differs from the whole one is found, whatever its outputs are."""

import pytest
import torch
from torch import nn

from paceline.parallel.comparison.model_comparison import (
    DividedModelError,
    Division,
    compare_model,
)


class OneRank(Division):
    """A model that is "divided" on one rank, where its outputs get an error."""

    subject, cause, device = "the model", "HINT: none", "cpu"

    def __init__(self, model, error):
        self.model, self.error = model, error

    def pieces(self, tensor):
        return [tensor]

    def whole(self):
        return self.model(torch.linspace(-1, 1, 12).view(3, 4))

    def divided(self):
        return self.error(self.whole())


class Net(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.layer, self.end = nn.Linear(4, 4), end

    def forward(self, x):
        return self.end(self.layer(x))


def compared(end, error):
    torch.manual_seed(0)
    model = Net(end)
    return compare_model(model, OneRank(model, error), takes_gradients=True)


ENDS = {
    "real": lambda x: x,
    "one infinite": lambda x: torch.cat([x, torch.full((3, 1), -torch.inf)], 1),
    "one not a number": lambda x: torch.cat([x, torch.full((3, 1), torch.nan)], 1),
    "complex": lambda x: torch.complex(x, x.sin()),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_difference_of_any_outputs_is_an_error(name):
    end = ENDS[name]
    assert compared(end, lambda out: out).difference == 0
    # of the outputs alone: the gradients are equal
    for wrong in (lambda out: out + 0.01 * out.detach(), lambda out: out + torch.nan):
        with pytest.raises(DividedModelError, match="output 1"):
            compared(end, wrong)


def test_a_model_without_floating_point_outputs_is_not_called_equal():
    found = compared(lambda x: x.argmax(1), lambda out: out + 1)
    assert found.difference is None
    assert found.reason == "it returns no floating-point tensors"
