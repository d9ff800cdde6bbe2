"""Train a residual network on images of 12 bands with 43 labels, with horovod.keras.

The images are made up. As in a study of the POP Centre of Excellence, a Python generator enlarges,
flips and rotates each image when it is needed, and one rank tests while the others wait.
``--workers 8 --test all`` cures both.
"""

import argparse
import time

import horovod.keras as hvd
import keras
import numpy as np

BANDS, LABELS = 12, 43


class Images(keras.utils.PyDataset):
    """Batches of images, which are read and changed one by one.

    Args:
        numbers: Numbers of the images.
        read_s: Seconds that reading an image from storage takes.
    """

    def __init__(self, numbers, batch, size, read_s, trains, **options):
        super().__init__(**options)
        self.numbers, self.batch, self.size = numbers, batch, size
        self.read_s, self.trains = read_s, trains

    def __len__(self):
        return len(self.numbers) // self.batch

    def __getitem__(self, at):
        images, labels = [], []
        for number in self.numbers[at * self.batch : (at + 1) * self.batch]:
            time.sleep(self.read_s)
            random = np.random.RandomState(number)
            label = random.randint(0, 2, LABELS).astype("float32")
            image = random.rand(self.size // 2, self.size // 2, BANDS).astype("float32")
            image += label[:BANDS]
            image = image.repeat(2, 0).repeat(2, 1)
            if self.trains:
                image = np.rot90(image[:, ::-1], number % 4)
            images.append(image)
            labels.append(label)
        return np.stack(images), np.stack(labels)


def block(x, channels, stride):
    """Return the output of a residual block."""
    y = keras.layers.Conv2D(channels, 3, stride, "same", use_bias=False)(x)
    y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
    y = keras.layers.Conv2D(channels, 3, 1, "same", use_bias=False)(y)
    y = keras.layers.BatchNormalization()(y)
    return keras.layers.ReLU()(y + keras.layers.Conv2D(channels, 1, stride)(x))


def network(size):
    inputs = keras.layers.Input((size, size, BANDS))
    x = keras.layers.Conv2D(16, 3, 2, "same", activation="relu")(inputs)
    for channels in (16, 32, 64):
        x = block(x, channels, 2)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(LABELS, activation="sigmoid")(x))


parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64, help="images of a step on each rank")
parser.add_argument("--size", type=int, default=120, help="height and width of an image")
parser.add_argument("--steps", type=int, default=50, help="steps of an epoch")
parser.add_argument("--tests", type=int, default=20, help="batches of the test")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--workers", type=int, default=1, help="threads that make batches")
parser.add_argument("--test", choices=("one", "all"), default="one", help="ranks that test")
parser.add_argument("--read-ms", type=float, default=2.0, help="time to read an image")
options = parser.parse_args()

hvd.init()
rank, size = hvd.rank(), hvd.size()
keras.utils.set_random_seed(1)
loading = {
    "batch": options.batch,
    "size": options.size,
    "read_s": options.read_ms / 1000,
    "workers": options.workers,
    "max_queue_size": 2 * options.workers,
}
numbers = np.arange(options.batch * options.steps * size)
train = Images(numbers[rank::size], trains=True, **loading)
tests = numbers[-1] + 1 + np.arange(options.batch * options.tests)
if options.test == "all":
    tests = tests[rank::size]
test = Images(tests, trains=False, **loading)

model = network(options.size)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * size))
model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=["binary_accuracy"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
for epoch in range(options.epochs):
    began = time.monotonic()
    model.fit(train, epochs=1, verbose=0, callbacks=callbacks)
    results = [0.0, 0.0]
    if options.test == "all" or rank == 0:
        results = model.evaluate(test, verbose=0)
    if options.test == "all":
        results = [float(hvd.allreduce(value)) for value in results]
    if rank == 0:
        seconds = time.monotonic() - began
        print(f"epoch {epoch + 1}: {seconds:.1f} s, loss {results[0]:.3f}, {results[1]:.3f}")
