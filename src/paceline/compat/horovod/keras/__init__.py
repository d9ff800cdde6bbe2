"""The names of ``horovod.keras``, for Keras 3 on PyTorch or TensorFlow."""

from ..core.process_sets import ProcessSet as ProcessSet
from ..core.process_sets import global_process_set as global_process_set
from ..core.world import add_process_set as add_process_set
from ..core.world import remove_process_set as remove_process_set
from ..torch.basics import *  # noqa: F403
from ..torch.compression import Compression as Compression
from ..torch.functions import allgather_object as allgather_object
from ..torch.functions import broadcast_object as broadcast_object
from . import callbacks as callbacks
from . import elastic as elastic
from .operations import allgather as allgather
from .operations import allreduce as allreduce
from .operations import broadcast as broadcast
from .operations import broadcast_global_variables as broadcast_global_variables
from .operations import init as init
from .operations import reducescatter as reducescatter
from .optimizer import DistributedOptimizer as DistributedOptimizer
from .optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
from .optimizer import load_model as load_model
from .sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
