"""The names of ``horovod.tensorflow.keras``: those of ``horovod.keras``."""

from ...core.errors import HorovodInternalError as HorovodInternalError
from ...keras import *  # noqa: F403
from ...tensorflow_ops.variables import broadcast_variables as broadcast_variables
