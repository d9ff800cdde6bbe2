"""The names of ``horovod.tensorflow.mpi_ops``."""

from ..core import world
from ..core.errors import HorovodInternalError as HorovodInternalError
from ..core.process_sets import ProcessSet as ProcessSet
from ..core.process_sets import global_process_set as global_process_set
from ..core.world import add_process_set as add_process_set
from ..core.world import remove_process_set as remove_process_set
from ..tensorflow_ops.collectives import allgather as allgather
from ..tensorflow_ops.collectives import alltoall as alltoall
from ..tensorflow_ops.collectives import broadcast as broadcast
from ..tensorflow_ops.collectives import grouped_allgather as grouped_allgather
from ..tensorflow_ops.collectives import local_rank_op as local_rank_op
from ..tensorflow_ops.collectives import local_size_op as local_size_op
from ..tensorflow_ops.collectives import rank_op as rank_op
from ..tensorflow_ops.collectives import size_op as size_op
from ..tensorflow_ops.library import report_devices
from ..tensorflow_ops.variables import broadcast_ as broadcast_
from ..torch.async_ops import barrier as barrier
from ..torch.async_ops import join as join
from ..torch.basics import Adasum as Adasum
from ..torch.basics import Average as Average
from ..torch.basics import Max as Max
from ..torch.basics import Min as Min
from ..torch.basics import Product as Product
from ..torch.basics import Sum as Sum
from ..torch.basics import ccl_built as ccl_built
from ..torch.basics import cross_rank as cross_rank
from ..torch.basics import cross_size as cross_size
from ..torch.basics import cuda_built as cuda_built
from ..torch.basics import ddl_built as ddl_built
from ..torch.basics import gloo_built as gloo_built
from ..torch.basics import gloo_enabled as gloo_enabled
from ..torch.basics import is_homogeneous as is_homogeneous
from ..torch.basics import is_initialized as is_initialized
from ..torch.basics import local_rank as local_rank
from ..torch.basics import local_size as local_size
from ..torch.basics import mpi_built as mpi_built
from ..torch.basics import mpi_enabled as mpi_enabled
from ..torch.basics import mpi_threads_supported as mpi_threads_supported
from ..torch.basics import nccl_built as nccl_built
from ..torch.basics import rank as rank
from ..torch.basics import rocm_built as rocm_built
from ..torch.basics import shutdown as shutdown
from ..torch.basics import size as size
from ..torch.basics import start_timeline as start_timeline
from ..torch.basics import stop_timeline as stop_timeline


def init(*args: object, **kwargs: object) -> None:
    """Initialize this rank, as ``horovod.torch.init``."""
    world.init(*args, **kwargs)
    report_devices(world.current_world().rank)
