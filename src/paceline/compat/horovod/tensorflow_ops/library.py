"""TensorFlow, imported with an error that names the way out where it is missing."""

import importlib
from typing import Any

from ....record.ring.launcher_messages import notify

MISSING = (
    "horovod.tensorflow needs TensorFlow, which is not installed in this Python environment, where "
    "Paceline is. HINT: pip install tensorflow, in the same environment as paceline; Keras without "
    "TensorFlow: import horovod.keras, with the environment variable KERAS_BACKEND=torch"
)


def _tensorflow() -> Any:
    try:
        return importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ModuleNotFoundError(MISSING, name="tensorflow") from None


tf: Any = _tensorflow()


def report_devices(rank: int) -> None:
    """Say once in a job that tensors of GPUs are copied. Called by ``init``."""
    gpus = tf.config.list_physical_devices("GPU")
    if rank == 0 and gpus:
        notify(
            "paceline: TensorFlow's tensors on GPUs are exchanged through the memory of the host: "
            "each tensor is copied from the GPU before its exchange and back after it. HINT: Keras "
            "with KERAS_BACKEND=torch exchanges tensors of GPUs by NCCL, without these copies\n"
        )
