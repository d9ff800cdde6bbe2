"""The names of ``ddl``, of IBM's PowerAI DDL, that scripts of Keras use: ``import ddl``.

Importing it initializes this rank. The gradients are exchanged as by ``horovod.keras``.
"""

from typing import Any

from ..horovod.core.world import init as _init
from ..horovod.torch.basics import local_rank as local_rank
from ..horovod.torch.basics import local_size as local_size
from ..horovod.torch.basics import rank as rank
from ..horovod.torch.basics import size as size

_CALLBACKS = ("DDLCallback", "DDLGlobalVariablesCallback")
_init()


def __getattr__(name: str) -> Any:
    """Import Keras with the first callback: its backend may be chosen after ``import ddl``."""
    if name in _CALLBACKS:
        from . import callbacks

        return getattr(callbacks, name)
    raise AttributeError(
        f"Paceline's implementation of ddl has no {name!r}: it has rank, size, local_rank, "
        f"local_size, {' and '.join(_CALLBACKS)}. HINT: horovod.tensorflow has collectives"
    )
