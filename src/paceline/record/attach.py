"""Record a script that knows nothing of it: set up before the script runs.

``PACELINE_ATTACH`` is set by ``paceline run --record``, ``PACELINE_COUNT_FLOPS`` with
``--count-flops``. Processes that the script starts with
``multiprocessing`` (``torch.multiprocessing.spawn`` too) may become ranks by themselves: they are
listened to as well, and recorded once they have joined a process group.
"""

import atexit
import multiprocessing.process
import os
from typing import Any

from .hooks.import_hooks import after_import
from .ring.recorder import Recorder

_loop: Any = None
_sampler: Any = None
_pid = 0  # of the process that the two belong to: a forked child inherits them


def attach(child: bool = False) -> None:
    """Listen to this process's script. ``child``: record nothing before it is a rank."""
    global _loop, _sampler, _pid
    if _pid == os.getpid():
        return
    import torch

    from .experiments.rung import rung_of_process
    from .hooks import torch_patches
    from .hooks.gpu_kernels import KernelSampler
    from .hooks.training_loop import LoopRecorder
    from .ring.stack_sampler import StackSampler

    if _loop is None:
        recorder = Recorder(_number("RANK", 0), _number("WORLD_SIZE", 1), wait=child)
        _loop = LoopRecorder(recorder)
        rung = rung_of_process()
        climber = None
        if rung is not None:
            from .experiments.experiment import Experiment

            climber = Experiment(rung, recorder, detach)
            climber.install()
        torch_patches.install(_loop)
        torch_patches.measure_hooks(_loop)
        recorder.clear()
        recorder.experiment = climber
        if torch.version.cuda or torch.version.hip:
            recorder.kernel_sampler = KernelSampler(recorder)
        if os.environ.get("PACELINE_COUNT_FLOPS"):
            from .hooks.flop_counter import COUNTED_STEP, FlopCounter

            # An experiment counts in its warm-up: a step is slower for it.
            step = COUNTED_STEP if rung is None else max(min(COUNTED_STEP, rung.warm - 2), 1)
            recorder.flop_counter = FlopCounter(recorder, step)
        process: Any = multiprocessing.process.BaseProcess
        process.start = _start
    _loop.reset()
    _pid = os.getpid()
    _sampler = StackSampler(_loop.recorder)
    atexit.register(detach)


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else otherwise


def detach() -> None:
    """The script has ended: write what still waits to be written."""
    if _loop is not None and not _loop.stopped:
        _loop.end()
        _loop.recorder.write_cost()
    if _sampler is not None:
        _sampler.stop()


def update_header(**more: Any) -> None:
    """Write more of this rank into the record's header, where there is a record."""
    if _loop is not None and not _loop.stopped:
        _loop.recorder.update_header(**more)


def release_recorder() -> Recorder | None:
    """For ``paceline.init``, which records the loop by itself: this process's recorder, if there
    is one. Process groups, saves and samples are still recorded from here."""
    if _loop is None:
        return None
    _loop.stopped = True
    recorder: Recorder = _loop.recorder
    return recorder


class _Listened:
    """A process's target that is listened to before it runs."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        after_import({"torch": lambda _: attach(child=True)})  # not all such processes need it
        return self.target(*args, **kwargs)


# Whose processes are no ranks.
_LOADERS = ("torch.utils.data", "multiprocessing.", "paceline.data.")
_original_start = multiprocessing.process.BaseProcess.start


def _start(self: Any) -> None:
    target = getattr(self, "_target", None)
    module = getattr(target, "__module__", "") or ""
    if target is not None and not module.startswith(_LOADERS):
        self._target = _Listened(target)
    _original_start(self)
