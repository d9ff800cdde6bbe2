"""States of random number generators that a replay sets."""

import random

import numpy
import pytest
import torch

from paceline.observe import generators, user_lines


@pytest.fixture(autouse=True)
def as_script(monkeypatch):
    """Let the functions of this file be those of a script."""
    for module in (generators, user_lines):
        monkeypatch.setattr(module, "is_users_file", lambda file: file == __file__)
    with generators.kept_generators():
        yield


def test_generators_of_torch_numpy_python_and_the_script_draw_the_same_again():
    own, rng = torch.Generator().manual_seed(4), numpy.random.default_rng(5)
    old, plain = numpy.random.RandomState(6), random.Random(7)

    def draw():
        return [
            torch.rand(1).item(),
            torch.rand(1, generator=own).item(),
            numpy.random.rand(),
            random.random(),
            rng.random(),
            old.rand(),
            plain.random(),
        ]

    states = generators.saved_generators()
    first = draw()
    assert draw() != first
    generators.restore_generators(states)
    assert draw() == first
