"""Measurements of an experiment of ``paceline diagnose`` that the record's events do not have.

They are the resources that each phase used, how far the batch sizes explain the CPU time of steps,
facts about the script (threads, layers, parameters, DDP options), and containers that grow.
"""

import gc
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakSet, ref

from ..hooks import taps
from ..ring.recorder import clock_id
from ..ring.resource_usage import OtherThreads, measure_page_fault_s, read_usage, usage_between
from .switches import GarbageCollector

# Containers of the script that get longer in each step: what keeps memory that should be freed.
#
# The lengths of all containers are compared after the first step and after the measured steps. A
# container is named by the variable or the attribute that refers to it.

KINDS = (list, dict, set, deque)
MIN_GROWTH_PER_STEP = 0.9  # elements; a container that is filled once per step has 1
MAX_OBJECTS = 1_000_000  # of a process: with more, no containers are compared
MAX_NAMED = 3
MAX_NAME_CHARS = 80
MAX_DEPTH = 3  # of containers within an element
MAX_PARTS = 64  # of an element that are looked at
LAST_ELEMENTS = 8  # whose bytes are measured
MIN_BYTES_PER_STEP = 64 << 10  # of tensors without a graph; less is not reported


class ContainerSizes:
    """Lengths of the containers of this process at one time."""

    def __init__(self) -> None:
        objects = gc.get_objects()
        containers = [x for x in objects if type(x) in KINDS] if len(objects) <= MAX_OBJECTS else []
        self._lengths = {id(container): len(container) for container in containers}

    def growing(self, steps: int) -> list[dict[str, Any]]:
        """Return the containers with tensors that grew in each of ``steps`` steps since then.

        Each has name, elements and bytes per step, and whether its tensors keep their graphs.
        """
        if steps < 2:
            return []
        known, growing = self._lengths, list[dict[str, Any]]()
        for container in [x for x in gc.get_objects() if type(x) in KINDS and x is not known]:
            added = (len(container) - known.get(id(container), len(container))) / steps
            if added < MIN_GROWTH_PER_STEP:
                continue
            newest = list(islice(_newest(container), LAST_ELEMENTS))
            tensors = [tensor for element in newest for tensor in _tensors(element, MAX_DEPTH)]
            graphs = any(tensor.grad_fn is not None for tensor in tensors)
            nbytes = added * sum(tensor.nbytes for tensor in tensors) / max(len(newest), 1)
            if not (graphs or nbytes >= MIN_BYTES_PER_STEP):
                continue
            if name := _name_of(container):
                kind = type(container).__name__
                row = {"name": name[:MAX_NAME_CHARS], "kind": kind, "elements": round(added, 3)}
                growing.append(row | {"bytes": round(nbytes), "graphs": graphs})
        return sorted(growing, key=lambda row: (not row["graphs"], -row["bytes"]))[:MAX_NAMED]


def _newest(container: Any) -> Iterable[Any]:
    values = container.values() if isinstance(container, dict) else container
    return iter(values) if isinstance(container, set) else reversed(values)


def _tensors(value: Any, depth: int) -> Iterable[Any]:
    """Yield the tensors of an element: itself, or those in its containers."""
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        parts = value.values() if isinstance(value, dict) else value
        for part in islice(parts, MAX_PARTS):
            yield from _tensors(part, depth - 1)


def _name_of(container: Any) -> str:
    """Return the variable or attribute of the script that refers to a container; "" if none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not _is_library(module):
            name = _key_of(container, frame.f_locals) or _key_of(container, frame.f_globals)
            if name:
                return f"{name} in {frame.f_code.co_name}()".replace(" in <module>()", "")
        frame = frame.f_back
    for owner in gc.get_referrers(container):
        values = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None)
        if isinstance(owner, ModuleType) or not isinstance(values, Mapping):
            continue
        name = _key_of(container, values)
        if not name:
            continue
        if "__name__" in values and "__builtins__" in values:  # the globals of a module
            module = str(values["__name__"])
            return "" if _is_library(module) else f"{module}.{name}"
        holder = owner if values is not owner else _holder_of(owner)
        kind = type(holder)
        if holder is not None and not _is_library(kind.__module__):
            return f"{kind.__name__}.{name}"
    return ""


def _holder_of(values: Mapping[Any, Any]) -> Any:
    """Return the object whose ``__dict__`` this is; None if it is an ordinary dictionary."""
    for owner in gc.get_referrers(values):
        if getattr(owner, "__dict__", None) is values:
            return owner
    return None


def _key_of(container: Any, values: Mapping[Any, Any]) -> str:
    named = (key for key, value in list(values.items()) if value is container)
    return next((key for key in named if isinstance(key, str)), "")


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("paceline", "torch", "gc")


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
                if all(known() is not layer for known in self.convolutions):
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
        for parameter in taps.parameters_of(optimizer):
            dtype = str(parameter.dtype).removeprefix("torch.")
            sizes[dtype] = sizes.get(dtype, 0) + parameter.nbytes

    def gradient_addresses(self) -> tuple[set[int], set[int], int]:
        """Return the addresses of all gradients, those of parameters, and the gradients' bytes."""
        parameters = taps.parameters_of(*self.optimizers)
        gradients = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
        addresses = [{tensor.data_ptr() for tensor in each} for each in (gradients, parameters)]
        return addresses[0], addresses[1], sum(gradient.nbytes for gradient in gradients)

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
        replicas = [replica for weak in self.ddp_models if (replica := weak()) is not None]
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
    return sum(parameter.nbytes for parameter in replica.parameters() if parameter.requires_grad)


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
