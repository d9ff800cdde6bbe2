"""The names of ``horovod.tensorflow.keras.elastic``."""

from ...keras.elastic import *  # noqa: F403
