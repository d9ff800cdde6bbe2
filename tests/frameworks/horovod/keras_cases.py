"""What Horovod documents about ``horovod.keras``: each function is one case on every rank.

They run with each backend of Keras (environment variable KERAS_BACKEND). A training on all ranks is
compared with one of this process alone, with the samples of all ranks.
"""

import os
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from case_runner import raises, run_cases
from keras import layers, ops

import paceline.compat.horovod.keras as hvd

STEPS, BATCH, FEATURES = 50, 12, 6
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def samples(steps=STEPS, dtype="float32"):
    x = np.random.RandomState(7).rand(steps * BATCH, FEATURES).astype(dtype)
    return x, (x[:, :2] ** 2 - x[:, 2:4]).astype(dtype)


def model_of(optimizer, seed=3, dtype="float32", **options):
    """Return a compiled model; equal seeds give equal weights."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            layers.Input((FEATURES,), dtype=dtype),
            layers.Dense(16, activation="tanh", dtype=dtype),
            layers.Dense(2, dtype=dtype),
        ]
    )
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


class Losses(keras.callbacks.Callback):
    """The loss of each step."""

    def __init__(self):
        super().__init__()
        self.of_epoch, self.values, self.steps = 0.0, [], 0

    def on_train_batch_end(self, batch, logs=None):
        total = logs["loss"] * (batch + 1)  # Keras' loss is the mean of the epoch so far
        self.values.append(total - (self.of_epoch if batch else 0.0))
        self.of_epoch = total


def train(model, x, y, batch=BATCH, callbacks=(), epochs=1, **options):
    losses = Losses()
    model.fit(
        x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[*callbacks, losses], **options,
    )  # fmt: skip
    return losses.values


def compare(rank, size, optimizer, tolerance=1e-4, dtype="float32", wrap=None, **options):
    """Train on all ranks and on this one alone; compare the loss of each step, and the weights."""
    x, y = samples(dtype=dtype)
    alone = model_of(optimizer(), dtype=dtype, **options)
    expected = train(alone, x, y)
    wrap = wrap or hvd.DistributedOptimizer
    shared = model_of(wrap(optimizer()), 3 + rank, dtype, **options)
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    own = train(shared, x[rank::size], y[rank::size], BATCH // size, [begin])
    found = np.mean(hvd.allgather_object(own), axis=0)
    np.testing.assert_allclose(found, expected, tolerance, tolerance)
    for one, other in zip(shared.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, 10 * tolerance, 10 * tolerance)
    return shared


# Equality with one process


@case
def sgd_equals_one_process(rank, size):
    compare(rank, size, lambda: keras.optimizers.SGD(0.1, momentum=0.9))


@case
def adam_equals_one_process(rank, size):
    compare(rank, size, lambda: keras.optimizers.Adam(0.01))


@case
def sgd_equals_one_process_in_float64(rank, size):
    keras.backend.set_floatx("float64")
    try:
        compare(rank, size, lambda: keras.optimizers.SGD(0.1, momentum=0.9), 1e-5, "float64")
    finally:
        keras.backend.set_floatx("float32")


@case
def adam_equals_one_process_in_float64(rank, size):
    keras.backend.set_floatx("float64")
    try:
        compare(rank, size, lambda: keras.optimizers.Adam(0.01), 1e-5, "float64")
    finally:
        keras.backend.set_floatx("float32")


@case
def equals_one_process_eagerly(rank, size):
    compare(rank, size, lambda: keras.optimizers.SGD(0.1), run_eagerly=True)


@case
def clipping_follows_the_exchange(rank, size):
    compare(rank, size, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05))


@case
def weight_decay_and_moving_average_equal_one_process(rank, size):
    compare(rank, size, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True))


@case
def accumulated_gradients_equal_one_process(rank, size):
    compare(rank, size, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


@case
def groups_equal_one_process(rank, size):
    def wrap(optimizer):
        return hvd.DistributedOptimizer(optimizer, groups=2)

    compare(rank, size, lambda: keras.optimizers.SGD(0.1), wrap=wrap)


@case
def predivided_gradients_equal_one_process(rank, size):
    def wrap(optimizer):
        return hvd.DistributedOptimizer(optimizer, gradient_predivide_factor=float(size))

    compare(rank, size, lambda: keras.optimizers.SGD(0.1), wrap=wrap)


@case
def compressed_gradients_are_close(rank, size):
    def wrap(optimizer):
        return hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)

    compare(rank, size, lambda: keras.optimizers.SGD(0.1), 1e-2, wrap=wrap)


@case
def train_step_of_the_script(rank, size):
    """A model with its own train_step calls optimizer.apply."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            if keras.backend.backend() == "torch":
                self.zero_grad()
                loss = ops.mean((self(x, training=True) - y) ** 2)
                loss.backward()
                gradients = [one.value.grad for one in self.trainable_weights]
            else:
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = ops.mean((self(x, training=True) - y) ** 2)
                gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            return {"loss": loss}

    def trained(optimizer, x, y, batch, callbacks=()):
        keras.utils.set_random_seed(5)
        model = Own()
        model(x[:1])
        model.compile(optimizer=optimizer)
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=list(callbacks))
        return model.get_weights()

    x, y = samples(10)
    expected = trained(keras.optimizers.SGD(0.1), x, y, BATCH)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    found = trained(optimizer, x[rank::size], y[rank::size], BATCH // size, [begin])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)


@case
def embeddings_equal_one_process(rank, size):
    """Their gradients are sparse with TensorFlow."""

    def trained(optimizer, x, y, batch, callbacks=()):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [layers.Input((4,), dtype="int32"), layers.Embedding(20, 3), layers.Flatten()]
        )
        model.add(layers.Dense(1))
        model.compile(optimizer=optimizer, loss="mse")
        train(model, x, y, batch, callbacks)
        return model.get_weights()

    x = np.random.RandomState(1).randint(0, 20, (10 * BATCH, 4)).astype("int32")
    y = x.sum(1, keepdims=True).astype("float32") / 40
    expected = trained(keras.optimizers.SGD(0.1), x, y, BATCH)
    for options in ({}, {"sparse_as_dense": True}):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
        begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        found = trained(optimizer, x[rank::size], y[rank::size], BATCH // size, [begin])
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-5)


@case
def synchronized_batch_norm_equals_one_process(rank, size):
    def trained(norm, optimizer, x, y, batch, callbacks=()):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(8), norm])
        model.add(layers.Dense(2))
        model.compile(optimizer=optimizer, loss="mse")
        train(model, x, y, batch, callbacks)
        return model.get_weights()

    x, y = samples(20)
    expected = trained(layers.BatchNormalization(), keras.optimizers.SGD(0.1), x, y, BATCH)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    found = trained(
        hvd.SyncBatchNormalization(), optimizer, x[rank::size], y[rank::size], BATCH // size,
        [begin],
    )  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-3, 1e-4)


# The optimizer


@case
def backward_passes_sum_or_average(rank, size):
    x, y = samples(8)

    def trained(optimizer):
        model = model_of(optimizer)
        train(model, x[:BATCH], y[:BATCH], BATCH // 2)
        return model.get_weights()

    once = keras.optimizers.SGD(0.1)
    expected = trained(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    average = hvd.DistributedOptimizer(
        once, backward_passes_per_step=2, average_aggregated_gradients=True
    )
    for one, other in zip(trained(average), expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
    doubled = trained(keras.optimizers.SGD(0.2, gradient_accumulation_steps=2))
    summed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    for one, other in zip(trained(summed), doubled, strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)


@case
def sum_of_gradients(rank, size):
    x, y = samples(4)
    expected = model_of(keras.optimizers.SGD(0.1 * size))
    train(expected, x, y)
    found = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum))
    train(found, x, y)  # the same samples on all ranks
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)


@case
def gradients_are_matched_by_their_variables(rank, size):
    """Ranks may have no gradient for different variables."""
    names = []

    def note(own, own_names, options, groups):
        names.extend(own_names)
        return own

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), name="mine")
    variables = [keras.Variable(np.ones(2, "float32")) for _ in range(3)]
    optimizer.build(variables)
    module = sys.modules[hvd.DistributedOptimizer.__module__]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "exchange_gradients", note)
        optimizer.apply([None, ops.ones(2), ops.ones(2)], variables)
    assert names == ["mine.1", "mine.2"]


@case
def ranks_may_create_further_optimizers(rank, size):
    """As where one rank loads a model, and replaces another one by it."""
    if rank == 0:
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    compare(rank, size, lambda: keras.optimizers.SGD(0.1))


@case
def gradients_may_share_memory(rank, size):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, groups=2)
    variables = [keras.Variable(np.zeros(4, "float32")) for _ in range(2)]
    gradient = ops.ones(4) * (rank + 1.0)
    optimizer.apply([gradient, gradient], variables)
    for one in variables:
        np.testing.assert_allclose(ops.convert_to_numpy(one), -sum(range(1, size + 1)))


@case
def optimizer_keeps_its_class_and_name(rank, size):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert abs(float(optimizer.learning_rate) - 0.01) < 1e-8


@case
def saved_model_loads_with_and_without(rank, size):
    x, y = samples(4)
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    train(model, x, y)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        plain, distributed = keras.saving.load_model(path), hvd.load_model(path)
    assert type(plain.optimizer).__name__ == "Adam"
    assert not hasattr(plain.optimizer, "register_local_var")
    assert hasattr(distributed.optimizer, "register_local_var")
    for one, other in zip(distributed.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(ops.convert_to_numpy(one), ops.convert_to_numpy(other), 1e-6)
    train(distributed, x[rank::size], y[rank::size], 6)
    weights = hvd.allgather_object([float(np.sum(w)) for w in distributed.get_weights()])
    np.testing.assert_allclose(weights, [weights[0]] * size, 1e-6)


@case
def loss_scale_skips_the_step_on_all_ranks(rank, size):
    """Mixed precision: gradients of the last rank overflow in the second step."""
    for outside in (False, True):
        inner = keras.optimizers.SGD(0.1)
        if outside:  # as Keras does in compile
            scaled = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(inner))
        else:
            scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner))
        variable = keras.Variable(np.ones(3, "float32"))
        scaled.build([variable])
        for step in range(3):
            gradient = np.full(3, float(rank) * 32768, "float32")
            if step == 1 and rank == size - 1:
                gradient[0] = np.inf
            scaled.apply([ops.convert_to_tensor(gradient)], [variable])
        scale = float(ops.convert_to_numpy(scaled.dynamic_scale))
        assert scale == 16384.0, scale
        mean = (size - 1) / 2  # first at scale 32768, then at 16384
        np.testing.assert_allclose(ops.convert_to_numpy(variable), 1 - 0.1 * mean * 3, rtol=1e-5)


@case
def local_layers_keep_their_gradients(rank, size):
    model = model_of("sgd")
    local = model.layers[-1]
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=local)
    model.compile(optimizer=optimizer, loss="mse")
    x, y = samples(2)
    train(model, x[rank::size], y[rank::size], 6)
    sums = hvd.allgather_object([float(np.sum(w)) for w in model.get_weights()])
    np.testing.assert_allclose([one[:2] for one in sums], [sums[0][:2]] * size, 1e-6)
    if size > 1:
        assert sums[0][2:] != sums[1][2:]


@case
def process_set_of_an_optimizer(rank, size):
    members = hvd.add_process_set([0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=members)
    model = model_of(optimizer)
    x, y = samples(2)
    train(model, x[rank::size], y[rank::size], 6)
    sums = hvd.allgather_object(float(np.sum(model.get_weights()[0])))
    assert len(set(sums)) == size
    hvd.remove_process_set(members)


@case
def bad_arguments_of_the_optimizer(rank, size):
    sgd = keras.optimizers.SGD
    raises(ValueError, "HINT: ", hvd.DistributedOptimizer, "sgd")
    raises(ValueError, "op=Min", hvd.DistributedOptimizer, sgd(), op=hvd.Min)
    raises(ValueError, "groups", hvd.DistributedOptimizer, sgd(), groups=-1)
    raises(ValueError, "must be > 0", hvd.DistributedOptimizer, sgd(), backward_passes_per_step=0)
    raises(
        ValueError, "predivide", hvd.DistributedOptimizer, sgd(), op=hvd.Sum,
        gradient_predivide_factor=2.0,
    )  # fmt: skip


# Callbacks


@case
def broadcast_gives_all_ranks_the_state_of_the_root(rank, size):
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.Adam(0.0)), seed=rank)
    expected = hvd.broadcast_object(model.get_weights(), size - 1)
    x, y = samples(1)
    train(model, x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(size - 1)])
    for one, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@case
def broadcast_reaches_layers_that_are_built_late(rank, size):
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([layers.Dense(4), layers.Dense(2)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    x, y = samples(2)
    train(model, x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    sums = hvd.allgather_object([float(np.sum(w)) for w in model.get_weights()])
    np.testing.assert_allclose(sums, [sums[0]] * size, 1e-6)


@case
def broadcast_reaches_ranks_whose_optimizer_is_built_later(rank, size):
    """As where the root alone has loaded a saved model."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model = model_of(optimizer, seed=rank)
    if rank == 0:
        optimizer.build(model.trainable_variables)
    x, y = samples(2)
    train(model, x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    sums = hvd.allgather_object(
        [float(np.sum(w)) for w in model.get_weights()]
        + [float(np.sum(ops.convert_to_numpy(one))) for one in optimizer.variables]
    )
    np.testing.assert_allclose(sums, [sums[0]] * size, 1e-6)


@case
def optimizer_may_be_wrapped_after_steps(rank, size):
    """TensorFlow has compiled a step without the exchange then."""
    model = model_of(keras.optimizers.SGD(0.1), seed=rank)
    x, y = samples(4)
    x, y = x[rank::size], y[rank::size]
    train(model, x, y)
    hvd.DistributedOptimizer(model.optimizer)
    train(model, x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    sums = hvd.allgather_object([float(np.sum(w)) for w in model.get_weights()])
    np.testing.assert_allclose(sums, [sums[0]] * size, 1e-6)


@case
def broadcast_of_different_models_is_an_error(rank, size):
    if size > 1:
        units = 3 + rank
        model = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(units)])
        model.compile(optimizer="sgd", loss="mse")
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callback.set_model(model)
        callback.on_train_begin()
        raises(ValueError, "different variables", callback.on_train_batch_end, 0)


@case
def metrics_are_averaged(rank, size):
    logs = {"loss": 1.0 + rank, "accuracy": np.float32(rank), "text": "x"}
    callback = hvd.callbacks.MetricAverageCallback()
    callback.on_epoch_end(0, logs)
    assert logs["loss"] == 1.0 + (size - 1) / 2
    assert logs["accuracy"] == (size - 1) / 2
    assert logs["text"] == "x"


@case
def different_metrics_are_named(rank, size):
    if size > 1:
        logs = {"loss": 1.0} | ({"val_loss": 2.0} if rank else {})
        callback = hvd.callbacks.MetricAverageCallback()
        raises(ValueError, "only some have val_loss", callback.on_epoch_end, 0, logs)


@case
def metrics_are_averaged_before_callbacks_that_decide(rank, size):
    x, y = samples(2)
    average = hvd.callbacks.MetricAverageCallback()
    stop = keras.callbacks.EarlyStopping(monitor="loss")
    model = model_of("sgd")
    raises(ValueError, "after EarlyStopping", train, model, x, y, callbacks=[stop, average])
    train(model, x, y, callbacks=[average, stop])


@case
def warmup_raises_the_learning_rate(rank, size):
    x, y = samples(4)
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * size)))
    seen = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(float(ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1 * size, warmup_epochs=2)
    train(model, x, y, callbacks=[warmup, Rates()], epochs=3)
    epochs = [(at + 1) / 4 for at in range(8)]
    expected = [0.1 * (epoch * (size - 1) / 2 + 1) for epoch in epochs] + [0.1 * size] * 4
    np.testing.assert_allclose(seen, expected, 1e-5)


@case
def schedule_multiplies_the_learning_rate(rank, size):
    x, y = samples(2)
    schedule = hvd.callbacks.LearningRateScheduleCallback
    for multiplier in (0.5, lambda epoch: 0.5 ** (epoch - 1)):
        model = model_of(keras.optimizers.SGD(0.4, momentum=0.9))
        rates = schedule(0.4, multiplier, start_epoch=1)
        history = model.fit(x, y, epochs=3, verbose=0, callbacks=[rates]).history
        np.testing.assert_allclose(history["lr"], [0.4, 0.4, 0.2], 1e-6)
        assert model.optimizer.momentum == 0.9


@case
def bad_learning_rates(rank, size):
    schedule = hvd.callbacks.LearningRateScheduleCallback
    raises(ValueError, "required", schedule, None, 0.1)
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = model_of(keras.optimizers.SGD(rate))
    x, y = samples(1)
    raises(ValueError, "LearningRateSchedule", train, model, x, y, callbacks=[schedule(0.1, 0.5)])


# Values, objects, elastic states


@case
def collectives_of_values(rank, size):
    np.testing.assert_allclose(ops.convert_to_numpy(hvd.allreduce(float(rank))), (size - 1) / 2)
    total = hvd.allreduce(np.ones(3, "float32"), op=hvd.Sum)
    np.testing.assert_allclose(ops.convert_to_numpy(total), np.full(3, size))
    gathered = hvd.allgather(np.full((rank + 1, 1), rank, "float32"))
    assert len(gathered) == sum(range(1, size + 1))
    np.testing.assert_allclose(ops.convert_to_numpy(hvd.broadcast(rank + 5.0, 0)), 5.0)
    part = hvd.reducescatter(np.ones((2 * size, 2), "float32"), op=hvd.Sum)
    np.testing.assert_allclose(ops.convert_to_numpy(part), np.full((2, 2), size))


@case
def objects(rank, size):
    assert hvd.broadcast_object([rank], size - 1) == [size - 1]
    assert hvd.allgather_object(rank) == list(range(size))


@case
def global_variables_have_a_way_out(rank, size):
    raises(NotImplementedError, "HINT: ", hvd.broadcast_global_variables, 0)


@case
def elastic_state_is_saved_restored_and_synchronized(rank, size):
    x, y = samples(2)
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), seed=rank)
    state = hvd.elastic.KerasState(model, batch=0, epoch=rank)
    state.sync()
    assert state.epoch == 0
    saved = [np.array(one) for one in model.get_weights()]
    sums = hvd.allgather_object([float(np.sum(one)) for one in saved])
    np.testing.assert_allclose(sums, [sums[0]] * size, 1e-6)
    update = hvd.elastic.UpdateEpochStateCallback(state)
    commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=2)
    train(model, x[rank::size], y[rank::size], 6, [update, commit])
    assert state.epoch == 1
    committed = [np.array(one) for one in model.get_weights()]
    model.set_weights(saved)
    state.restore()
    for one, other in zip(model.get_weights(), committed, strict=True):
        np.testing.assert_array_equal(one, other)


@case
def elastic_loop_runs_the_function(rank, size):
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def loop(state):
        batch = hvd.elastic.UpdateBatchStateCallback(state)
        x, y = samples(2)
        train(state.model, x, y, callbacks=[batch])
        state.commit()
        return "ended"

    assert loop(state) == "ended"


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "torch")
    run_cases(hvd, CASES, sys.argv[1])
