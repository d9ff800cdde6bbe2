# ruff: noqa: F401  the names of horovod.torch
from horovod.torch.mpi_ops import (
    Average,
    ProcessSet,
    Sum,
    allgather,
    allreduce,
    allreduce_async_,
    barrier,
    broadcast_,
    global_process_set,
    init,
    join,
    poll,
    rank,
    size,
    synchronize,
)
from horovod.torch.optimizer import DistributedOptimizer
