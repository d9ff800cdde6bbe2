"""The names of ``horovod.tensorflow.functions``."""

from ..tensorflow_ops.variables import allgather_object as allgather_object
from ..tensorflow_ops.variables import broadcast_object as broadcast_object
from ..tensorflow_ops.variables import broadcast_object_fn as broadcast_object_fn
from ..tensorflow_ops.variables import broadcast_variables as broadcast_variables
