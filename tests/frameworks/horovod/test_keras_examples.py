"""The examples of Keras: equal accuracy on any number of ranks, and what their records contain."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import ranks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/keras"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="tensorflow is not installed: make test-frameworks",
)


def accuracy_of(text):
    (found,) = re.findall(r"accuracy ([\d.]+)", text)
    return float(found)


def train(folder, script, count, backend, launcher="paceline"):
    shutil.copy(EXAMPLES / script, folder)
    variables = {"KERAS_BACKEND": backend, **QUIET}
    return ranks.run(
        folder / script, ranks=count, launcher=launcher, timeout=300, **variables
    ).stdout


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The accuracy of one process."""
    return accuracy_of(train(tmp_path_factory.mktemp("one"), "digits_one.py", 1, "torch"))


@pytest.mark.parametrize(
    ("script", "count", "backend"),
    [
        ("digits_horovod.py", 1, "torch"),
        ("digits_horovod.py", 2, "tensorflow"),
        ("digits_horovod.py", 4, "torch"),
        ("digits_ddl.py", 2, "torch"),
        ("digits_ddl.py", 4, "tensorflow"),
        ("digits_paceline.py", 2, "torch"),
    ],
)
def test_accuracy_is_that_of_one_process(tmp_path, alone, script, count, backend):
    assert alone > 0.95
    assert accuracy_of(train(tmp_path, script, count, backend)) >= alone - 0.03


RECORDED = """
import horovod.keras as hvd
import keras
import numpy as np

hvd.init()
x = np.random.RandomState(0).rand(96, 12, 12, 3).astype("float32")
y = x.mean((1, 2, 3))[:, None]
layers = keras.layers
model = keras.Sequential([layers.Input((12, 12, 3)), layers.Conv2D(16, 3), layers.Flatten()])
model.add(layers.Dense(1))
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
model.fit(
    x, y, batch_size=8, epochs=3, verbose=0, validation_data=(x, y),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.ModelCheckpoint(f"model-{hvd.rank()}.keras"),
    ],
)
"""


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_steps_input_waits_validation_and_saves_are_recorded(tmp_path, backend):
    script = ranks.write(tmp_path, RECORDED)
    launcher = f"paceline --record {tmp_path / 'record'} --json=figures.json"
    ranks.run(script, launcher=launcher, timeout=300, KERAS_BACKEND=backend, **QUIET)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["steps"] == 3 * 12
    assert figures["samples"] == 2 * 8 * (36 - 1)  # without the first step
    assert figures["unmatched"] == 0
    for states in figures["states"]:
        for name in ("useful", "input", "transfer", "validation", "checkpoint"):
            assert states[name] > 0, name


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_example_trains_on_two_hosts(hosts, backend):
    folder = hosts.new_folder()
    shutil.copy(EXAMPLES / "digits_horovod.py", folder)
    variables = ranks.environment(KERAS_BACKEND=backend, **QUIET)
    words = [ranks.PACELINE, "run", "-n", 2, "-H", "host1:1,host2:1", "digits_horovod.py"]
    done = hosts.run("host0", *words, cwd=folder, env=variables, timeout=300)
    assert accuracy_of(done.stdout) > 0.95


WRONG = """
import ddl
import keras
import numpy as np

model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
first, last = ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback()
other = keras.callbacks.TerminateOnNaN()
for callbacks in ([other, first, last], [last], [first], [first, last, other]):
    try:
        model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=callbacks)
    except ValueError as error:
        assert "HINT: callbacks=[ddl.DDLCallback(), " in str(error), error
    else:
        raise AssertionError(callbacks)
model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[first, other, last])
print("whole")
"""


def test_order_of_ddls_callbacks_is_checked(tmp_path):
    done = ranks.run(ranks.write(tmp_path, WRONG), KERAS_BACKEND="torch", **QUIET)
    assert ranks.untagged(done.stdout) == {"whole"}


@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_other_backends_are_refused(tmp_path, backend):
    script = ranks.write(tmp_path, "import horovod.keras\n")
    done = ranks.run(script, ranks=1, check=False, KERAS_BACKEND=backend, **QUIET)
    assert done.returncode
    assert f"does not support Keras' backend {backend}. HINT: " in done.stderr


def test_benchmark_measures_both_backends(tmp_path):
    script = EXAMPLES.parents[1] / "benchmarks/compat/keras_steps.py"
    words = [ranks.BIN / "python", script, "--repeats", 1, "--steps", 2, "--json", "out.json"]
    ranks.run_command(words, tmp_path, ranks.environment(), timeout=400)
    found = json.loads((tmp_path / "out.json").read_text())["measurements"]
    assert len(found["torch"]["ddp"]) == len(found["tensorflow"]["mirrored strategy"]) == 1
