"""Measurements of an experiment of ``paceline diagnose`` that the record's events do not have.

They are the resources that each phase used, how far the batch sizes explain the CPU time of steps,
and facts about the script (threads, layers, parameters, DDP options).
"""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, ref

from ..hooks import taps
from ..ring.recorder import clock_id
from ..ring.resource_usage import OtherThreads, measure_page_fault_s, read_usage, usage_between
from .switches import GarbageCollector

CONVOLUTIONS = ("Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d")
MATRIX_SIDE = 256  # rows of the matrices whose product measures the speed of the rank's cores
PROBE_DURATION_S = 0.2


class Observer:
    """Collector of one rank's measurements; ``facts`` goes into the record's header."""

    def __init__(self, collector: GarbageCollector | None = None) -> None:
        self.facts: dict[str, Any] = {"used": {}}
        self._collector = collector or GarbageCollector()
        self.convolutions: list[Any] = []
        self.epoch_batches = float("inf")  # of the training's dataset; infinite if not known
        self._elements = 0.0
        self._step_costs: list[tuple[float, float]] = []  # (elements, CPU seconds)
        self._fetch_times: deque[float] = deque(maxlen=200)
        self._start_times: list[float] = []
        self._stop_times: list[float] = []
        self._training_dataset: int | None = None
        self.ddp_models: list[ref[Any]] = []
        self.optimizers: WeakSet[Any] = WeakSet()  # that have stepped
        self._search_time = 0.0

    def install(self) -> None:
        self.facts["mask_at_start"] = _cpu_mask()
        taps.on_import("torch.nn.modules.module", self._hook_modules)
        taps.on_step(after=self._note_optimizer)
        taps.REPLICA.after(self._note_replica)
        taps.REPLICA_FORWARD_END.around(self._end_forward)

    # Phases

    def begin_phase(self) -> None:
        """Start to measure; called before the measured steps of a phase."""
        self._step_costs.clear()
        self._start_times.clear()
        self._stop_times.clear()
        self._search_time, self._elements = 0.0, 0.0
        self._other_threads, self._usage_before = OtherThreads(), read_usage()
        self._collector.begin()
        self._thread_time = time.thread_time()

    def end_phase(self, phase: str, more: dict[str, Any] | None = None) -> None:
        """Store the measurements of a phase, and ``more``; called after its measured steps."""
        used: dict[str, Any] = usage_between(self._usage_before, read_usage())
        if busiest := self._other_threads.busiest():
            used["others"] = busiest
        if self._search_time:
            used["searching"] = self._search_time
        if self._start_times:
            usual = statistics.median(self._fetch_times) if self._fetch_times else 0.0
            each = [max(start - usual, 0.0) for start in self._start_times]
            used |= {"starts": len(each), "starting": sum(each) + sum(self._stop_times)}
        if len(self._step_costs) > 2:
            used["elements"] = fit_cpu_time(self._step_costs)
        used |= self._collector.results() | (more or {})
        self.facts["used"][phase] = {name: _rounded(value) for name, value in used.items()}

    def after_step(self) -> None:
        """Store the CPU time of a step; called after each measured step of the job."""
        spent = time.thread_time()
        if self._elements:
            self._step_costs.append((self._elements, spent - self._thread_time))
        self._thread_time, self._elements = spent, 0.0

    # The loader

    def loader_started(self, dataset: int, seconds: float, batches: float = float("inf")) -> None:
        """Store the seconds from making an iterator to its first batch.

        ``dataset`` is an id, ``batches`` the length of the iterator. The dataset that is read first
        is taken to be the training's.
        """
        if self._training_dataset is None:
            self._training_dataset, self.epoch_batches = dataset, batches
            if batches < float("inf"):
                self.facts["epoch_batches"] = int(batches)
        if dataset == self._training_dataset:
            self._start_times.append(seconds)

    def loader_stopped(self, dataset: int, seconds: float) -> None:
        """Store the seconds that an iterator took to stop after its last batch."""
        if dataset == self._training_dataset:
            self._stop_times.append(seconds)

    def batch_fetched(self, dataset: int, batch: Any, seconds: float | None) -> None:
        """Store the seconds of a fetch (None for an iterator's first batch) and the batch size."""
        if dataset == self._training_dataset:
            if seconds is not None:
                self._fetch_times.append(seconds)
            self._elements += count_elements(batch)

    # The script

    def _hook_modules(self, module: Any) -> None:
        def inspect_layer(layer: Any, inputs: Any) -> None:
            if type(layer).__name__ in CONVOLUTIONS and layer.weight.dim() == 4:
                if all(one() is not layer for one in self.convolutions):
                    self.convolutions.append(ref(layer))
                    self.facts["convolutions"] = len(self.convolutions)
                if inputs and hasattr(inputs[0], "dim") and inputs[0].dim() == 4:
                    self._detect_channels_last(layer, inputs[0])

        self._module_hook = module.register_module_forward_pre_hook(inspect_layer)

    def _detect_channels_last(self, layer: Any, images: Any) -> None:
        import torch

        last = torch.channels_last
        if images.is_contiguous(memory_format=last) and not images.is_contiguous():
            self.facts["channels_last"] = True
        if layer.weight.is_contiguous(memory_format=last) and not layer.weight.is_contiguous():
            self.facts["channels_last"] = True

    def _note_optimizer(self, optimizer: Any, *_: Any) -> None:
        """Sum the bytes of the trained parameters by dtype, once for each optimizer."""
        if optimizer in self.optimizers:
            return
        self.optimizers.add(optimizer)
        sizes: dict[str, int] = self.facts.setdefault("parameters", {})
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                dtype = str(parameter.dtype).removeprefix("torch.")
                sizes[dtype] = sizes.get(dtype, 0) + parameter.nbytes

    def gradient_addresses(self) -> tuple[set[int], set[int], int]:
        """Return the addresses of all gradients, those of parameters, and the gradients' bytes."""
        gradients, parameters, size = set(), set(), 0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameters.add(parameter.data_ptr())
                    if parameter.grad is not None and not parameter.grad.is_sparse:
                        gradients.add(parameter.grad.data_ptr())
                        size += parameter.grad.nbytes
        return gradients, parameters, size

    def _note_replica(self, _: None, replica: Any, *__: Any, **___: Any) -> None:
        self.ddp_models.append(ref(replica))

    def _end_forward(self, end: Callable[..., Any], replica: Any, output: Any) -> Any:
        """Measure the search for unused parameters, with which DDP ends a forward."""
        if not replica.find_unused_parameters or replica.static_graph:
            return end(replica, output)
        start = time.perf_counter()
        try:
            return end(replica, output)
        finally:
            self._search_time += time.perf_counter() - start

    def end_setup(self) -> None:
        """Store facts about the set-up, and remove the hook that slows down module calls."""
        import torch

        self.facts |= {"threads": torch.get_num_threads(), "mask": _cpu_mask()}
        self.facts |= {"gpu": torch.cuda.is_available()}
        self.facts |= {"host_cores": os.cpu_count(), "kernel": clock_id().partition("/")[0]}
        handle = self.__dict__.pop("_module_hook", None)
        if handle is not None:
            handle.remove()

    def finish(self) -> None:
        """Store the last facts; called when nothing of the script runs any more."""
        replicas = [one for found in self.ddp_models if (one := found()) is not None]
        if replicas:
            self.facts["ddp"] = _ddp_options(max(replicas, key=_gradient_bytes))
        self.facts["fault_s"] = _rounded(measure_page_fault_s())
        self.facts["product_s"] = {
            name: _rounded(seconds) for name, seconds in self._matmul_times().items()
        }

    def _matmul_times(self) -> dict[str, float]:
        """Return seconds of one matrix product by dtype: float32, bfloat16, the script's own."""
        import torch

        found = {}
        wanted = {"float32", "bfloat16", *self.facts.get("parameters", {})}
        for name in wanted & {"float32", "float64", "bfloat16"}:
            matrix = torch.randn(MATRIX_SIDE, MATRIX_SIDE, dtype=getattr(torch, name))
            torch.mm(matrix, matrix)
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < PROBE_DURATION_S:
                torch.mm(matrix, matrix)
                count += 1
            # The mean and not the minimum: a cgroup's CPU quota shows as pauses between products.
            found[name] = (time.perf_counter() - start) / count
        return found


def _cpu_mask() -> str:
    """Return the cores that this process may run on, as a hexadecimal bit mask."""
    return f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"


def count_elements(batch: Any) -> float:
    """Return the number of elements of all tensors in a batch."""
    from torch.utils._pytree import tree_leaves

    return float(sum(leaf.numel() for leaf in tree_leaves(batch) if hasattr(leaf, "numel")))


def fit_cpu_time(steps: list[tuple[float, float]]) -> dict[str, float]:
    """Fit a line to the CPU time of steps over the elements in their batches.

    ``steps`` has (elements, CPU seconds). Returns the mean and the standard deviation (``spread``)
    of the elements, the slope in seconds per element, and the correlation.
    """
    sizes, times = zip(*steps, strict=True)
    spread = statistics.pstdev(sizes)
    found = {"mean": _rounded(statistics.fmean(sizes)), "spread": _rounded(spread)}
    if not spread or not statistics.pstdev(times):
        return found | {"slope": 0.0, "correlation": 0.0}
    line = statistics.linear_regression(sizes, times)
    correlation = statistics.correlation(sizes, times)
    return found | {"slope": _rounded(line.slope), "correlation": _rounded(correlation)}


def _gradient_bytes(replica: Any) -> int:
    return sum(one.nbytes for one in replica.parameters() if one.requires_grad)


def _ddp_options(replica: Any) -> dict[str, Any]:
    """Return options of a DDP model, and its unused parameter bytes in the last step."""
    found = {
        "bytes": _gradient_bytes(replica),
        "bucket_bytes": int(getattr(replica, "bucket_bytes_cap", 0)),
        "searches": bool(replica.find_unused_parameters and not replica.static_graph),
    }
    try:
        found["unused_bytes"] = int(replica._get_ddp_logging_data().get("unused_parameter_size", 0))
    except Exception:  # the logging data is not part of DDP's public interface
        pass
    return found


def _rounded(value: Any) -> Any:
    """Round to 6 digits, so that the results fit into a record's header."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
