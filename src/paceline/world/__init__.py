"""The ``World`` of a training script: ``world = paceline.init()``."""

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.optim import Optimizer

from ..analyze.figures.noise_scale import NoiseScale, estimate_noise_scale
from ..checkpoint.saver import CheckpointSaver
from ..cluster.rank_identity import rank_identity
from ..comm.rehearsal.rehearsed_rank import is_rehearsed
from ..data.sampling.batch_schedule import BatchSchedule as BatchSchedule
from ..data.sampling.sample_order import derive_seed, seed_everything
from ..data.sampling.shard_loader import shard
from ..observe.attach import current_recorder, release_loop
from ..optim.large_batches import RULES, scale_learning_rate
from ..parallel.memory import out_of_memory
from ..parallel.mesh import Mesh
from ..parallel.strategy.training_step import Loss
from ..parallel.tensor.layer_rules import divide_dims as divide_dims
from ..plurals import counted
from ..record.hooks import error_messages
from ..record.hooks.phases import PhaseRecorder
from ..record.ring.recorder import Recorder
from ..record.trial_reports import trial_reporter
from ..record.watch.seed_shift import note_seeded, seed_shift
from .checkpointing import Checkpointer, CheckpointInterval
from .collectives import Collectives
from .finish import RunFinalizer
from .layouts.distribution import ModelDistribution
from .layouts.inference import export_from_world, gather_stages
from .loops.loop_log import LoopLog
from .loops.training_loops import TrainingLoops
from .meter import Meter
from .optimizer_step import OptimizerSteps
from .process_group import (
    attempt_store,
    autocast_dtype,
    check_own_gpu,
    join_process_group,
    select_device,
)
from .progress import Progress, format_value
from .training_checks import MODES
from .training_state import Position, TrainingState
from .training_state import from_rank_0 as from_rank_0
from .training_state import per_rank as per_rank

if TYPE_CHECKING:  # it imports much that only paceline run --show-memory needs
    from ..deploy.export import ExportResult
    from ..parallel.memory.survey import MemorySurvey

_world: "World | None" = None


def init(
    *,
    seed: int = 0,
    precision: str = "fp32",
    device: str | None = None,
    record: bool = True,
    progress: bool = True,
    timeout: float = 1800.0,
    nonfinite: str = "raise",
    replicas: str = "raise",
) -> "World":
    """Initialize this rank, and return its World; without a launcher, a world of one rank.

    A second call returns the same world.

    Args:
        seed: Seed of the random number generators of torch, Python and numpy, and of the order of
            samples. Rank 0 uses it unchanged, each other rank one derived from it.
        precision: "fp32", "bf16" (autocast), or "fp16" (autocast and loss scaling, on a GPU).
        device: "cpu" or "cuda". Default: the GPU of the local rank if there is one, else the CPU.
        record: Write the record from which the summary is made.
        progress: Print progress on rank 0.
        timeout: Seconds that a rank waits in a collective for the other ranks; then it is an error.
        nonfinite: "raise", "warn" or "ignore" a loss or a gradient that is not finite.
        replicas: The same for ranks whose parameters have diverged, and for models that were not
            distributed.

    Raises:
        ValueError: The launcher's environment variables contradict each other, an argument has an
            unknown value, there is no GPU for this rank, a port is in use, or ranks do not connect.
    """
    global _world
    if _world is None:
        error_messages.install()
        _world = World(seed, precision, device, record, progress, timeout, nonfinite, replicas)
        atexit.register(_world.close)
    return _world


class World(ModelDistribution):
    """One rank's view of the job, created by ``paceline.init()``.

    Attributes:
        rank: Global rank of this process.
        size: World size.
        local_rank: Rank of this process within its node.
        mesh: The ranks along named axes: ``mesh.data_rank`` of ``mesh.data_size`` trains other
            samples than the others.
        device: The torch.device of models and batches.
    """

    def __init__(
        self,
        seed: int,
        precision: str,
        device: str | None,
        record: bool,
        progress: bool,
        timeout: float,
        nonfinite: str,
        replicas: str,
    ) -> None:
        identity = rank_identity(dict(os.environ))
        self._survey = _memory_survey()
        if self._survey is not None:
            record = progress = False
        if is_rehearsed():  # values are those of no training, and nothing has a GPU
            nonfinite = "ignore" if nonfinite in MODES else nonfinite
            replicas = "ignore" if replicas in MODES else replicas
            device = "cpu" if device is None or device.startswith("cuda") else device
            precision = "bf16" if precision == "fp16" else precision
        self.rank, self.size, self.local_rank = identity.rank, identity.size, identity.local_rank
        self.mesh = Mesh(self.rank, self.size)
        # Number of ranks before the job lost hosts (launch.recovery.shrink).
        self._full_size = int(os.environ.get("PACELINE_FULL_RANKS", 0))
        if seed_shift():  # another seed for a run of a reference
            seed += seed_shift()
            note_seeded()
        self.seed = seed
        self._scaled_optimizers = weakref.WeakSet[Optimizer]()  # their learning rates
        self.device = select_device(self.local_rank, device)
        self.precision = precision
        self._dtype = autocast_dtype(precision, self.device)
        attached = current_recorder()
        self._recorder = attached or Recorder(self.rank, self.size, enabled=record)
        launch_text = join_process_group(identity, self._recorder, timeout)
        self._store = attempt_store()
        check_own_gpu(self.device, self.local_rank, self._store)
        data_rank = self.mesh.data_rank
        seed_everything(seed if data_rank == 0 else derive_seed(seed, data_rank))
        self._progress = Progress(self.rank, progress)
        if launch_text:
            self._progress.say(launch_text)
        warn = self._progress.warn_once
        phases = PhaseRecorder(self._recorder, release_loop if attached else None)
        common = (self.mesh, self.device, self._dtype)
        self._training = OptimizerSteps(*common, phases, nonfinite, replicas, warn)
        self._state = TrainingState(self._training, Position())
        self._log = LoopLog(self.mesh, self._store, replicas != "ignore", warn)
        self._collectives = Collectives(self.mesh, self._log.go_on)
        self._training.sum_over_data = self._collectives.sum_over_data
        self._training.any_rank = self._collectives.any
        explanations = [self._training.explain, out_of_memory.explain]
        explain_gradient = self._training.explain_missing_gradient
        error_messages.explanations += [self._log.explain, *explanations, explain_gradient]
        self._loops = TrainingLoops(
            self._training, self._state, self._recorder, self._progress, self._log, warn
        )
        self._layouts = []
        self._savers = 0
        self._finish = RunFinalizer(self.rank, self.size, self._store, self._recorder)

    # data and state; models: ModelDistribution

    @property
    def _data_ranks(self) -> int:
        """Number of ranks that train different samples.

        With --show-memory one process loads the batches of one of several ranks.
        """
        return self._survey.ranks if self._survey is not None else self.mesh.data_size

    def shard(
        self,
        loader: Any,
        *,
        global_batch: int | BatchSchedule | None = None,
        every_sample_once: bool = False,
        split: str | None = None,
    ) -> Any:
        """Return this rank's shard of a DataLoader.

        In a job that continues with fewer hosts (``--min-hosts``) the global batch size stays
        unchanged. The order depends on seed and epoch, not on the number of ranks; every sample is
        used, and uneven last batches are weighted by their true size in ``world.backward``, meters
        and means.

        In a layout with axes d, h or w, ranks that share samples get the same ones. Of arrays in
        HDF5, netCDF, zarr or memory, without a transform, each reads its part only.

        Args:
            loader: DataLoader whose ``batch_size`` is per rank, unless ``global_batch`` is given.
            global_batch: Batch size of all ranks together. A ``paceline.BatchSchedule`` changes it
                between epochs (outside of ``world.epochs``: between passes), and a resumed run must
                have the same sizes for the epochs that had begun.
            every_sample_once: For validation. Each sample is seen by one rank, ranks may have
                different numbers of batches, and in ``world.batches`` the models are in eval mode
                without gradients.
            split: "stride" lets each rank read an IterableDataset completely and use only its
                shard, if the dataset has no ``shard(num_shards, index)``.

        Raises:
            ValueError: Fewer samples than ranks, a global batch that is not divisible by the ranks,
                a loader that is sharded already, or a stream that can't be split.
        """
        if not every_sample_once:
            from ..knobs.loading import requested_global_batch  # not needed to start

            global_batch = requested_global_batch() or global_batch
        if self._survey is not None and isinstance(global_batch, BatchSchedule):
            global_batch = global_batch.largest  # which needs most memory
        ranks = self._data_ranks
        full = max(ranks, self._full_size // self.mesh.model_size)
        sharded = shard(
            loader,
            rank=self.mesh.data_rank,
            ranks=ranks,
            # sums of validation are the same for any batch size
            full_ranks=ranks if every_sample_once else full,
            seed=self.seed,
            global_batch=global_batch,
            every_sample_once=every_sample_once,
            split=split,
            agree=self._collectives.check_equal,
            count_all=self._collectives.count,
            division=self._sample_division(),
        )
        experiment = self._recorder.experiment
        sharded.is_branch = experiment is not None and experiment.limit.branches
        self._loops.loaders.append(sharded)
        if full > ranks and global_batch is None and not every_sample_once:
            self._progress.say_once(
                f"the job continues with {ranks} of {full} ranks; the global batch "
                f"remains {counted(loader.batch_size * full, 'sample')}: up to "
                f"{-(-loader.batch_size * full // ranks)} per rank instead of "
                f"{loader.batch_size}"
            )
        return sharded

    def keep(self, **things: Any) -> None:
        """Add objects to the checkpoint: any objects with state_dict and load_state_dict.

        An object's state must be equal on all ranks; a save compares it. ``paceline.per_rank(x)``
        keeps each rank's state instead, ``paceline.from_rank_0(x)`` rank 0's. A model or optimizer
        of ``world.distribute`` is in the checkpoint anyway, unless it is kept per rank.

        Raises:
            ValueError: An object without these methods. ``world.epochs`` raises it if the states of
                the ranks differ.
        """
        for name, thing in things.items():
            self._state.keep(name, thing)

    def scale_learning_rate(
        self,
        optimizer: Optimizer,
        *,
        global_batch: int | BatchSchedule,
        reference_batch: int,
        rule: str = "linear",
        warmup: int = 0,
        decay: str | None = None,
        steps: int | None = None,
    ) -> None:
        """Scale the learning rate, tuned at ``reference_batch``, to ``global_batch``.

        Each step of the optimizer advances warm-up and decay, and checkpoints include them.

        Args:
            global_batch: Of a ``BatchSchedule`` the first size scales the rate that schedulers see.
                For other sizes, ``world.step`` multiplies the rate by the rule's further factor
                during the step, also under other schedulers.
            rule: "linear" (Goyal et al., arXiv 1706.02677) or "sqrt".
            warmup: Optimizer steps from the original to the scaled rate. It has no effect if the
                rate is not enlarged, which Paceline prints.
            decay: Fall of the rate after the warm-up: "linear" or "polynomial" (of power 2) to 0
                after ``steps``, or "sqrt" (divided by the root of the number of steps).
            steps: Optimizer steps of the whole training.

        Raises:
            ValueError: An unknown rule or decay, a batch size below 1, a negative warm-up,
                steps that do not exceed the warm-up, or a second call for the same optimizer.
        """
        if optimizer in self._scaled_optimizers:
            raise ValueError(
                "world.scale_learning_rate: the learning rate of this optimizer was scaled before. "
                "HINT: call it once, before the loop; a batch that changes between epochs is "
                "global_batch=paceline.BatchSchedule({0: 64, 5: 128})"
            )
        schedule = None
        if isinstance(global_batch, BatchSchedule):
            schedule, global_batch = global_batch, global_batch.at(0)
        scheduler = scale_learning_rate(
            optimizer,
            global_batch=global_batch,
            reference_batch=reference_batch,
            rule=rule,
            warmup=warmup,
            decay=decay,
            steps=steps,
        )
        self._scaled_optimizers.add(optimizer)
        if warmup and global_batch <= reference_batch:
            self._progress.say_once(
                f"world.scale_learning_rate: warmup={warmup} has no effect, because the learning "
                f"rate is not enlarged (global_batch={global_batch}, reference_batch="
                f"{reference_batch}). HINT: reference_batch is the batch size for which the rate "
                "was tuned; torch.optim.lr_scheduler.LinearLR rises from a part of any rate"
            )
        if scheduler is not None:
            self._training.add_warmup(scheduler)
        if schedule is not None:
            factor = partial(self._rate_factor, schedule, RULES[rule])
            self._training.rate_factors.append((optimizer, factor))

    def _rate_factor(self, schedule: BatchSchedule, rule: Callable[[float], float]) -> float:
        """Return the rule's factor for the present batch of a schedule, over its first one."""
        loaders = self._loops.loaders
        batches = [
            loader.batch
            for loader in loaders
            if loader.schedule == schedule and not loader.every_sample_once
        ]
        # none where the batch was set from outside of the script
        batch = batches[0] if batches else schedule.at(self._state.position.epoch)
        return rule(batch / schedule.at(0))

    # the loop

    def epochs(
        self, count: int, checkpoint: str | Path | None = None, every: str | int = "epoch"
    ) -> Iterator[int]:
        """Iterate over epochs 0 to ``count - 1``; with ``checkpoint``, resume the last run.

        A run resumes also inside an epoch. A checkpoint is always saved after the last epoch. On
        SIGUSR1, or when the job's time limit is close, a checkpoint is written and the script ends
        on all ranks with exit code 75 (SystemExit), unless it handles SIGUSR1 itself.

        Args:
            checkpoint: Folder of the checkpoints; None to save none.
            every: Interval: "epoch", "2 epochs", 500 (steps), "30s", "10min", "1h".

        Raises:
            ValueError: Before training: the folder can't be written or is not the same on all
                nodes, the state can't be saved or does not fit the checkpoint, or all checkpoints
                are damaged.
        """
        if count < 0:
            raise ValueError(
                f"world.epochs: count must be at least 0; this is {count}. HINT: world.epochs(10)"
            )
        if checkpoint is None:
            return self._loops.epochs(count, None)
        interval = CheckpointInterval.parse(every)
        if self._survey is not None or is_rehearsed():
            return self._loops.epochs(count, None)
        # in a diagnosis the script's own checkpoint folder is not touched
        experiment, source = self._recorder.experiment, None
        if experiment is not None:
            source = Path(checkpoint) if experiment.limit.branches else None
            checkpoint = experiment.place(checkpoint)
        self._savers += 1
        store = PrefixStore(f"{self._savers}", self._store) if self._store else None
        saver = CheckpointSaver(Path(checkpoint), self.rank, self.size, store, self._progress.warn)
        common = (self._state, self._recorder, self._collectives, self._progress.say)
        checkpointer = Checkpointer(saver, interval, *common, source)
        self._finish.savers.append(saver)
        return self._loops.epochs(count, checkpointer)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterate over batches of a loader of ``world.shard``, on the rank's device, with progress.

        The wait for each batch is measured. Other iterables are passed through, with a warning if
        there are several ranks.
        """
        return self._loops.batches(loader)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward of the batch's mean loss, a floating-point tensor of one element.

        The loss is weighted so that the ranks' gradients average to that of the global batch, also
        if its shards are uneven. Gradients that a plain ``optimizer.step()`` has used are discarded
        before.

        Raises:
            ValueError: The loss has another shape or no gradient, it or a gradient is not finite
                (the message names rank, step and layer), the ranks' parameters have diverged, or
                neither ``world.distribute`` nor the script distributes the model.
        """
        self._training.backward(loss)

    def forward_backward(
        self, model: nn.Module, inputs: Any, targets: Any, loss: Loss
    ) -> torch.Tensor:
        """Run forward, loss and backward of one batch; return the mean loss of this rank's samples.

        Every layout can run it; it does what ``world.backward(loss(model(inputs), targets))`` does,
        and the value is the same on all ranks that share samples.

        Args:
            model: As ``world.distribute`` has returned it.
            inputs: A tensor, a tuple of positional arguments or a dict of keyword arguments.
            targets: Any nest of tensors, whose first dimension is that of the samples.
            loss: Called as ``loss(outputs, targets)``: returns the mean over the samples, or their
                sum and their weight, where samples (or tokens) count differently.

        Raises:
            ValueError: The model is not distributed, or the loss has another shape; otherwise as
                for ``world.backward``.
        """
        return self._training.forward_backward(model, inputs, targets, loss)

    def step(self, optimizer: Optimizer, clip: float | None = None) -> bool:
        """Step and zero the gradients at the end of an accumulation; return whether it stepped.

        There is no step inside an accumulation, and if loss scaling found an infinite gradient.

        Args:
            clip: Maximum L2 norm of all gradients together, above 0; None for no clipping.

        Raises:
            ValueError: The optimizer's models accumulate different numbers of batches, the
                optimizer trains parameters that are not distributed, a gradient is not finite, or
                no parameter has a gradient in the optimizer's first step.
        """
        is_new = self._training.add_optimizer(optimizer, in_step=True)
        if is_new and self._loops.checkpointer is not None:
            self._progress.warn_once(
                f"world.step: the {type(optimizer).__name__} was not known when "
                "world.epochs(checkpoint=...) began, so no run can resume from these checkpoints. "
                "HINT: model, optimizer = world.distribute(model, optimizer) before world.epochs"
            )
        return self._training.step(optimizer, clip)

    # over all ranks

    def meter(self) -> Meter:
        """Return a new meter: exact sums over all ranks, part of the checkpoint."""
        meter = Meter(self._collectives.sum, lambda: not self._training.is_filler)
        self._state.new_meter(meter)
        return meter

    def mean(self, total: Any, count: Any) -> float:
        """Return the sum of ``total`` over all ranks, divided by that of ``count``. Collective.

        Args:
            total, count: Numbers or tensors of one element.

        Raises:
            ValueError: The sum of ``count`` is zero.
        """
        meter = Meter(self._collectives.sum, lambda: not self._training.is_filler)
        meter.add(total=total, count=count)
        return meter.ratio("total", "count")

    def any(self, flag: Any) -> bool:
        """Return whether ``flag`` is true on any rank. Collective: every rank must call it."""
        return self._collectives.any(flag)

    def noise_scale(self) -> NoiseScale | None:
        """Return the gradient noise scale of this run until now (McCandlish et al., arXiv
        1812.06162). Collective: every rank must call it.

        A batch that is much smaller needs nearly proportionally fewer steps if it grows; one that
        is much larger gains little. It is measured in sampled steps.

        Returns:
            None with one rank, with less than 8 sampled steps, in layouts that divide models, and
            where gradients are not exchanged by DDP or FSDP2. ``samples`` is None if it is
            undetermined.
        """
        noise = self._recorder.gradient_noise
        kept = [[step, *values] for step, values in noise.kept.items()] if noise else []
        every = self._collectives.gather(kept, list[tuple[int, int, float, float]])
        ranks = [every[rank] for rank in self.mesh.first_of_data_ranks]
        return estimate_noise_scale([{step: (*rest,) for step, *rest in rank} for rank in ranks])

    def log(self, **values: Any) -> None:
        """Print values on rank 0, with epoch and step: numbers, text or tensors of one element."""
        shown = "  ".join(f"{name} {format_value(value)}" for name, value in values.items())
        epoch = min(self._state.position.epoch + 1, self._loops.count)
        where = f"epoch {epoch}  " if epoch else ""
        self._progress.say(f"{where}step {self._recorder.step}  {shown}")
        if self._recorder.step_watch is not None and self.rank == 0:
            self._recorder.step_watch.note_logged(values)
        if (reporter := trial_reporter()) is not None:
            reporter.report(values, epoch or self._recorder.step)

    def export(
        self,
        model: torch.nn.Module,
        path: str | os.PathLike[str],
        *,
        inputs: str | Sequence[str] | torch.Tensor | Sequence[torch.Tensor] = (),
        build: Callable[[], torch.nn.Module] | None = None,
        bounds: Mapping[str, tuple[int, int]] | None = None,
        fields: Mapping[str, Mapping[str, Any]] | None = None,
        backends: Sequence[str] | None = None,
        tolerance: float | None = None,
    ) -> "ExportResult | None":
        """Write ``model`` to a file that programs in C, C++ and Fortran call. Collective.

        Args:
            model: A model of ``world.distribute``, in any layout, or a plain one.
            path: The file; rank 0 writes it.
            inputs: 'x: float64[batch,6]' for each input, or example inputs, whose first dimension
                is the batch. Default: from a first linear layer.
            build: Function that returns the plain model; needed for sharded layouts.
            bounds: Least and largest value of symbolic sizes: {"batch": (1, 4096)}.
            fields: Units and normalisation: {"x": {"unit": "K", "mean": [...], "std": [...]}}.
            backends: Those of "builtin", "onnxruntime", "aotinductor" that are tried; default: all.
            tolerance: Largest error relative to the largest output.

        Returns:
            On rank 0, errors and speeds of the backends.

        Raises:
            ValueError: The model can't be exported; the error says why.
        """
        options: dict[str, Any] = {"inputs": inputs, "bounds": bounds, "fields": fields}
        options |= {"backends": backends, "tolerance": tolerance}
        result, error = None, None
        try:
            gathered = self._gather_divided(model, build is not None)
            result = export_from_world(model, Path(path), self.rank, build, gathered, **options)
        except Exception as failed:
            error = failed
        # All ranks learn of an error together, and the file exists on return.
        text = None if error is None else f"{type(error).__name__}: {error}"
        texts = self._collectives.gather(text, str | None)
        if error is not None:
            raise error
        if (first := next(filter(None, texts), None)) is not None:
            raise ValueError(f"world.export failed on another rank: {first}")
        return result

    def _gather_divided(self, model: torch.nn.Module, has_build: bool) -> dict[str, Any] | None:
        """Return the whole state of a divided model on rank 0; None of another one. Collective."""
        divided = self._state.owned.divided_model(model)
        if divided is None:
            return None
        if not has_build:
            raise ValueError(
                "world.export: the layout divides the model, and no rank has all of it. HINT: "
                "world.export(..., build=lambda: Net()), a function that returns the plain model"
            )
        whole = self._state.owned.wholes[id(divided)]
        return gather_stages(divided, whole, self._collectives.gather)

    def close(self) -> None:
        """Complete the last checkpoint, print the summary, and destroy the process group.

        Called automatically at exit.
        """
        global _world
        if _world is self:
            _world = None
            atexit.unregister(self.close)
            if getattr(sys, "last_value", None) is None:  # no uncaught exception
                self._log.go_on()
            error_messages.explanations.clear()
            out_of_memory.forget_models()
            self._record_memory()
            self._finish.run()


def _memory_survey() -> "MemorySurvey | None":
    """Return what ``paceline run --show-memory`` traces this script with, if it does."""
    if not os.environ.get("PACELINE_SHOW_MEMORY"):
        return None
    from ..parallel.memory.survey import current_survey

    return current_survey()
