"""Containers that keep tensors of every step are named; those that are reset or bounded are not."""

from collections import deque

import torch

from paceline.record.experiments import observer
from paceline.record.experiments.observer import ContainerSizes
from paceline.study.diagnose.diagnose import growing_notes


class Trainer:
    """Keeps the losses of all steps, as scripts do by mistake."""

    def __init__(self):
        self.history = []
        self.plain = []
        self.last = deque(maxlen=5)


def test_containers_that_keep_tensors_of_each_step_are_named(monkeypatch):
    monkeypatch.setattr(observer, "MAX_OBJECTS", 1 << 30)  # this process also ran other tests
    trainer, outputs, means, cleared = Trainer(), {}, [], []
    weight = torch.ones(4, requires_grad=True)

    def step(number):
        loss = (weight * number).sum()
        trainer.history.append(loss)
        trainer.last.append(loss)
        trainer.plain.append(loss.item())
        outputs[number] = (number, torch.zeros(64, 1024))
        means.append(loss.detach())
        cleared.append(loss)
        if number % 4 == 3:
            cleared.clear()

    step(0)
    sizes = ContainerSizes()
    for number in range(1, 11):
        step(number)
    found = sizes.growing(10)
    assert [(one["name"], one["graphs"]) for one in found] == [
        ("Trainer.history", True),
        ("outputs in test_containers_that_keep_tensors_of_each_step_are_named()", False),
    ]
    assert found[0]["elements"] == 1
    assert found[1]["bytes"] == 64 * 1024 * 4


def test_note_says_what_grows_on_which_ranks():
    class Record:
        def __init__(self, rank, *growing):
            self.rank, self.meta = rank, {"rung": {"growing": list(growing)}}

    history = {"name": "history", "kind": "list", "elements": 1.0, "bytes": 4, "graphs": True}
    outputs = {"name": "a", "kind": "dict", "elements": 2.0, "bytes": 1 << 20, "graphs": False}
    source = "a = {}\nself.history.append(loss)\nif a[0] == 1:\n    a[step] = x\n"
    notes = growing_notes([Record(0, history), Record(1, history, outputs)], source)
    assert notes[0].startswith(
        "the list history grows by 1 element in each step (line 2: self.history.append(loss)) and "
        "keeps tensors with their graphs"
    )
    assert "append loss.item()" in notes[0]
    assert notes[1].startswith("the dict a of rank 1 grows by 2 elements in each step (line 4: ")
    assert "and keeps 1,024 KiB of tensors per step" in notes[1]
