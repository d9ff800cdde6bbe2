"""Knobs of DistributedDataParallel: its constructor, communication hook and accumulation."""

from collections.abc import Callable
from typing import Any

from ..record.hooks import taps
from ..record.ring.launcher_messages import notify
from .knob import KnobResult


def construct(option: str, value: Any, turned: KnobResult) -> None:
    """Construct all replicas with an option."""
    made(lambda _: turned.done(), **{option: value})


def no_search(_: bool, turned: KnobResult) -> None:
    """Construct all replicas without a search for unused parameters."""
    construct("find_unused_parameters", False, turned)


def no_buffers(_: bool, turned: KnobResult) -> None:
    """Broadcast buffers at the construction only.

    The constructor's argument broadcast_buffers=False would leave out that broadcast, too.
    """

    def switch_off(replica: Any) -> None:
        replica.broadcast_buffers = False
        turned.done()

    made(switch_off)


def compress(dtype: str, _: bool, turned: KnobResult) -> None:
    """Exchange gradients in a dtype: "bf16" or "fp16"."""
    hook = torchs_hook(f"{dtype}_compress_hook")
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


def made(look: Callable[[Any], None], **options: Any) -> None:
    """Construct every replica with these options, then call ``look`` with it."""

    def construct(make: taps.Function, replica: Any, *args: Any, **given: Any) -> None:
        make(replica, *args, **given | options)
        look(replica)

    taps.REPLICA.around(construct)


def synchronize_last(_: bool, turned: KnobResult) -> None:
    """Synchronize gradients only in the last backward of a step."""
    AccumulationSync(turned)


class AccumulationSync:
    """Gradient synchronization only in the last backward of a step.

    The number of backwards of a step is assumed to be that of the previous step. If a step has
    fewer, the missing gradient synchronization is done before the optimizer's step, and the knob is
    disabled from then on. With loss scaling, a step begins where the scaler looks for infinite
    gradients: it must find the same ones on all ranks, and may then skip the optimizer's step.
    """

    def __init__(self, turned: KnobResult) -> None:
        self._turned = turned
        self._usual_count = 0  # forwards per replica in the previous step
        self._replicas: dict[int, tuple[Any, int]] = {}  # by id: replica, forwards in this step
        self._unsynced: set[int] = set()  # ids of replicas whose synchronization is disabled
        self._is_off = False
        before_forward(self._begin_forward)
        taps.on_step(before=self._step)
        for tap in (taps.UNSCALE, taps.SCALED_STEP):  # they look for infinite gradients
            tap.before(self._step)

    def _begin_forward(self, replica: Any) -> None:
        """Disable gradient synchronization of the next backward unless it is the step's last."""
        if not replica.require_backward_grad_sync and id(replica) not in self._unsynced:
            self._is_off = True
            self._turned.not_done("the script calls no_sync")
        count = self._replicas.get(id(replica), (replica, 0))[1] + 1
        self._replicas[id(replica)] = (replica, count)
        if self._is_off:
            return
        replica.require_backward_grad_sync = count >= self._usual_count
        (self._unsynced.discard if count >= self._usual_count else self._unsynced.add)(id(replica))

    def _step(self, *_: Any, **__: Any) -> None:
        """End the step's backwards; without effect if they have been ended already."""
        counts = {count for _, count in self._replicas.values()}
        if not counts:
            return
        behind = [replica for key, (replica, _) in self._replicas.items() if key in self._unsynced]
        for replica in behind:
            self._exchange(replica)
            replica.require_backward_grad_sync = True
        self._unsynced.clear()
        if behind:
            self._is_off = True
            notify(
                "warning: accumulate-locally: a step has fewer backwards than the one before; "
                "from now on DDP synchronizes gradients in each backward\n"
            )
        if len(counts) == 1 and not self._is_off:
            self._usual_count = counts.pop()
            if self._usual_count > 1:
                self._turned.done()
        self._replicas.clear()

    def _exchange(self, replica: Any) -> None:
        """Average the gradients over the ranks, as DDP's backward would have done."""
        import torch.distributed as dist

        for parameter in replica.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=replica.process_group)
                parameter.grad /= replica.process_group.size()
