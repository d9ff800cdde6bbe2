"""The process of a rank: setup after the fork, running the script as ``__main__``, and shutdown."""

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import gc
import hashlib
import io
import itertools
import json
import os
import platform
import random
import runpy
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ...cluster.horovod_import import AUTO, VARIABLE, with_horovod
from ...cluster.rank_identity import (
    RankIdentity,
    job_key,
    rank_identity,
    set_torchrun_variables,
)
from ...cluster.schedulers.env_numbers import openmp_threads
from ...knobs import tuning
from ...knobs.registry import apply_knobs
from ...observe.attach import attach, detach
from ...record import trial_reports
from ...record.hooks import script_options
from ...record.hooks.error_messages import EXIT_CODE, format_error, is_peer_gone, summarize_error
from ...record.hooks.group_shutdown import patch_destroy_process_group
from ...record.hooks.import_hooks import after_import
from ...record.ring.header_schema import MAX_FAILURE_CHARS
from ...record.ring.launcher_messages import send_to_launcher
from ...record.ring.recorder import update_all_headers
from ...security.processes import import_folders, module_folders, python_command
from .. import job_folder
from ..linux_processes import PARENT_DEATH_SIGNAL, prctl, set_title
from ..monitor import rank_stacks
from .fork_server import RankStart
from .framework_variables import check_horovod, introduce_to_jax

_BUFFERED_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


# Allocation of memory from the nearest NUMA node, by set_mempolicy(2), which has no function in
# the C library.
#
# The NUMA node is preferred, not bound: if it is full, memory is allocated from another one, and
# the job continues.

_PREFERRED = 1  # linux/mempolicy.h
_BITS = 1024  # size of the mask, in NUMA nodes
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_CALL = {"x86_64": 238, "aarch64": 237, "ppc64le": 261, "riscv64": 237, "s390x": 270}


def prefer(node: int) -> bool:
    """Let this process and its future children allocate memory from NUMA node ``node`` first.

    Return whether that is possible: a container may forbid it (see --report-bindings).
    """
    call = _CALL.get(platform.machine())
    if call is None:
        return False
    mask = (ctypes.c_ulong * (_BITS // _WORD))()
    mask[node // _WORD] = 1 << (node % _WORD)
    arguments = ctypes.c_long(call), _PREFERRED, mask, ctypes.c_ulong(_BITS)
    return bool(ctypes.CDLL(None).syscall(*arguments) == 0)


def become(start: RankStart) -> None:
    """Turn the forked process into a rank: session, pipes, environment, cores, threads."""
    os.setsid()
    prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(kind, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The launcher forwards these from the scheduler: a script without a handler must continue.
    for kind in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(kind, signal.SIG_IGN)
    out, err, status = start.pipes
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    if start.environment["LOCAL_RANK"] != "0":  # at most one rank reads standard input
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    os.environ.clear()
    os.environ.update(start.environment)
    # The PID identifies the rank (exec of a new interpreter does not change it). Processes that the
    # script starts inherit the variable, but in them the descriptor may be another file.
    os.environ["PACELINE_STATUS"] = f"{os.getpid()}:{status}"
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)
    if start.memory is not None:
        prefer(start.memory)


def run_forked(start: RankStart) -> NoReturn:
    """Run a forked rank from its fork to its end."""
    become(start)
    # With many arguments the variable is too long for programs that the script starts.
    command = json.loads(os.environ.pop("PACELINE_COMMAND"))
    for stream in (sys.stdout, sys.stderr):
        # At this point the streams are TextIOWrapper objects; the type stub declares TextIO.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _unshare_state(openmp_threads(os.environ))
    faulthandler.enable()
    finish(execute(command), ShortEnd() if may_be_short() else None)


def exec_fresh(start: RankStart) -> NoReturn:
    """Replace the forked process with a new interpreter that runs the same command."""
    become(start)
    os.set_inheritable(start.pipes[2], True)
    code = "from paceline.launch.ranks.rank_process import main; main()"
    try:
        os.execv(sys.executable, python_command("-u", "-X", "faulthandler", "-c", code))
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise
        sys.exit(f"paceline: {_too_large(os.environ)}")


def _too_large(environment: Mapping[str, str]) -> str:
    """Return the error message for an environment that the kernel does not pass to a program."""
    sizes = {name: len(os.fsencode(f"{name}={value}")) for name, value in environment.items()}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} ({sizes[name]:,} bytes)" for name in largest)
    return (
        f"the environment has {sum(sizes.values()):,} bytes, too many for a new interpreter; the "
        f"largest environment variables are {named}. HINT: unset those that the script does not "
        "need "
        f"(env -u {largest[0]} paceline run ...), or without --fresh"
    )


def record_here(target: Path, command: dict[str, Any]) -> NoReturn:
    """Run and record one rank that was started by another launcher (``paceline record``).

    The rank's record is copied to ``target`` at its end, also if the script fails. The record of a
    rank that was killed is copied by ranks that end later on the same host.

    Raises:
        ValueError: The script can't be run, ``target`` contains a record of an earlier run, is used
            by another run or can't be written, or the launcher's environment variables contradict
            each other.
    """
    from ..job import Job, check
    from ..script_source import uses_horovod

    place = rank_identity(dict(os.environ))
    run = _run_of_launcher(place)
    set_torchrun_variables(place)
    first = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0
    choice = os.environ.get(VARIABLE, AUTO)
    job = Job(**command, record=target if first else None, horovod=choice)
    check(job)
    lock = job_folder.lock_record(target, run, of_this_process=place.rank == 0)
    folder = job_folder.job_folder()
    os.environ.update(PACELINE_ATTACH="1", PACELINE_RECORD=str(folder), PACELINE_RUN=run)
    job_folder.write_destination(folder, target, [command["name"], *command["args"]], run)
    if place.rank == 0:
        lock.keep(lambda line: print(f"paceline: {line}", file=sys.stderr))
    code = execute(command, uses_horovod(job))
    detach()
    job_folder.clear(folder)
    job_folder.clear_orphans()
    lock.release()
    finish(code)


def _run_of_launcher(place: RankIdentity) -> str:
    """Return the ID of the run to which a rank of another launcher belongs; "" if it has none."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if given != "none":  # torchrun's default
        return given
    key = job_key(dict(os.environ), place)
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""


def main() -> NoReturn:
    """Run a rank in a new interpreter (after ``exec_fresh``)."""
    os.set_inheritable(int(os.environ["PACELINE_STATUS"].partition(":")[2]), False)
    finish(execute(json.loads(os.environ.pop("PACELINE_COMMAND"))))


def _unshare_state(threads: int | None) -> None:
    """Reset state that forked ranks share, but separate interpreters do not."""
    gc.enable()
    sys.excepthook = sys.__excepthook__  # the command line has set another
    tempfile.tempdir = None  # found with the launcher's TMPDIR; the rank may have another
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        # GPUs have a fixed seed in every process; a new interpreter draws only the CPU's.
        sys.modules["torch"].default_generator.seed()
        if threads is not None:
            sys.modules["torch"].set_num_threads(threads)


def execute(command: dict[str, Any], horovod: bool | None = None) -> int:
    """Run the script or module as ``__main__`` and return its exit code.

    ``horovod``: whether it uses Horovod; None: the launcher has set variables for it then.

    An exception is reported to the launcher at once, before other ranks can notice the end of this
    rank and fail in turn.
    """
    if os.environ.get("PACELINE_REHEARSE"):
        from .previews import rehearse

        ends: list[ShortEnd] = []

        def run() -> int:
            ends.append(ShortEnd())
            return execute(command, horovod)

        return rehearse(run, lambda code: finish(code, ends[-1]))
    sys.argv = [command["name"], *command["args"]]
    if "RANK" in os.environ:
        set_title(f"rank {os.environ['RANK']}: {' '.join(sys.argv)}")
    rank_stacks.answer()
    try:
        after_import(
            {
                "torch.distributed.distributed_c10d": _patch_groups,
                "jax._src.clusters.cluster": introduce_to_jax,
                "horovod.common.basics": check_horovod,
            }
        )
        request = trial_reports.trial_request()
        if request is not None and request.keeps_options:
            after_import({"torch.optim": script_options.install})
        if os.environ.get("PACELINE_ATTACH"):
            attach()
        apply_knobs()
        if os.environ.get(tuning.VARIABLE):
            from ...comm.tune.tuner import begin

            begin(tuning.Tuning.loads(os.environ[tuning.VARIABLE]))
        if os.environ.get("PACELINE_STAGE_SETS"):
            from ...data.staging.staged_sets import start_staging_all

            start_staging_all()
        survey = None
        if os.environ.get("PACELINE_SHOW_MEMORY"):
            from .previews import start_showing_memory

            survey = start_showing_memory()
        if horovod is None:
            horovod = "HOROVOD_RANK" in os.environ
        if command["module"]:
            sys.path[:] = with_horovod(module_folders(command["name"]), horovod)
            sys.modules["__main__"] = ModuleType("__main__")
            runpy.run_module(command["name"], run_name="__main__", alter_sys=True)
        else:
            _run_script(command["name"], horovod)
        if survey is not None:
            survey.script_ended()
    except SystemExit as end:
        return _exit_code(end)
    except BaseException as error:
        sys.last_value = error  # same as the interpreter; exit handlers print no summary then
        summary = summarize_error(error)
        is_sent = send_to_launcher(exception=summary, at=time.monotonic(), code=1)
        _record_failure(summary)
        if not (is_sent and is_peer_gone(summary)):  # the launcher prints the cause
            sys.stderr.write(format_error(error))
        return 1
    return 0


def _patch_groups(c10d: ModuleType) -> None:
    from ...comm.members.membership import check_groups

    patch_destroy_process_group(c10d)
    check_groups(c10d)


def _run_script(path: str, horovod: bool) -> None:
    folders = import_folders(os.path.dirname(os.path.abspath(path)))
    sys.path[:] = with_horovod(folders, horovod)
    main_module = ModuleType("__main__")
    main_module.__file__ = path
    main_module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, main_module.__dict__)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        code = (end.code or 0) & 0xFF
    else:
        sys.stderr.write(f"{end.code}\n")
        code = 1
    if code and not getattr(end, "early", False):  # see world.early_exit
        sys.last_value = end
        summary = f"{EXIT_CODE}{code}"
        send_to_launcher(exception=summary, at=time.monotonic(), code=code)
        _record_failure(summary)
    return code


def _record_failure(summary: str) -> None:
    """Write into the rank's record, if there is one, why the script failed."""
    update_all_headers(failure=summary[:MAX_FAILURE_CHARS])


def finish(code: int, short: "ShortEnd | None" = None) -> NoReturn:
    """End the process in the order of the interpreter, in steps that the launcher can follow.

    Threads are joined and exit handlers run first. The rank then reports "finished". The
    finalization of the interpreter comes last, because it may hang in Gloo.

    Args:
        code: Exit code.
        short: Of a rank that is forked for a trial that may be short: only the objects of the
            script are then finalized.
    """
    try:
        # The interpreter calls these functions at exit; they have no public names.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _leave_group(code)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        sys.stderr.write(format_error(error))
        code = code or 1
    send_to_launcher(finished=code)
    if short is not None:
        short.drop_script()
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # output of libraries in C
        os._exit(code)
    ctypes.pythonapi.Py_Exit(ctypes.c_int(code))
    raise AssertionError("unreachable")


def may_be_short() -> bool:
    """Return whether this rank is one of a trial, which may take less time than a whole end."""
    return trial_reports.VARIABLE in os.environ


class ShortEnd:
    """The end of a forked rank that finalizes only what the rank has made itself.

    The interpreter would copy all memory that it shares with the rank server, which takes longer
    than a short trial. Created before the script runs.
    """

    def __init__(self) -> None:
        self._last_imported = next(reversed(sys.modules))
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # its object belongs to the rank server

    def drop_script(self) -> None:
        """Drop the objects of the script and of modules beside it, so that their destructors run.

        Modules that were imported before the fork are not even looked at, which would copy memory.
        """
        folder = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "")
        imported = [*itertools.takewhile(self._last_imported.__ne__, reversed(sys.modules))]
        vars(sys.modules["__main__"]).clear()
        for name in imported:
            module: Any = sys.modules.get(name)  # None also if its import is blocked
            if not isinstance(module, ModuleType):
                continue
            file = vars(module).get("__file__") or ""  # some modules import others in __getattr__
            if file.startswith(folder) and os.sep not in file[len(folder) :]:
                vars(module).clear()
        gc.collect()  # skips what was imported before the fork
        _flush_files()


def _flush_files() -> None:
    """Write the buffers of files that the rank has opened: modules of libraries keep theirs."""
    for file in gc.get_objects():  # without those from before the fork
        if issubclass(type(file), _BUFFERED_FILES):
            with contextlib.suppress(Exception):  # of another process, closed, or only read
                file.flush()


def _leave_group(code: int) -> None:
    """Destroy a process group that the script left open (see
    ``world.process_group.leave_process_group``).
    """
    if "torch.distributed" in sys.modules and code == 0:
        from ...world.process_group import leave_process_group

        leave_process_group()
