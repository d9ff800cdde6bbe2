"""``DistributedOptimizer`` with the arguments of ``horovod.tensorflow``."""

from typing import Any

from ..core.process_sets import ProcessSet, global_process_set
from ..keras.optimizer import DistributedOptimizer as DistributedKerasOptimizer
from ..torch.basics import Average
from ..torch.compression import Compression


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer of Keras that updates with the gradients of all ranks.

    Args:
        use_locking: Not used: of TensorFlow 1. Other arguments are those of ``horovod.keras``.

    Raises:
        ValueError: An argument is invalid, or the optimizer is not one of Keras.
    """
    return DistributedKerasOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients,
        num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
