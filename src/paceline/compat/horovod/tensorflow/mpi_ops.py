"""The names of ``horovod.tensorflow.mpi_ops``."""

from ..core import world as _world
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
from ..tensorflow_ops.library import report_devices as _report_devices
from ..tensorflow_ops.variables import broadcast_ as broadcast_
from ..torch.async_ops import barrier as barrier
from ..torch.async_ops import join as join
from ..torch.basics import *  # noqa: F403


def init(*args: object, **kwargs: object) -> None:
    """Initialize this rank, as ``horovod.torch.init``."""
    _world.init(*args, **kwargs)
    _report_devices(_world.current_world().rank)
