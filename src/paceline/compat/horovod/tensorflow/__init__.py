"""The names of ``horovod.tensorflow``: ``import paceline.compat.horovod.tensorflow as hvd``."""

from ..tensorflow_ops import library as _library  # noqa: F401  its error comes first

# isort: split

from ..keras.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
from ..tensorflow_ops.collectives import allreduce as allreduce
from ..tensorflow_ops.collectives import grouped_allreduce as grouped_allreduce
from ..tensorflow_ops.collectives import grouped_reducescatter as grouped_reducescatter
from ..tensorflow_ops.collectives import reducescatter as reducescatter
from ..tensorflow_ops.gradients import DistributedGradientTape as DistributedGradientTape
from ..tensorflow_ops.gradients import (
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from ..tensorflow_ops.variables import allgather_object as allgather_object
from ..tensorflow_ops.variables import broadcast_global_variables as broadcast_global_variables
from ..tensorflow_ops.variables import broadcast_object as broadcast_object
from ..tensorflow_ops.variables import broadcast_object_fn as broadcast_object_fn
from ..tensorflow_ops.variables import broadcast_variables as broadcast_variables
from . import elastic as elastic
from .compression import Compression as Compression
from .mpi_ops import *  # noqa: F403
from .optimizer import DistributedOptimizer as DistributedOptimizer
