"""The names of ``horovod.torch.mpi_ops``."""

from ..core.errors import HorovodInternalError as HorovodInternalError
from ..core.process_sets import ProcessSet as ProcessSet
from ..core.process_sets import global_process_set as global_process_set
from ..core.world import add_process_set as add_process_set
from ..core.world import remove_process_set as remove_process_set
from .async_ops import allgather_async as allgather_async
from .async_ops import allreduce_async as allreduce_async
from .async_ops import allreduce_async_ as allreduce_async_
from .async_ops import alltoall_async as alltoall_async
from .async_ops import barrier as barrier
from .async_ops import broadcast_async as broadcast_async
from .async_ops import broadcast_async_ as broadcast_async_
from .async_ops import grouped_allgather_async as grouped_allgather_async
from .async_ops import grouped_allreduce_async as grouped_allreduce_async
from .async_ops import grouped_allreduce_async_ as grouped_allreduce_async_
from .async_ops import grouped_reducescatter_async as grouped_reducescatter_async
from .async_ops import join as join
from .async_ops import reducescatter_async as reducescatter_async
from .async_ops import sparse_allreduce_async as sparse_allreduce_async
from .basics import *  # noqa: F403
from .basics import init as init
from .compression import Compression as Compression
from .differentiable import HorovodAllreduce as HorovodAllreduce
from .differentiable import allgather as allgather
from .differentiable import allreduce as allreduce
from .differentiable import allreduce_ as allreduce_
from .differentiable import alltoall as alltoall
from .differentiable import broadcast as broadcast
from .differentiable import broadcast_ as broadcast_
from .differentiable import grouped_allgather as grouped_allgather
from .differentiable import grouped_allreduce as grouped_allreduce
from .differentiable import grouped_allreduce_ as grouped_allreduce_
from .differentiable import grouped_reducescatter as grouped_reducescatter
from .differentiable import reducescatter as reducescatter
from .submission import poll as poll
from .submission import synchronize as synchronize
