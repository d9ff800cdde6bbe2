"""Fit a line with TensorFlow's MultiWorkerMirroredStrategy, as in its guide."""

import json
import os

import tensorflow as tf

BATCH = 16


def data(context):
    """Return this worker's own part of y = 0.75 x - 0.5, repeated endlessly."""
    x = tf.random.Generator.from_seed(context.input_pipeline_id).uniform((256, 1))
    pairs = tf.data.Dataset.from_tensor_slices((x, 0.75 * x - 0.5))
    return pairs.repeat().batch(context.get_per_replica_batch_size(BATCH))


strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    slope = tf.Variable(0.0)
    offset = tf.Variable(0.0)
batches = iter(strategy.distribute_datasets_from_function(data))


@tf.function
def step(batch):
    def one_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((slope * x + offset - y) ** 2) / BATCH
        down = tape.gradient(loss, [slope, offset])
        context = tf.distribute.get_replica_context()
        down = context.all_reduce("sum", down)
        slope.assign_sub(0.5 * down[0])
        offset.assign_sub(0.5 * down[1])
        return loss

    return strategy.reduce("sum", strategy.run(one_replica, batch), axis=None)


for _ in range(100):
    loss = step(next(batches))
result = {
    "worker": json.loads(os.environ["TF_CONFIG"])["task"]["index"],
    "replicas": strategy.num_replicas_in_sync,
    "loss": float(loss),
    "slope": float(slope.numpy()),
}
print("RESULT", json.dumps(result), flush=True)
