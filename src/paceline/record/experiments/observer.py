"""What an experiment of ``paceline diagnose`` sees of a rank beside the record's events: what each
phase took of the machine, how far batches explain the time of steps, and what the script uses."""

import functools
import os
import statistics
import time
import weakref
from collections import deque
from typing import Any

from ..hooks.import_hooks import after_import
from ..ring.recorder import clock_id
from ..ring.resource_usage import OtherThreads, measure_page_fault_s, read_usage, usage_between

CONVOLUTIONS = ("Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d")
MATRIX_SIDE = 256  # of the matrices whose product shows how fast a rank's core is
PROBE_DURATION_S = 0.2


class Observer:
    """Facts of one rank, gathered while it runs; ``told`` is what goes into the record."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {"used": {}}
        self.convolutions: list[Any] = []
        self._step: tuple[float, float] | None = None
        self._elements = 0.0
        self._steps: list[tuple[float, float]] = []  # of a phase: elements, and s of processor
        self._fetches: deque[float] = deque(maxlen=200)
        self._starts: list[float] = []
        self._closings: list[float] = []
        self._data: int | None = None
        self._ddp: list[Any] = []
        self._searching = 0.0

    def install(self) -> None:
        self.told["mask_at_start"] = _mask()
        after_import(
            {
                "torch.nn.modules.module": self._modules,
                "torch.optim.optimizer": self._optimizers,
                "torch.nn.parallel.distributed": self._replicas,
            }
        )

    # phases

    def begins(self) -> None:
        """The measured steps of a phase begin."""
        self._steps.clear()
        self._starts.clear()
        self._closings.clear()
        self._searching, self._elements = 0.0, 0.0
        self._others, self._before = OtherThreads(), read_usage()
        self._thread = time.thread_time()

    def ends(self, phase: str) -> None:
        """They are over."""
        used: dict[str, Any] = usage_between(self._before, read_usage())
        if busiest := self._others.busiest():
            used["others"] = busiest
        if self._searching:
            used["searching"] = self._searching
        if self._starts:
            usual = statistics.median(self._fetches) if self._fetches else 0.0
            each = [max(start - usual, 0.0) for start in self._starts]
            used |= {"starts": len(each), "starting": sum(each) + sum(self._closings)}
        if len(self._steps) > 2:
            used["elements"] = fit_cpu_time(self._steps)
        self.told["used"][phase] = {name: _short(value) for name, value in used.items()}

    def after_step(self) -> None:
        """Of the job, in a phase's measured steps."""
        spent = time.thread_time()
        if self._elements:
            self._steps.append((self._elements, spent - self._thread))
        self._thread, self._elements = spent, 0.0

    # the loader

    def opened(self, dataset: int, seconds: float) -> None:
        """An iterator was made, and gave its first batch after so long."""
        if self._data is None:
            self._data = dataset
        if dataset == self._data:
            self._starts.append(seconds)

    def closed(self, dataset: int, seconds: float) -> None:
        """An iterator had no more batches, and took so long to say so."""
        if dataset == self._data:
            self._closings.append(seconds)

    def fetched(self, dataset: int, batch: Any, seconds: float | None) -> None:
        """A batch of a loader's, by dataset: training's is the first that is asked. seconds: None
        for the first of an iterator."""
        if dataset == self._data:
            if seconds is not None:
                self._fetches.append(seconds)
            self._elements += count_elements(batch)

    # the script

    def _modules(self, module: Any) -> None:
        def read_usage(layer: Any, inputs: Any) -> None:
            if type(layer).__name__ in CONVOLUTIONS and layer.weight.dim() == 4:
                if all(one() is not layer for one in self.convolutions):
                    self.convolutions.append(weakref.ref(layer))
                    self.told["convolutions"] = len(self.convolutions)
                if inputs and hasattr(inputs[0], "dim") and inputs[0].dim() == 4:
                    self._layout(layer, inputs[0])

        self._looking = module.register_module_forward_pre_hook(read_usage)

    def _layout(self, layer: Any, images: Any) -> None:
        import torch

        last = torch.channels_last
        if images.is_contiguous(memory_format=last) and not images.is_contiguous():
            self.told["channels_last"] = True
        if layer.weight.is_contiguous(memory_format=last) and not layer.weight.is_contiguous():
            self.told["channels_last"] = True

    def _optimizers(self, module: Any) -> None:
        def read_usage(optimizer: Any, *_: Any) -> None:
            """Of the parameters that are trained: bytes by precision. Once each optimizer."""
            if optimizer in self._known:
                return
            self._known.add(optimizer)
            sizes: dict[str, int] = self.told.setdefault("parameters", {})
            for group in optimizer.param_groups:
                for one in group["params"]:
                    kind = str(one.dtype).removeprefix("torch.")
                    sizes[kind] = sizes.get(kind, 0) + one.nbytes

        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepping = module.register_optimizer_step_post_hook(read_usage)

    def _replicas(self, module: Any) -> None:
        kind = module.DistributedDataParallel
        make, after = kind.__init__, kind._post_forward

        @functools.wraps(make)
        def init(replica: Any, *args: Any, **options: Any) -> None:
            make(replica, *args, **options)
            self._ddp.append(weakref.ref(replica))

        @functools.wraps(after)
        def post_forward(replica: Any, output: Any) -> Any:
            if not replica.find_unused_parameters or replica.static_graph:
                return after(replica, output)
            start = time.perf_counter()
            try:
                return after(replica, output)
            finally:
                self._searching += time.perf_counter() - start

        kind.__init__, kind._post_forward = init, post_forward

    def settled(self) -> None:
        """What the script has set up is there. Hooks that every module's call would pay for go."""
        import torch

        self.told |= {"threads": torch.get_num_threads(), "mask": _mask()}
        self.told |= {"gpu": torch.cuda.is_available()}
        self.told |= {"host_cores": os.cpu_count(), "kernel": clock_id().partition("/")[0]}
        for name in ("_looking", "_stepping"):
            handle = self.__dict__.pop(name, None)
            if handle is not None:
                handle.remove()

    def closes(self) -> None:
        """The last look, when nothing of the script runs any more."""
        replicas = [one for one in (ref() for ref in self._ddp) if one is not None]
        if replicas:
            self.told["ddp"] = _replica(max(replicas, key=_gradient_bytes))
        self.told["fault_s"] = _short(measure_page_fault_s())
        self.told["product_s"] = {name: _short(took) for name, took in self._products().items()}

    def _products(self) -> dict[str, float]:
        """Seconds of a product of two matrices, in each precision that matters."""
        import torch

        found = {}
        wanted = {"float32", "bfloat16", *self.told.get("parameters", {})}
        for name in wanted & {"float32", "float64", "bfloat16"}:
            matrix = torch.randn(MATRIX_SIDE, MATRIX_SIDE, dtype=getattr(torch, name))
            torch.mm(matrix, matrix)
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < PROBE_DURATION_S:
                torch.mm(matrix, matrix)
                count += 1
            # The mean: a control group's quota shows in pauses between them.
            found[name] = (time.perf_counter() - start) / count
        return found


def _mask() -> str:
    """The cores that this process may run on, as bits."""
    return f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"


def count_elements(batch: Any) -> float:
    """Of all tensors in a batch."""
    from torch.utils._pytree import tree_leaves

    return float(sum(leaf.numel() for leaf in tree_leaves(batch) if hasattr(leaf, "numel")))


def fit_cpu_time(steps: list[tuple[float, float]]) -> dict[str, float]:
    """How the processor's time of steps goes with the elements in their batches: their mean,
    their spread (standard deviation), seconds an element more, and the correlation."""
    sizes, times = zip(*steps, strict=True)
    spread = statistics.pstdev(sizes)
    found = {"mean": _short(statistics.fmean(sizes)), "spread": _short(spread)}
    if not spread or not statistics.pstdev(times):
        return found | {"slope": 0.0, "correlation": 0.0}
    line = statistics.linear_regression(sizes, times)
    correlation = statistics.correlation(sizes, times)
    return found | {"slope": _short(line.slope), "correlation": _short(correlation)}


def _gradient_bytes(replica: Any) -> int:
    return sum(one.nbytes for one in replica.parameters() if one.requires_grad)


def _replica(replica: Any) -> dict[str, Any]:
    """What DDP was told, and what it says of its last step."""
    found = {
        "bytes": _gradient_bytes(replica),
        "bucket_bytes": int(getattr(replica, "bucket_bytes_cap", 0)),
        "searches": bool(replica.find_unused_parameters and not replica.static_graph),
    }
    try:
        found["unused_bytes"] = int(replica._get_ddp_logging_data().get("unused_parameter_size", 0))
    except Exception:  # its log is for humans, and no part of what DDP promises
        pass
    return found


def _short(value: Any) -> Any:
    """So that it fits into a record's header."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
