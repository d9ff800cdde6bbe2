"""The names of ``horovod.tensorflow.keras.callbacks``."""

from ...keras.callbacks import *  # noqa: F403
