"""The line of the user's code, and whether it is a loop."""

import sys

import pytest
import torch

from paceline.observe.samples.sampler_lines import lines_of_sampler
from paceline.observe.user_lines import is_in_loop, place, user_line


class Loader:
    """Notes at each request whether it comes from a loop."""

    def __init__(self):
        self.made, self.advanced = [], []

    def __iter__(self):
        self.made.append(is_in_loop(sys._getframe(1)))
        self.left = 2
        return self

    def __next__(self):
        self.advanced.append(is_in_loop(sys._getframe(1)))
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


def plain(loader):
    for _ in loader:
        pass


def numbered(loader):
    for _ in enumerate(loader):
        pass


def zipped(loader):
    for _ in zip(range(9), loader, strict=False):
        pass


def comprehension(loader):
    return [one + 1 for one in loader]


@pytest.mark.parametrize("read", [plain, numbered, zipped, comprehension])
def test_loops_are_recognized(read):
    loader = Loader()
    read(loader)
    assert loader.made == [True]
    assert all(loader.advanced)


def test_single_batches_are_no_loop():
    loader = Loader()
    iterator = iter(loader)
    next(iterator)
    next(iter(loader))
    assert loader.made == [False, False]
    assert loader.advanced == [False, False]


def test_line_of_this_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name, _, line = user_line().rpartition(":")
    assert name == __file__
    assert int(line) == test_line_of_this_file.__code__.co_firstlineno + 2


class Part:
    """A sampler of a script."""

    def __iter__(self):
        generator = torch.Generator()
        generator.manual_seed(0)
        order = torch.randperm(8, generator=generator)
        return iter(order[::2].tolist())


def test_lines_of_an_own_sampler():
    first = Part.__iter__.__code__.co_firstlineno
    here = place(__file__, 0).rpartition(":")[0]
    assert lines_of_sampler(Part()) == {
        "sampler_line": f"{here}:{first}",
        "sampler_seed_line": f"{here}:{first + 2}",
        "sampler_return_line": f"{here}:{first + 4}",
    }
    assert lines_of_sampler(torch.utils.data.SequentialSampler(range(8))) == {}
