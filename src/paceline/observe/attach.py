"""Record a script that does not use Paceline's API: set up the recorder before the script runs.

``paceline run --record`` sets the environment variable ``PACELINE_ATTACH``; ``--count-flops`` sets
``PACELINE_COUNT_FLOPS``. Processes that the script starts with ``multiprocessing`` (also with
``torch.multiprocessing.spawn``) may become ranks. The hooks are installed in them as well, and
recording begins once they have joined a process group.
"""

import atexit
import multiprocessing.process
import os
from pathlib import Path
from typing import Any

from ..record.hooks.hook_failures import report_failure
from ..record.hooks.import_hooks import after_import
from ..record.ring.recorder import Recorder
from ..security.files import InvalidFileError, read_regular

_loop: Any = None
_sampler: Any = None
_training: Any = None  # the observer of paceline verify
_pid = 0  # process that _loop and _sampler belong to: a forked child inherits them


def attach(child: bool = False) -> None:
    """Install the hooks in this process.

    ``child``: record nothing before the process has joined a process group.
    """
    global _loop, _sampler, _training, _pid
    if _pid == os.getpid():
        return
    import torch

    from ..record.experiments.rung import rung_of_process
    from ..record.hooks import torch_patches
    from ..record.hooks.training_loop import LoopRecorder
    from ..record.ring.stack_sampler import StackSampler

    if _loop is None:
        recorder = Recorder(_int_variable("RANK", 0), _int_variable("WORLD_SIZE", 1), wait=child)
        _loop = LoopRecorder(recorder)
        rung = rung_of_process()
        experiment = _measured_run(rung, recorder)
        torch_patches.install(_loop)
        torch_patches.measure_hooks(_loop)
        _training = _observe_training()
        recorder.clear()
        recorder.experiment = experiment
        if os.environ.get("PACELINE_GUARD"):
            from ..record.watch import seed_shift, step_watch

            step_watch.install(recorder)
            seed_shift.install()
        if torch.version.cuda or torch.version.hip:
            recorder.kernel_sampler = sampler_of_run(rung, recorder)
        if os.environ.get("PACELINE_COUNT_FLOPS"):
            from ..record.hooks.sampled_steps import COUNTED_STEP, FlopCounter

            # An experiment counts in its warm-up, because counting slows the step down.
            step = COUNTED_STEP if rung is None else max(min(COUNTED_STEP, rung.warm - 2), 1)
            recorder.flop_counter = FlopCounter(recorder, step)
        process: Any = multiprocessing.process.BaseProcess
        process.start = _start
    _loop.reset()
    _pid = os.getpid()
    _sampler = StackSampler(_loop.recorder)
    atexit.register(detach)


def _measured_run(rung: Any, recorder: Recorder) -> Any:
    """Install the experiment or the limits of this process; return None if it has none."""
    from ..record.experiments.protected_run import ProtectedRun, limit_of_process

    limit = limit_of_process()
    if rung is not None:
        from ..record.experiments.experiment import Experiment

        run: ProtectedRun = Experiment(rung, recorder, detach)
    elif limit is not None:
        run = ProtectedRun(limit, recorder, detach)
    else:
        return None
    run.install()
    return run


def sampler_of_run(rung: Any, recorder: Recorder) -> Any:
    """Return the sampler of a run's GPU kernels; None in an experiment without a survey.

    Sampling slows steps down, and the steps of experiments are compared with each other. So only
    the survey of ``paceline diagnose`` has a sampler, for steps after the measured ones.
    """
    from ..record.hooks.sampled_steps import KernelSampler

    if rung is not None and not rung.survey_until:
        return None
    sampler = KernelSampler(recorder)
    if rung is not None:
        sampler.first = rung.warm + rung.steps + 1
    return sampler


def _observe_training() -> Any:
    """Install the hooks of ``paceline verify``, which call those of the recorder."""
    from .settings import settings_of_process

    settings = settings_of_process()
    if settings is None:
        return None
    from .settings import check_folder
    from .training_observer import TrainingObserver

    check_folder(settings)
    observer = TrainingObserver(settings)
    observer.install()
    return observer


def _int_variable(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default


def detach() -> None:
    """Stop recording at the end of the script, and write the events that are still pending."""
    if _training is not None:
        try:
            _training.script_ended()
        except Exception as error:
            report_failure("the end of the observation", error)
    if _loop is not None and not _loop.stopped:
        try:
            _loop.end()
            _note_children(_loop.recorder)
            if _loop.recorder.experiment is not None:
                _loop.recorder.experiment.write_results()
        except Exception as error:
            report_failure("the end of the script", error)
        _loop.recorder.write_cost()
    if _sampler is not None:
        _sampler.stop()


def update_header(**fields: Any) -> None:
    """Add fields to the header of this process's record, if there is one.

    After ``paceline.init`` as well: the recorder remains the same.
    """
    if _loop is not None:
        _loop.recorder.update_header(**fields)


def current_recorder() -> Recorder | None:
    """Return this process's recorder; None without one."""
    recorder: Recorder | None = _loop.recorder if _loop is not None else None
    return recorder


def release_loop() -> None:
    """Stop recording the training loop, which a ``World`` records from now on.

    Process groups, checkpoint saves and stack samples are still recorded by this module's hooks.
    """
    if _loop is not None and not _loop.stopped:
        _loop.end()
        _loop.stopped = True


def _note_children(recorder: Recorder) -> None:
    """Write into the header how many optimizer steps child processes did that are no ranks."""
    folder = os.environ.get("PACELINE_RECORD")
    steps = []
    for note in Path(folder).glob(f"child-of-{os.getpid()}-*") if folder else ():
        try:
            text = read_regular(note, 20, follow_links=False, owner=os.geteuid())
        except (OSError, InvalidFileError) as error:
            report_failure("the steps of a child process", error)
            continue
        steps += [int(text)] if text.isdigit() else []
        note.unlink(missing_ok=True)
    if steps:
        recorder.update_header(children={"count": len(steps), "steps": sum(steps)})


class _RecordedTarget:
    """The target of a ``multiprocessing`` process, in which the hooks are installed first."""

    def __init__(self, target: Any) -> None:
        self.target, self.parent = target, os.getpid()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        after_import(
            {"torch": lambda _: attach(child=True)}
        )  # not every such process imports torch
        before = _loop.recorder.step if _loop is not None else 0
        try:
            return self.target(*args, **kwargs)
        finally:
            self._note_steps(before)

    def _note_steps(self, before: int) -> None:
        """Leave a note for the parent if this process trained without a process group."""
        folder = os.environ.get("PACELINE_RECORD")
        steps = _loop.recorder.step - before if _loop is not None else 0
        if not folder or steps <= 0 or _loop.recorder.path is not None:
            return
        from ..security.folders import replace_file  # ranks do not need it to start

        try:
            replace_file(
                Path(folder, f"child-of-{self.parent}-{os.getpid()}"), b"%d" % steps, 0o600
            )
        except OSError as error:
            report_failure("the end of a child process", error)


# Modules whose processes are never ranks.
_NO_RANK_MODULES = ("torch.utils.data", "multiprocessing.", "paceline.data.")
_original_start = multiprocessing.process.BaseProcess.start


def _start(self: Any) -> None:
    target = getattr(self, "_target", None)
    module = getattr(target, "__module__", "") or ""
    if target is not None and not module.startswith(_NO_RANK_MODULES):
        self._target = _RecordedTarget(target)
    _original_start(self)
