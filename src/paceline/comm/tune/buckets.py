"""Changes the buckets of a DDP that has begun, by replacing its reducer.

DDP does the same for a copy of it that was pickled.
"""

import math
from typing import Any

import torch

from ...knobs.ddp import torchs_hook
from .costs import MIB, ReadyGradient

REQUIRED_METHODS = (
    "_ddp_init_helper",
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
)


class UnableError(Exception):
    """This torch's DDP can't be given other buckets; it continues with those it had."""


def unsupported_reason(replica: Any) -> str:
    """Return why this replica's buckets can't be changed, or ""."""
    if torch.distributed.get_world_size(replica.process_group) == 1:
        return "the model has one rank"
    if replica._comm_hooks:
        return "the model has a communication hook, which may store data of each bucket"
    if getattr(replica, "_join_config", None) and replica._join_config.enable:
        return "ranks may end at different steps (model.join())"
    if getattr(replica, "mixed_precision", None) is not None:
        return "the model uses mixed_precision of DDP"
    if getattr(replica, "_use_python_reducer", False):
        return "the compiled backward contains the exchange"
    if getattr(replica, "_delay_all_reduce_params", None):
        return "a hook of the script exchanges gradients of the model"
    if getattr(replica, "bucket_bytes_cap_list", None):
        return "the script sets the size of each bucket (bucket_cap_mb_list)"
    if any(not hasattr(replica, name) for name in REQUIRED_METHODS):
        return f"DDP of torch {torch.__version__} has no replaceable reducer"
    return ""


class BucketRebuilder:
    """Rebuilds the buckets of one replica; its present ones are the original ones."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica
        self.parameters, self._sparse = replica._build_params_for_reducer()
        # parameters in the order in which gradients are ready, once that is known
        self._order: list[int] | None = None
        names = ("bucket_bytes_cap", "bucket_bytes_cap_default", "_bucket_config")
        self._original = {name: getattr(replica, name) for name in names if hasattr(replica, name)}

    def ready_gradients(self) -> list[ReadyGradient]:
        """Return when each gradient was ready in the last backward."""
        times_ns = self._replica.reducer.get_backward_stats()  # ns, by parameter
        return [
            ReadyGradient(ns / 1e9, one.numel() * one.element_size())
            for one, ns in zip(self.parameters, times_ns, strict=True)
        ]

    def set_order(self, ready_s: list[float]) -> None:
        """Set the order in which gradients are put into buckets from now on.

        ready_s: when each gradient is ready, the same on all ranks. Gradients without a time come
        last.
        """
        self._order = sorted(range(len(ready_s)), key=lambda one: ready_s[one] or math.inf)

    def bucket_caps(self) -> list[float]:
        """Return the bytes of the replica's original buckets; the first may be smaller."""
        first = 1 << 20  # DDP's default first bucket
        cap = self._original["bucket_bytes_cap"]
        return [first, cap] if self._original.get("bucket_bytes_cap_default") else [cap]

    def rebuild(self, mib: float | None, bf16: bool = False) -> None:
        """Rebuild the buckets. Call it between an optimizer's step and the next forward.

        mib: bucket size; None for the original one. Raises UnableError where that fails.
        """
        replica = self._replica
        before = {name: getattr(replica, name) for name in (*self._original, "reducer", "logger")}
        try:
            self._make_reducer(mib)
        except Exception as error:  # DDP's internals are not a stable interface
            for name, value in before.items():
                setattr(replica, name, value)
            raise UnableError(f"torch {torch.__version__}: {error}") from error
        before["reducer"]._remove_autograd_hooks()
        replica._comm_hooks.clear()
        if bf16:
            replica.register_comm_hook(None, torchs_hook("bf16_compress_hook"))

    def _make_reducer(self, mib: float | None) -> None:
        replica = self._replica
        for name, value in self._original.items():
            setattr(replica, name, value)
        if mib is not None:
            replica.bucket_bytes_cap = int(mib * MIB)
            replica.bucket_bytes_cap_default = False
            if "_bucket_config" in self._original:
                replica._bucket_config = type(self._original["_bucket_config"])(
                    replica.bucket_bytes_cap, (), replica.bucket_bytes_cap
                )
        fixed = hasattr(replica, "settle")  # parallel.replicated.replica.FixedBuckets
        order = None if fixed or replica.find_unused_parameters else self._order
        places = range(len(self.parameters)) if order is None else order
        parameters = [self.parameters[one] for one in places]
        sparse = [self._sparse[one] for one in places]
        names = replica._build_debug_param_to_name_mapping(parameters)
        replica._ddp_init_helper(parameters, sparse, names, replica.static_graph)
        replica._has_rebuilt_buckets = False
        if replica.static_graph:
            replica._static_graph_delay_allreduce_enqueued = False
            replica.reducer._set_static_graph()
            replica.logger._set_static_graph()
        if fixed:
            replica.settle()
        elif order is not None:
            # At once, not after a step: DDP puts them into buckets in the order of ``parameters``.
            replica.reducer._push_all_rebuilt_params()
            replica.reducer._rebuild_buckets()
