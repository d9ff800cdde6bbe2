"""The training of digits_one.py on all ranks, with `paceline.compat.horovod`."""

import keras
import numpy as np
from sklearn.datasets import load_digits

import paceline.compat.horovod.keras as hvd

hvd.init()
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
order = np.random.RandomState(0).permutation(len(x))
x, y = x[order], keras.utils.to_categorical(y[order], 10)
x_train, y_train, x_test, y_test = x[:1440], y[:1440], x[1440:], y[1440:]
x_train = np.array_split(x_train, hvd.size())[hvd.rank()]
y_train = np.array_split(y_train, hvd.size())[hvd.rank()]

keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Dropout(0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = keras.optimizers.SGD(0.02 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer=optimizer, loss="categorical_crossentropy", metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
model.fit(x_train, y_train, batch_size=16, epochs=12, verbose=0, callbacks=callbacks)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.3f}")
