"""Profile of operators: what a step computes, by line of the script, and what it need not compute.

Each test trains a small model with a known fault for a few steps, in this process.
"""

import io
import json
from collections.abc import Callable

import msgspec
import pytest
import torch
from rich.console import Console, Group
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline.analyze.diagnosis.causes import operator_causes
from paceline.analyze.diagnosis.operator_profile import (
    OperatorProfile,
    combine_profiles,
    profile_notes,
)
from paceline.analyze.diagnosis.rules.operators import findings, products
from paceline.analyze.records.operator_file import OperatorFile, read_operator_files
from paceline.record.experiments.operators.operator_profile import (
    OperatorRun,
    padded_share,
    write_rows,
)
from paceline.report.diagnosis.profile_tables import operators_section
from paceline.report.terminal.draw import draw

SIDE = 192


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def profile(tmp_path):
    """Return a function that profiles the steps of a model, as a share of all their operators."""

    def profiled(model: nn.Module, loss=None, optimizer=None, data=None) -> OperatorProfile:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
        loss = loss or (lambda output: output.square().mean())
        run = OperatorRun([optimizer], step_s=1e-6)
        run.start()
        while True:
            optimizer.zero_grad()
            loss(model(torch.randn(SIDE, SIDE) if data is None else data)).backward()
            optimizer.step()
            if run.after_step():
                break
        write_rows(tmp_path / "rank-0.ring", run.finish())
        files, notes = read_operator_files(tmp_path)
        assert not notes
        found = combine_profiles(files, notes)
        assert found is not None
        assert not found.notes
        return found

    return profiled


def found_in(profile: OperatorProfile) -> dict[str, list[str]]:
    """Return the ids of all findings, with the text of their lines."""
    return {one.id: [line["code"] for line in one.lines] for one in findings(profile)}


class Model(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIDE, SIDE, bias), nn.Linear(SIDE, SIDE, bias)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


def test_healthy_model_has_no_finding_and_its_products_are_named(profile):
    found = profile(Model(functional.relu))
    assert found_in(found) == {}
    names = {(one.row.operator, one.row.phase, one.row.module) for one in products(found)}
    assert ("mm", "backward", "Model.second") in names
    assert ("addmm", "forward", "Model.first") in names
    first = next(one for one in found.operators if one.row.operator == "addmm")
    assert first.code == "return self.second(self.between(self.first(x)))"
    assert first.row.flops == 2 * SIDE**3
    assert first.row.shapes == ", ".join([f"float32[{SIDE}]", *[f"float32[{SIDE}x{SIDE}]"] * 2])


def test_terminal_names_the_products_of_a_healthy_model(profile):
    said = shown(profile(Model(functional.relu)))
    assert "Operators take" in said
    assert "No unneeded work inside the model takes 5 % of a step or more. The" in said
    assert "of the roofline: " in said
    assert "mm of float32[192x192], float32[192x192] in Model.second" in said


def test_terminal_names_the_lines_and_the_remedy(profile):
    said = shown(profile(Model(permuted)))
    assert "copies, at most " in said
    assert "test_operator_profile.py:" in said
    assert "HINT: keep one order of dimensions" in said


def test_a_finding_is_a_cause_unless_a_cause_has_its_id(profile):
    found = findings(profile(Model(permuted)))
    (cause,) = operator_causes(found, [])
    assert cause.id == "copies"
    assert "not confirmed by an experiment" in cause.sentence
    assert cause.interval == (0.0, cause.share)
    assert cause.evidence["remedy"]
    assert operator_causes(found, [cause]) == []


def test_waits_for_a_core_lengthen_the_operators():
    run = OperatorRun([], step_s=1.0, core_wait=2.0)
    run.start()
    torch.mm(torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE))
    run.after_step()
    content = run.finish()
    file = msgspec.convert(content | {"steps": 1}, OperatorFile)
    found = combine_profiles([file], [])
    assert found.share(0.1) == pytest.approx(0.2)


def test_compiled_code_is_not_diagnosed():
    run = OperatorRun([], step_s=1.0)
    run.start()
    file = msgspec.convert(run.finish() | {"steps": 1, "compiled": True}, OperatorFile)
    assert combine_profiles([file], []) is None
    assert "torch.compile" in profile_notes([file], [])[0]


def shown(found: OperatorProfile) -> str:
    console = Console(width=200, file=io.StringIO())
    for section in operators_section(found):
        console.print(Group(*draw(section.blocks)))
    return " ".join(console.file.getvalue().split())


def test_operators_of_backward_belong_to_lines_of_forward(profile):
    found = profile(Model(lambda x: torch.sin(x)))
    cos = next(one for one in found.operators if one.row.operator == "cos")
    assert cos.row.phase == "backward"
    assert "torch.sin(x)" in cos.code


def test_operators_of_the_optimizer_belong_to_its_step(profile):
    found = profile(Model(functional.relu))
    update = next(one for one in found.operators if one.row.phase == "optimizer")
    assert update.code == "optimizer.step()"


def permuted(x):
    for _ in range(4):
        x = x.view(16, 12, SIDE).permute(2, 1, 0).contiguous().view(SIDE, SIDE)
    return x


def cast(x):
    for _ in range(4):
        x = x.to(torch.float64).to(torch.float32)
    return x


@pytest.mark.parametrize("between", [permuted, cast])
def test_copies_are_found_with_their_line(profile, between):
    lines = found_in(profile(Model(between)))["copies"]
    assert "permute" in lines[0] or "float64" in lines[0]


def test_small_operators_in_a_loop_are_found(profile):
    found = profile(Model(lambda x: small_steps(x)))
    assert any("number" in line for line in found_in(found)["small-operators"])


def small_steps(x):
    value = x[0, 0]
    for number in range(2000):
        value = value + number
    return x + value


class Twice(Model):
    def forward(self, x):
        return self.second(self.first(x)) * self.first(x)


def test_repeated_module_is_found(profile):
    assert found_in(profile(Twice(functional.relu))) == {
        "recomputation": ["return self.second(self.first(x)) * self.first(x)"]
    }


def test_module_on_other_values_is_not_a_repetition(profile):
    def between(x):
        return model.second(model.second(x) + 1)

    model = Model(between)
    assert found_in(profile(model)) == {}


def test_forward_with_other_dropout_is_not_a_repetition(profile):
    class Pair(Model):
        def forward(self, x):
            first, other = self.first(functional.dropout(x)), self.first(functional.dropout(x))
            return self.second(first + other)

    assert "recomputation" not in found_in(profile(Pair(functional.relu)))


def test_forward_after_an_update_in_place_is_not_a_repetition(profile):
    class Changed(Model):
        def forward(self, x):
            with torch.no_grad():
                first = self.first(x)
            x.add_(1)
            return self.second(first + self.first(x))

    assert "recomputation" not in found_in(profile(Changed(functional.relu)))


class Checkpointed(Model):
    def forward(self, x):
        return checkpoint(
            lambda x: self.second(self.first(x).tanh()).tanh(), x, use_reentrant=False
        )


def test_activation_checkpointing_is_named(profile):
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    assert list(found_in(profile(Checkpointed(functional.relu), data=x))) == [
        "activation-checkpointing"
    ]


def test_checkpointing_of_a_module_of_torch_is_named(profile):
    model = Model(torch.tanh)
    gru = nn.GRU(SIDE, SIDE, batch_first=True)
    model.first = nn.Identity()
    model.first.gru = gru
    model.first.forward = lambda x: checkpoint(gru, x[:, None], use_reentrant=False)[0][:, 0]
    assert "activation-checkpointing" in found_in(profile(model))


def test_evaluation_of_the_same_values_is_no_recomputation(profile):
    model = Model(functional.relu)
    held_out = torch.randn(SIDE, SIDE)

    def loss(output):
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(held_out)
        model.train()
        return output.square().mean()

    assert found_in(profile(model, loss)) == {}


class GradientNorms:
    """Loss whose gradients are computed before ``backward`` computes them again."""

    def __init__(self, model: nn.Module, create_graph: bool = False) -> None:
        self.model, self.create_graph = model, create_graph

    def __call__(self, output):
        loss = output.square().mean()
        gradients = torch.autograd.grad(
            loss, [*self.model.parameters()], retain_graph=True, create_graph=self.create_graph
        )
        self.norms = [one.norm() for one in gradients]
        return loss + sum(self.norms) * self.create_graph


def test_gradients_that_are_computed_twice_are_found_where_the_first_backward_begins(profile):
    model = Model(functional.relu)
    found = profile(model, GradientNorms(model))
    assert found_in(found)["second-backward"] == ["gradients = torch.autograd.grad("]


def test_backward_of_second_order_is_no_second_backward(profile):
    model = Model(torch.tanh)
    assert "second-backward" not in found_in(profile(model, GradientNorms(model, True)))


def test_padding_is_found_where_it_is_made(profile):
    encoder, sequences = Model(functional.relu), torch.randn(12, 16, SIDE)

    class Padded(nn.Module):
        """The script's loop: what it pads is the input of the model."""

        def __call__(self, x):
            padded = functional.pad(sequences, (0, 0, 0, 8))
            return encoder(padded)

    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-3)
    found = findings(profile(Padded(), optimizer=optimizer))
    padding = next(one for one in found if one.id == "padding")
    assert padding.sentence.startswith("33 % of the model's input is padding, made in line ")
    assert padding.lines[0]["code"] == "padded = functional.pad(sequences, (0, 0, 0, 8))"
    assert 0.1 < padding.share < 0.34


@pytest.mark.parametrize(("pads", "named"), [(True, ["padding"]), (False, [])])
def test_border_of_images_is_padding_only_if_the_script_adds_it(pads, named, profile):
    encoder = nn.Conv2d(1, 8, 5)
    images = torch.rand(16, 1, 48, 32)
    bordered = functional.pad(images, (0, 16))

    class Images(nn.Module):
        def __call__(self, x):
            batch = functional.pad(images, (0, 16)) if pads else bordered
            return encoder(batch.contiguous(memory_format=torch.channels_last))

    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-3)
    found = findings(profile(Images(), optimizer=optimizer))
    assert [one.id for one in found if one.id == "padding"] == named


@pytest.mark.parametrize(
    ("tensor", "share"),
    [
        (torch.ones(4, 10).cumsum(1), 0.0),  # other features in each column
        (torch.tensor([[5, 6, 7, 0, 0], [5, 6, 0, 0, 0]]), 0.5),  # tokens
        (torch.tensor([[5, 6, 7, 0, 0], [5, 0, 7, 8, 9]]), 0.2),  # a token in the middle
        (functional.pad(torch.rand(3, 4, 6) + 1, (0, 2)), 0.25),  # (batch, channels, length)
        (functional.pad(torch.rand(3, 6) + 1, (0, 2)), 0.25),
        (torch.zeros(3, 4, 6), 0.0),
        (functional.pad(torch.rand(2, 3, 8, 8) + 1, (0, 8)), 0.5),  # images
        (functional.pad(torch.rand(2, 1, 8, 8) + 1, (0, 0, 0, 8)), 0.5),
    ],
)
def test_padded_share(tensor, share):
    assert padded_share((tensor,))[1] == pytest.approx(share)


def test_forward_after_an_equal_one_that_is_not_used_is_no_repetition(profile):
    class Twice(Model):
        def forward(self, x):
            self.unused = super().forward(x)
            return super().forward(x)

    found = findings(profile(Twice(functional.relu)))
    assert [one.id for one in found] == ["unused-output"]


class Unused(Model):
    def forward(self, x):
        hidden = self.first(x)
        self.auxiliary = self.second(hidden.detach())
        return hidden


def test_module_whose_output_is_not_used_is_found(profile):
    assert found_in(profile(Unused(functional.relu)))["unused-output"] == [
        "self.auxiliary = self.second(hidden.detach())"
    ]


def test_output_that_a_later_step_reads_is_used(profile):
    class Later(Model):
        last = None

        def forward(self, x):
            hidden = self.first(x)
            if self.last is not None:
                self.seen = self.last.sum().item()
            self.last = self.second(hidden.detach())
            return hidden

    assert "unused-output" not in found_in(profile(Later(functional.relu)))


def test_gradients_that_no_optimizer_uses_are_found(profile):
    model = Model(functional.relu)
    head = torch.optim.SGD(model.second.parameters(), lr=1e-3)
    found = profile(model, optimizer=head)
    assert list(found_in(found)) == ["unneeded-gradient"]
    unneeded = {one.row.module for one in found.operators if one.row.unneeded_s}
    assert "Model.first" in unneeded
    assert "Model.second" not in unneeded


def test_frozen_parameters_have_no_unneeded_gradient(profile):
    model = Model(functional.relu)
    model.first.requires_grad_(False)
    assert found_in(profile(model)) == {}


def in_float64(x):
    x = x * torch.ones(SIDE, 1, dtype=torch.float64)
    for _ in range(5):
        x = torch.sin(x)
    return x.float()


def test_float64_in_a_float32_model_is_found_where_it_begins(profile):
    found = next(one for one in findings(profile(Model(in_float64))) if one.id == "precision")
    assert "torch.float64" in found.evidence["origins"][0]["code"]


def distances(x):
    return (x[:, None, :] - x[None, :, :]).square().sum(-1)


@pytest.mark.long
def test_small_operators_of_a_recurrent_layer_are_not_a_loop_of_the_script(profile):
    gru = nn.GRU(8, 8, batch_first=True)
    found = profile(gru, lambda out: out[0].square().mean(), data=torch.randn(4, 300, 8))
    assert "small-operators" not in found_in(found)


def test_large_intermediate_is_found(profile):
    lines = found_in(profile(Model(distances)))["large-intermediate"]
    assert lines == ["return (x[:, None, :] - x[None, :, :]).square().sum(-1)"]


def distances_by_line(x):
    difference = x[:, None, :] - x[None, :, :]
    squares = difference.square()
    return squares.sum(-1)


def test_operators_that_read_a_large_intermediate_belong_to_it(profile):
    lines = found_in(profile(Model(distances_by_line)))["large-intermediate"]
    assert "squares = difference.square()" in lines
    assert "return squares.sum(-1)" in lines


def test_profile_changes_no_numbers():
    def train(profiled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = Model(functional.relu)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = OperatorRun([optimizer], step_s=1e-3)
        if profiled:
            run.start()
        for _ in range(5):
            optimizer.zero_grad()
            functional.dropout(model(torch.randn(SIDE, SIDE))).square().mean().backward()
            optimizer.step()
            if profiled:
                run.after_step()
        if profiled:
            run.finish()
        return model.first.weight.detach()

    assert torch.equal(train(True), train(False))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps": -1}, "does not match"),
        ({"version": 2}, "version 2"),
        ({"lines": []}, "a line that it does not list"),
    ],
)
def test_damaged_file_is_left_out_with_a_note(profile, tmp_path, change, reason):
    profile(Model(functional.relu))
    path = tmp_path / "rank-0.operators"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    files, notes = read_operator_files(tmp_path)
    assert files == []
    assert reason in notes[0]
