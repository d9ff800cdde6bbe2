"""Keras 3, with errors that name the way out where it, or its backend, is not supported."""

import importlib
import os
from typing import Any

BACKENDS = ("tensorflow", "torch")


def _keras() -> Any:
    _check_backend(os.environ.get("KERAS_BACKEND") or BACKENDS[0])
    try:
        found: Any = importlib.import_module("keras")
    except ModuleNotFoundError as error:
        if error.name == "tensorflow":  # the backend of Keras, unless KERAS_BACKEND names another
            raise ModuleNotFoundError(
                "Keras uses its TensorFlow backend, and TensorFlow is not installed in this Python "
                "environment. HINT: paceline run --env KERAS_BACKEND=torch, or pip install "
                "tensorflow",
                name="tensorflow",
            ) from None
        if error.name != "keras":
            raise
        raise ModuleNotFoundError(
            "horovod.keras needs Keras, which is not installed in this Python environment, where "
            "Paceline is. HINT: pip install keras, in the same environment as paceline",
            name="keras",
        ) from None
    version = str(getattr(found, "__version__", "0"))
    if int(version.partition(".")[0]) < 3:
        raise ImportError(
            f"horovod.keras is for Keras 3; this is Keras {version}. HINT: pip install 'keras>=3', "
            "and unset TF_USE_LEGACY_KERAS"
        )
    _check_backend(found.backend.backend())
    return found


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ImportError(
            f"horovod.keras does not support Keras' backend {backend}. HINT: paceline run --env "
            "KERAS_BACKEND=torch, or KERAS_BACKEND=tensorflow"
        )


keras: Any = _keras()
BACKEND: str = keras.backend.backend()
