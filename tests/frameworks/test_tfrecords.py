"""TensorFlow reads the TFRecords that Paceline writes, and the reverse."""

import importlib.util

import numpy as np
import pytest
import sets

from paceline.data import Shards, pack
from paceline.data.packing.export import convert

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="tensorflow is not installed: make test-frameworks",
)


def read(folder, features):
    import tensorflow as tf

    files = sorted(map(str, folder.glob("*.tfrecord*")))
    assert files
    return [tf.io.parse_single_example(one, features) for one in tf.data.TFRecordDataset(files)]


def test_tensorflow_reads_exported_arrays_and_labels(tmp_path):
    import tensorflow as tf

    x, y = sets.arrays(20, (3, 4))
    pack((x, y), tmp_path / "packed", seed=3)
    convert(str(tmp_path / "packed"), tmp_path / "out", "tfrecord", None)
    kind = tf.io.FixedLenFeature([], tf.string)
    number = tf.io.FixedLenFeature([], tf.int64)
    found = read(tmp_path / "out", {"x": kind, "x/dtype": kind, "label": number})
    shards = Shards(tmp_path / "packed")
    assert len(found) == 20
    for i, one in enumerate(found):
        assert one["x/dtype"].numpy() == b"float32"
        array = tf.reshape(tf.io.decode_raw(one["x"], tf.float32), (3, 4)).numpy()
        assert np.array_equal(array, shards[i][0])
        assert int(one["label"]) == shards[i][1]


def test_tensorflow_decodes_exported_images(tmp_path):
    import tensorflow as tf

    sets.images(tmp_path / "in", 12)
    convert(str(tmp_path / "in"), tmp_path / "out", "tfrecord", None)
    kind = tf.io.FixedLenFeature([], tf.string)
    for one in read(tmp_path / "out", {"image/encoded": kind}):
        assert tf.io.decode_image(one["image/encoded"]).shape == (20, 24, 3)


def test_tfrecords_written_by_tensorflow_are_packed(tmp_path):
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(tmp_path / "in.tfrecord")) as writer:
        for i in range(10):
            image = tf.io.encode_png(np.full((4, 5, 3), i, np.uint8)).numpy()
            feature = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 3])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())
    pack(str(tmp_path / "in.tfrecord"), tmp_path / "packed")
    seen = {int(image[0, 0, 0]): label for image, label in Shards(tmp_path / "packed")}
    assert seen == {i: i % 3 for i in range(10)}
