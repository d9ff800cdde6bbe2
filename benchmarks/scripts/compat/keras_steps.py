"""Ranks of benchmarks/compat/keras_steps.py: steps of a Keras CNN, ours and those of a peer.

With PyTorch the peer is DDP, with TensorFlow MultiWorkerMirroredStrategy. Both train equal models
in own loops, in the same process, in alternate blocks. A block's time is the median step of the
slowest rank. Rank 0 writes the times of all blocks, and those of the exchange by itself.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import keras
import numpy as np

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf

    STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow

import horovod.keras as hvd  # noqa: E402  after the strategy


def network():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def batch_of(size):
    random = np.random.RandomState(hvd.rank())
    return random.rand(size, 28, 28, 1).astype("float32"), random.randint(0, 10, size)


def loss_of(model, x, y):
    logits = model(x, training=True)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, logits)


def torch_steps(size):
    """Return a step with Horovod's interface, and one with DDP."""
    import torch

    x, y = (torch.from_numpy(one) for one in batch_of(size))

    def training(wrap, kind):
        model = network()
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
        called = wrap(model) if wrap else model
        if kind == "horovod":
            optimizer = hvd.DistributedOptimizer(optimizer)

        def step():
            model.zero_grad()
            loss_of(called, x, y).backward()
            weights = model.trainable_weights
            with torch.no_grad():
                optimizer.apply([one.value.grad for one in weights], weights)

        return step

    ddp = torch.nn.parallel.DistributedDataParallel
    return {"horovod": training(None, "horovod"), "ddp": training(ddp, "ddp")}


def tensorflow_steps(size):
    """Return a step with Horovod's interface, and one with MultiWorkerMirroredStrategy."""
    import horovod.tensorflow as hvd_tf

    x, y = (tf.constant(one) for one in batch_of(size))
    own, own_optimizer = network(), keras.optimizers.SGD(0.01)
    own_optimizer.build(own.trainable_variables)

    @tf.function
    def horovod():
        with tf.GradientTape() as tape:
            loss = loss_of(own, x, y)
        gradients = hvd_tf.DistributedGradientTape(tape).gradient(loss, own.trainable_weights)
        own_optimizer.apply(gradients, own.trainable_weights)

    with STRATEGY.scope():
        model, optimizer = network(), keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)

    @tf.function
    def mirrored():
        def replica():
            with tf.GradientTape() as tape:
                loss = loss_of(model, x, y) / STRATEGY.num_replicas_in_sync
            gradients = tape.gradient(loss, model.trainable_weights)
            optimizer.apply(gradients, model.trainable_weights)

        STRATEGY.run(replica)

    return {"horovod": horovod, "mirrored strategy": mirrored}


def median_s(call, count):
    """Return the median time of a call, of the slowest rank."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return max(hvd.allgather_object(statistics.median(times)))


def exchange(model):
    """Return a call that exchanges tensors of the gradients' sizes."""
    import torch

    import paceline.compat.horovod.torch as hvd_torch

    gradients = [torch.ones(tuple(one.shape)) for one in model.trainable_weights]
    return lambda: hvd_torch.grouped_allreduce_(gradients, name="exchange")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    hvd.init()
    steps = (torch_steps if BACKEND == "torch" else tensorflow_steps)(args.batch)
    steps["exchange alone"] = exchange(network())
    found = {name: [] for name in steps}
    for step in steps.values():
        median_s(step, 5)
    for number in range(args.rounds):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            median_s(steps[name], 3)
            found[name].append(median_s(steps[name], args.steps))
    if hvd.rank() == 0:
        args.out.write_text(json.dumps(found))
    if BACKEND == "tensorflow":
        hvd.shutdown()
        os._exit(0)  # the strategy's threads wait for the coordinator, which may have ended


if __name__ == "__main__":
    main()
