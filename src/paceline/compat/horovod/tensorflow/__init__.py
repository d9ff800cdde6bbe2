"""The names of ``horovod.tensorflow``: ``import paceline.compat.horovod.tensorflow as hvd``."""

from ..tensorflow_ops import library as _library  # noqa: F401  its error comes first

# isort: split

from ..keras.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
from ..tensorflow_ops.collectives import allreduce as allreduce
from ..tensorflow_ops.collectives import grouped_allreduce as grouped_allreduce
from ..tensorflow_ops.collectives import grouped_reducescatter as grouped_reducescatter
from ..tensorflow_ops.collectives import reducescatter as reducescatter
from ..tensorflow_ops.gradient_tape import DistributedGradientTape as DistributedGradientTape
from ..tensorflow_ops.gradient_tape import (
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from ..tensorflow_ops.variables import allgather_object as allgather_object
from ..tensorflow_ops.variables import broadcast_global_variables as broadcast_global_variables
from ..tensorflow_ops.variables import broadcast_object as broadcast_object
from ..tensorflow_ops.variables import broadcast_object_fn as broadcast_object_fn
from ..tensorflow_ops.variables import broadcast_variables as broadcast_variables
from . import elastic as elastic
from .compression import Compression as Compression
from .mpi_ops import Adasum as Adasum
from .mpi_ops import Average as Average
from .mpi_ops import HorovodInternalError as HorovodInternalError
from .mpi_ops import Max as Max
from .mpi_ops import Min as Min
from .mpi_ops import ProcessSet as ProcessSet
from .mpi_ops import Product as Product
from .mpi_ops import Sum as Sum
from .mpi_ops import add_process_set as add_process_set
from .mpi_ops import allgather as allgather
from .mpi_ops import alltoall as alltoall
from .mpi_ops import barrier as barrier
from .mpi_ops import broadcast as broadcast
from .mpi_ops import broadcast_ as broadcast_
from .mpi_ops import ccl_built as ccl_built
from .mpi_ops import cross_rank as cross_rank
from .mpi_ops import cross_size as cross_size
from .mpi_ops import cuda_built as cuda_built
from .mpi_ops import ddl_built as ddl_built
from .mpi_ops import global_process_set as global_process_set
from .mpi_ops import gloo_built as gloo_built
from .mpi_ops import gloo_enabled as gloo_enabled
from .mpi_ops import grouped_allgather as grouped_allgather
from .mpi_ops import init as init
from .mpi_ops import is_homogeneous as is_homogeneous
from .mpi_ops import is_initialized as is_initialized
from .mpi_ops import join as join
from .mpi_ops import local_rank as local_rank
from .mpi_ops import local_rank_op as local_rank_op
from .mpi_ops import local_size as local_size
from .mpi_ops import local_size_op as local_size_op
from .mpi_ops import mpi_built as mpi_built
from .mpi_ops import mpi_enabled as mpi_enabled
from .mpi_ops import mpi_threads_supported as mpi_threads_supported
from .mpi_ops import nccl_built as nccl_built
from .mpi_ops import rank as rank
from .mpi_ops import rank_op as rank_op
from .mpi_ops import remove_process_set as remove_process_set
from .mpi_ops import rocm_built as rocm_built
from .mpi_ops import shutdown as shutdown
from .mpi_ops import size as size
from .mpi_ops import size_op as size_op
from .mpi_ops import start_timeline as start_timeline
from .mpi_ops import stop_timeline as stop_timeline
from .optimizer import DistributedOptimizer as DistributedOptimizer
