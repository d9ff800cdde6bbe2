"""What layers on parts of samples print and raise, and convolutions of complex numbers."""

import copy

import pytest
import thread_ranks
import torch
from torch import nn

from paceline.parallel.spatial.split_tensor import SplitTensor


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x):
        x = self.conv(x)
        return x + torch.fft.fft2(x, norm="ortho").real


@pytest.mark.parametrize("given", ["whole samples", "parts"])
def test_the_bytes_that_a_layer_gathers_are_printed_once(given):
    said = [[], []]

    def train(world):
        torch.manual_seed(0)
        world._progress.say_once = said[world.rank].append
        model = world.distribute(Fourier(), layout="h2")
        x = torch.randn(1, 1, 256, 256)
        for _ in range(2):
            model(world.part(x) if given == "parts" else x)

    thread_ranks.run(train)
    # not those of the corner that is compared with the whole model
    assert [line for line in said[0] if "gathers" in line] == [
        "the model (Fourier): fft2 reads all positions, so each rank gathers 0.5 MiB in each "
        "forward"
    ]


def test_attention_gathers_a_tensor_that_it_is_given_three_times_once(monkeypatch):
    gathered = []
    whole = SplitTensor.whole
    monkeypatch.setattr(SplitTensor, "whole", lambda one: gathered.append(one) or whole(one))

    def train(world):
        torch.manual_seed(0)
        heads = nn.MultiheadAttention(64, 2, batch_first=True)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.heads = heads

            def forward(self, x):
                x = x.transpose(1, 2)
                return self.heads(x, x, x)[0]

        x = torch.randn(1, 64, 512)
        expected = Net()(x)
        torch.testing.assert_close(world.distribute(Net(), layout="w2", compare=False)(x), expected)

    thread_ranks.run(train)
    assert len(gathered) == 2  # once on each rank


@pytest.mark.parametrize("axis", ["w", "h"])
def test_convolutions_of_complex_numbers(axis):
    def train(world):
        torch.manual_seed(0)
        plain = nn.Conv2d(2, 2, 3, padding=1, stride=(2, 1), dtype=torch.complex128)
        model = world.distribute(copy.deepcopy(plain), layout=f"{axis}2")
        x = torch.randn(2, 2, 8, 5, dtype=torch.complex128)
        world.whole(model(x)).abs().square().sum().backward()
        plain(x).abs().square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)

    thread_ranks.run(train)


def test_a_second_backward_is_not_called_a_change_in_place():
    def train(world):
        torch.manual_seed(0)
        model = world.distribute(nn.Conv2d(1, 2, 3), layout="h2", compare=False)
        loss = world.whole(model(torch.randn(1, 1, 8, 5))).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time") as found:
            loss.backward()
        assert "inplace" not in str(found.value)

    thread_ranks.run(train)
