"""What is known of a script from its source and its variables, without running it."""

import ast
from types import SimpleNamespace

import pytest
import torch

from paceline.observe import expressions, user_lines
from paceline.observe.expressions import Scope, UnknownValueError, value_of
from paceline.observe.optimization.schedules import _lengths, end_of, own_schedule, peak_of
from paceline.observe.samples.contents import describe_root
from paceline.observe.samples.sampler_lines import stream_lines


class Config:
    """A configuration with an attribute that is computed."""

    def __init__(self):
        self.epochs = 7

    @property
    def computed(self):
        raise AssertionError


def known(text, monkeypatch):
    monkeypatch.setenv("EPOCHS", "9")
    found = {
        "args": SimpleNamespace(epochs=4),
        "cfg": Config(),
        "options": {"n": 3},
        "torch": torch,
    }
    return value_of(ast.parse(text, mode="eval").body, Scope(found, {}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("args.epochs", 4),
        ("cfg.epochs * 2 + 1", 15),
        ("options['n'] // 2", 1),
        ("int(os.environ.get('EPOCHS', 3))", 9),
        ("max(args.epochs, 5)", 5),
    ],
)
def test_values_of_expressions(text, value, monkeypatch):
    assert known(text, monkeypatch) == value


@pytest.mark.parametrize(
    "text", ["cfg.computed", "torch.randn(3)", "missing", "args.epochs()", "1 // 0", "cfg.other"]
)
def test_code_of_a_script_is_not_run(text, monkeypatch):
    with pytest.raises(UnknownValueError):
        known(text, monkeypatch)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function that runs a text as a script's module, with names it can use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(expressions, "parsed", expressions.parsed.__wrapped__)
    user_lines.is_users_file.cache_clear()

    def run(text, **names):
        path = tmp_path / "train.py"
        path.write_text(text)
        scope = {"__name__": "script", **names}
        exec(compile(text, str(path), "exec"), scope)
        return scope

    return run


RATES = """
def rate_at(step, total):
    return 0.1 * max(0.2, 1 - step / total)
def train():
    step = 4
    lr = rate_at(step, 50)
    for group in optimizer.param_groups:
        group["lr"] = lr
    found.append(own_schedule(["train.py:8"], optimizer))
train()
"""


def test_function_that_sets_the_learning_rate_is_found(script):
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.5)
    found = []
    script(RATES, optimizer=optimizer, found=found, own_schedule=own_schedule)
    (one,) = found
    assert (one.name, one.line) == ("rate_at", "train.py:6")
    assert one.rate(40) == pytest.approx(0.02)
    other = RATES.replace("= lr\n", "= lr * 3\n")  # not what the function returns
    script(other, optimizer=optimizer, found=found, own_schedule=own_schedule)
    assert found[1] is None


def test_lists_of_samples_are_known_by_their_contents():
    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randint(9, (3,), generator=generator), {"label": n}) for n in range(6)]

    one, same, other = (describe_root(made(seed))["root_checksum"] for seed in (0, 0, 1))
    assert one == same != other
    assert describe_root([object()] * 3)["root_checksum"] == 0


STREAMS = """
class Ordered:
    def __iter__(self):
        for at in range(9):
            yield torch.Generator().manual_seed(at), self.sample(at)
    def sample(self, at):
        return at
class Shuffled:
    def __iter__(self):
        yield from self.order()
    def order(self):
        rng = random.Random(3)
        rng.shuffle(self.numbers)
        return self.numbers
"""


def test_line_where_a_stream_shuffles(script):
    found = script(STREAMS)
    assert stream_lines(found["Ordered"]()) == {}
    assert stream_lines(found["Shuffled"]()) == {"sampler_seed_line": "train.py:12"}


def test_end_and_peak_of_a_function_of_the_step():
    warm_up = lambda step: min(step / 5, 1.0) * max(0.0, 1 - step / 50)  # noqa: E731
    assert (end_of(warm_up), peak_of(warm_up)) == (50, pytest.approx(0.9))
    falling = lambda step: min(step / 5, 3.0) * 0.9 ** max(0, step - 15)  # noqa: E731
    assert peak_of(falling) == 3.0


def test_lengths_of_functions_with_equal_variables_are_all_known():
    """A function of its own for each group of parameters."""

    def falling(total):
        return lambda step: max(1 - step / total, 0)

    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [one]} for one in weights], lr=0.1)
    functions = [falling(20), falling(60)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functions)
    assert _lengths(schedule) == {"total": [20, 60]}
