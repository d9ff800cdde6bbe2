"""The names of ``horovod.torch``: ``import paceline.compat.horovod.torch as hvd``."""

from . import elastic as elastic
from .functions import allgather_object as allgather_object
from .functions import broadcast_object as broadcast_object
from .functions import broadcast_optimizer_state as broadcast_optimizer_state
from .functions import broadcast_parameters as broadcast_parameters
from .mpi_ops import *  # noqa: F403
from .optimizer import DistributedOptimizer as DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm as SyncBatchNorm
