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


LOOP = """
import sys
import tensorflow as tf
import keras

kind = sys.argv[1]
strategy = tf.distribute.MultiWorkerMirroredStrategy() if kind == "mirrored" else None
import horovod.tensorflow as hvd

hvd.init()
x = tf.random.stateless_uniform((96, 20), (1, hvd.rank()))
data = tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, 1, keepdims=True))).batch(8)
if strategy is not None:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = strategy.experimental_distribute_dataset(data.with_options(options))
with strategy.scope() if strategy is not None else tf.device(None):
    model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(50)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)


def step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
    if kind != "mirrored":
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@tf.function
def other(inputs):
    return tf.reduce_mean(model(inputs) ** 2)


if kind == "graph":
    step = tf.function(step)
elif kind == "mirrored":
    replicated, step = step, tf.function(lambda *batch: strategy.run(replicated, batch))
for epoch in range(2):
    for batch in data:
        step(*batch)
    other(x)  # a function that does not train
"""


@pytest.mark.parametrize("kind", ["graph", "eager", "mirrored"])
def test_steps_of_own_loops_are_recorded(tmp_path, kind):
    script = ranks.write(tmp_path, LOOP)
    launcher = f"paceline --record {tmp_path / 'record'} --json=figures.json"
    ranks.run(script, kind, launcher=launcher, timeout=300, **QUIET)
    figures = json.loads((tmp_path / "figures.json").read_text())
    # the strategy divides each batch by the number of ranks
    assert figures["steps"] == 2 * 12 * (2 if kind == "mirrored" else 1)
    assert figures["unmatched"] == 0
    if kind != "mirrored":  # batches of a strategy are no tensors
        assert figures["samples"] == 2 * 8 * (24 - 1)
        assert min(states["input"] for states in figures["states"]) > 0
    assert min(states["useful"] for states in figures["states"]) > 0


SMALL = {"size": 16, "batch": 8, "steps": 8, "tests": 8, "epochs": 3, "read-ms": 20}


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_bottlenecks_of_the_bands_are_found_and_cured(tmp_path, backend):
    """Their time is mostly sleep, which other load does not lengthen."""
    shutil.copy(EXAMPLES / "bands.py", tmp_path)
    found = []
    for number, cure in enumerate([(), ("--workers", "8", "--test", "all")]):
        launcher = f"paceline --record record-{number} --json={number}.json"
        words = [*(f"--{name}={value}" for name, value in SMALL.items()), *cure]
        variables = {"KERAS_BACKEND": backend, **QUIET}
        ranks.run(tmp_path / "bands.py", *words, launcher=launcher, timeout=300, **variables)
        found.append(json.loads((tmp_path / f"{number}.json").read_text()))
    before, after = (_by_cause(one) for one in found)
    assert set(sorted(before, key=before.get)[-2:]) == {"input", "validation"}, before
    for cause in ("input", "validation"):
        assert after[cause] < before[cause], cause
    rates = [one["samples"] / one["window_s"] for one in found]
    assert rates[1] > 1.3 * rates[0]


def _by_cause(figures):
    """Return the seconds that a rank loses by what takes them, without those of other programs."""
    sums = {"input": 0.0, "validation": 0.0}
    for loss in figures["losses"]:
        cause = (
            loss["doing"] if loss["kind"] == "wait" and loss["rank"] is not None else loss["kind"]
        )
        if cause not in ("starved", "useful"):
            sums[cause] = sums.get(cause, 0.0) + loss["share"] * figures["window_s"]
    return sums


RUNS_ON = """
import os
import horovod.keras as hvd
import keras
import numpy as np

hvd.init()
x = np.ones((64, 4), "float32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
while float(hvd.allreduce(float(os.path.exists("end")))) == 0:
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
"""


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_top_shows_a_running_job(tmp_path, backend):
    script, record = ranks.write(tmp_path, RUNS_ON), tmp_path / "record"
    variables = ranks.environment(KERAS_BACKEND=backend, **QUIET)
    command = ranks.command(script, launcher=f"paceline --record {record}")
    job = ranks.start(command, cwd=tmp_path, env=variables)
    shown = {"step": 0}

    def has_steps():
        words = [ranks.PACELINE, "top", "--once", "--json", record]
        done = ranks.run_command(words, tmp_path, ranks.environment(), 60)
        shown.update(json.loads(done.stdout) if done.returncode == 0 else {})
        return shown["step"] > 20

    try:
        ranks.wait_until(has_steps, 120)
        assert len(shown["ranks"]) == 2
        (tmp_path / "end").touch()
        assert job.wait(60) == 0
    finally:
        job.kill()


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_digits_train_on_two_hosts(hosts, backend):
    done, _ = train_on_two_hosts(hosts, backend, "digits_horovod.py")
    assert accuracy_of(done.stdout) > 0.95


def test_bands_train_on_two_hosts(hosts):
    words = [f"--{name}={value}" for name, value in (SMALL | {"read-ms": 1}).items()]
    done, folder = train_on_two_hosts(hosts, "tensorflow", "bands.py", *words)
    assert "epoch 3: " in done.stdout
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["steps"] == SMALL["steps"] * SMALL["epochs"]
    assert figures["unmatched"] == 0


def train_on_two_hosts(hosts, backend, script, *words):
    folder = hosts.new_folder()
    shutil.copy(EXAMPLES / script, folder)
    variables = ranks.environment(KERAS_BACKEND=backend, **QUIET)
    options = ["-n", 2, "-H", "host1:1,host2:1", "--record", "record", "--json=figures.json"]
    command = [ranks.PACELINE, "run", *options, script, *words]
    return hosts.run("host0", *command, cwd=folder, env=variables, timeout=300), folder


DIFFERENT = """
import horovod.keras as hvd
import keras
import numpy as np

hvd.init()
n = 4 + hvd.rank()
x = np.ones((8, n), "float32")
model = keras.Sequential([keras.layers.Input((n,)), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
model.fit(x, x[:, :1], verbose=0)
"""


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_models_of_different_shapes_are_an_error(tmp_path, backend):
    script = ranks.write(tmp_path, DIFFERENT)
    done = ranks.run(script, check=False, timeout=120, KERAS_BACKEND=backend, **QUIET)
    assert done.returncode
    summary = done.stderr[done.stderr.rindex("paceline: rank") :]
    assert "failed: HorovodInternalError: ranks disagree about allreduce" in summary
    assert "mismatched shapes: rank 0 has [4, 1], rank 1 has [5, 1]. HINT: " in summary


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
