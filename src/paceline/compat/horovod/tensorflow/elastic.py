"""The names of ``horovod.tensorflow.elastic``."""

from ..common.elastic import ObjectState as ObjectState
from ..keras.elastic import KerasState as TensorFlowKerasState
from ..keras.elastic import VariablesState as TensorFlowState
from ..keras.elastic import run as run

__all__ = ["ObjectState", "TensorFlowKerasState", "TensorFlowState", "run"]
