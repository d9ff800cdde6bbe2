"""Knobs of DistributedDataParallel: its constructor arguments and its communication hook."""

from collections.abc import Callable
from typing import Any

from ..record.hooks import taps
from .apply import KnobResult

MODULE = "torch.nn.parallel.distributed"


def bucket(mib: float, turned: KnobResult) -> None:
    _constructed(turned, bucket_cap_mb=mib)


def views(_: bool, turned: KnobResult) -> None:
    _constructed(turned, gradient_as_bucket_view=True)


def no_search(_: bool, turned: KnobResult) -> None:
    _constructed(turned, find_unused_parameters=False)


def no_buffers(_: bool, turned: KnobResult) -> None:
    """Broadcast buffers at the construction only.

    The constructor's argument broadcast_buffers=False would leave out that broadcast, too.
    """

    def switch_off(replica: Any) -> None:
        replica.broadcast_buffers = False
        turned.done()

    made(switch_off)


def as_bf16(_: bool, turned: KnobResult) -> None:
    _compressed("bf16_compress_hook", turned)


def as_fp16(_: bool, turned: KnobResult) -> None:
    _compressed("fp16_compress_hook", turned)


def _compressed(name: str, turned: KnobResult) -> None:
    hook = torchs_hook(name)
    hooked(turned, lambda replica: (None, hook))


def torchs_hook(name: str) -> Callable[..., Any]:
    """Return the default communication hook of PyTorch with this name."""

    def hook(group: Any, bucket: Any) -> Any:
        # Without CUDA DDP rejects the bfloat16 hook by its name, although gloo supports it.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        return getattr(default_hooks, name)(group, bucket)

    hook.__annotations__.clear()  # DDP accepts no annotations or exactly its own
    return hook


def hooked(turned: KnobResult, make: Callable[[Any], tuple[Any, Callable[..., Any]]]) -> None:
    """Register on every replica the state and the communication hook that ``make`` returns.

    A hook that the script has registered stays in place.
    """

    def first_forward(replica: Any) -> None:
        if replica._comm_hooks:
            turned.not_done("the script registers a communication hook")
            return
        replica.register_comm_hook(*make(replica))
        turned.done()

    before_forward(first_forward, once=True)


def before_forward(look: Callable[[Any], None], once: bool = False) -> None:
    """Call ``look`` with the replica before each (or the first) forward with gradients enabled."""

    def begins(replica: Any, *_: Any, **__: Any) -> None:
        import torch

        if torch.is_grad_enabled() and not (once and "_paceline_looked" in replica.__dict__):
            replica.__dict__["_paceline_looked"] = True
            look(replica)

    taps.REPLICA_FORWARD.before(begins)


def _constructed(turned: KnobResult, **options: Any) -> None:
    made(lambda _: turned.done(), **options)


def made(look: Callable[[Any], None], **options: Any) -> None:
    """Construct every replica with these options, then call ``look`` with it."""

    def construct(make: taps.Function, replica: Any, *args: Any, **given: Any) -> None:
        make(replica, *args, **given | options)
        look(replica)

    taps.REPLICA.around(construct)
