"""The job that the user requested, and the check whether it can run on this host."""

import ast
import importlib.machinery
import json
import os
import resource
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analyze.rehearsal.facts import RehearsalRequest
from ..cluster import horovod_import
from ..cluster.schedulers.allocation import end_time
from ..cluster.topology.local_resources import free_memory
from ..knobs.process import environment
from ..knobs.registry import VARIABLE
from ..knobs.tuning import VARIABLE as TUNING
from ..knobs.tuning import Tuning
from ..plurals import counted
from ..security.processes import import_folders, module_folders
from . import job_folder, requeue
from .options import AUTO, RankSettings

if TYPE_CHECKING:
    from .guard.loss_guard import LossGuard

# Memory of a rank without data, in bytes (proportional share, measured with a tiny model).
RANK_BYTES = 64 << 20
FRESH_RANK_BYTES = 230 << 20
# These environment variables take effect only when a rank's interpreter starts.
OWN_INTERPRETER = ("OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "LD_PRELOAD")
# So do these; the process that ranks are forked from may have started with other values.
READ_AT_START = ("PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONPATH", "PYTHONWARNINGS")
MIN_OPEN_FILES, OPEN_FILES_PER_RANK = 64, 8
MIN_ADDRESS_SPACE_BYTES = 1 << 30  # of a process that has imported a CPU build of PyTorch
# Imported before the fork if the script imports them: they are slow to import and have no side
# effects.
PRELOADED = ("torch", "numpy", "scipy", "sklearn", "pandas", "PIL")


@dataclass(frozen=True)
class Job(RankSettings):
    """The job that the user requested.

    Attributes:
        name: Path of the script, or name of the module.
        args: Arguments of the script.
        module: Whether ``name`` is a module.
        ranks: Number of ranks on this host.
        max_restarts: Maximum number of restarts after a failure.
        min_hosts: Minimum number of hosts for an attempt; None: as many as at the start.
        report_bindings: Whether to report the bindings.
        share: The part of each node that this job gets, beside other jobs: first core, number of
            cores, first GPU, number of GPUs, of those that it may use; None: all.
        granted: Number of CPUs of this host that the scheduler has granted to the job: cores or
            hardware threads, as it counts; None: unknown.
        port: Port of the ranks' store; 0: any free port.
        summary: File for the JSON summary, or None.
        record: Folder for the record, or None.
        count_flops: Whether to count the FLOPs of one recorded step.
        settings: Values of knobs, by name.
        tuning: Settings of DDP's gradient synchronization, or None.
        stage: Absolute paths of the packed datasets to stage.
        show_memory: Number of ranks, and their largest number on a node, for which to predict the
            memory of each layout, and end; or None.
        rehearsal: What one rank rehearses in place of training, or None.
        guard: What holds the loss against a reference, or None. ``start`` makes it.
        horovod: What ``import horovod`` finds: a value of ``horovod_import``.
        env: Values of --env, as reports repeat them in commands.
    """

    name: str
    args: list[str] = field(default_factory=list)
    module: bool = False
    ranks: int = 1
    max_restarts: int = 0
    min_hosts: int | None = None
    report_bindings: bool = False
    share: tuple[int, int, int, int] | None = None
    granted: int | None = None
    port: int = 0
    summary: Path | None = None
    record: Path | None = None
    count_flops: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    tuning: Tuning | None = None
    stage: list[str] = field(default_factory=list)
    show_memory: tuple[int, int] | None = None
    rehearsal: RehearsalRequest | None = None
    guard: "LossGuard | None" = None
    horovod: str = horovod_import.AUTO
    env: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The script and its arguments, as ``paceline run`` takes them."""
        return [*["-m"] * self.module, self.name, *self.args]

    @property
    def own_interpreters(self) -> bool:
        """Whether each rank gets a new Python interpreter instead of a fork."""
        return (
            self.fresh
            or any(name in os.environ for name in OWN_INTERPRETER)
            or _changed_since_start(READ_AT_START)
            or bool(environment(self.settings))
        )


def _changed_since_start(names: Iterable[str]) -> bool:
    """Return whether an environment variable has another value than when this process started."""
    try:
        start = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # not Linux
        return False
    found = dict(variable.partition(b"=")[::2] for variable in start)
    return any(
        os.environb.get(name.encode(), b"") != found.get(name.encode(), b"") for name in names
    )


def variables(job: Job, run: str) -> dict[str, str]:
    """Return the environment variables that all ranks on all hosts get, except torchrun's.

    Args:
        job: The job.
        run: ID of the run.
    """
    command = {"name": job.name, "args": job.args, "module": job.module}
    found = {"PACELINE_COMMAND": json.dumps(command), "PACELINE_RUN": run}
    if job.record is not None:
        found["PACELINE_ATTACH"] = "1"
        found["PACELINE_TELLS"] = "launcher"
        if job.count_flops:
            found["PACELINE_COUNT_FLOPS"] = "1"
    if job.guard is not None:
        found["PACELINE_ATTACH"] = "1"
        found["PACELINE_GUARD"] = job.guard.watch_variable
    if job.settings:
        found[VARIABLE] = json.dumps(job.settings)
        found |= environment(job.settings)
    if job.tuning is not None:
        found[TUNING] = job.tuning.dumps()
    if job.stage:
        found["PACELINE_STAGE"] = os.environ["PACELINE_STAGE"]
        found["PACELINE_STAGE_SETS"] = os.pathsep.join(job.stage)
    if sys.stderr.isatty():
        found["PACELINE_TTY"] = "1"
        found["PACELINE_WIDTH"] = str(os.get_terminal_size(sys.stderr.fileno()).columns)
    if job.horovod != horovod_import.AUTO:
        found[horovod_import.VARIABLE] = job.horovod
    end = requeue.end_time()
    if end is not None:
        found["PACELINE_END_TIME"] = end
    if job.show_memory is not None:
        found["PACELINE_SHOW_MEMORY"] = "{}:{}".format(*job.show_memory)
    if job.rehearsal is not None:
        found["PACELINE_REHEARSE"] = json.dumps(asdict(job.rehearsal))
    if job.summary is not None:
        found["PACELINE_SUMMARY"] = str(job.summary.absolute())
    return found


def check(job: Job) -> bytes:
    """Return the source of the script or module, after checking that the job can run here.

    Raises:
        ValueError: An option is invalid, the memory does not suffice, or the script can't be run.
    """
    from ..cluster.binding_plan import KINDS

    if job.count_flops and job.record is None:
        raise ValueError("--count-flops needs a record. HINT: add --record DIR")
    if job.ranks < 1:
        raise ValueError(f"-n {job.ranks}: at least one rank is needed. HINT: -n 1")
    each = FRESH_RANK_BYTES if job.own_interpreters else RANK_BYTES
    free = free_memory()
    if job.ranks * each > free:
        raise ValueError(
            f"-n {job.ranks}: {counted(job.ranks, 'rank')} take about "
            f"{job.ranks * each / 2**30:.1f} GiB before they have any data, and "
            f"{free / 2**30:.1f} GiB are free on this node. HINT: "
            f"-n {max(1, free // each // 2)} or fewer"
        )
    for option, value in (("--threads", job.threads), ("--min-hosts", job.min_hosts)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be 1 or more; this is {value}. HINT: {option} 1")
    if job.min_hosts is not None and not job.max_restarts:
        raise ValueError(
            f"--min-hosts {job.min_hosts} needs restarts: without them, the job ends with the "
            "first failure. HINT: add --max-restarts 3"
        )
    if job.hang_timeout is not None and not job.hang_timeout >= 0:
        raise ValueError(
            f"--hang-timeout must be 0 or more seconds; this is {job.hang_timeout:g}. HINT: "
            "--hang-timeout 600, or 0 for no hang detection"
        )
    if job.bind not in (AUTO, *KINDS):
        raise ValueError(
            f"--bind {job.bind} is not known. HINT: {AUTO}, {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        )
    end_time(os.environ)  # raises ValueError if it is not valid
    _raise_file_limit(MIN_OPEN_FILES + OPEN_FILES_PER_RANK * job.ranks)
    _check_address_space()
    if job.record is not None:
        job_folder.check(job.record)
    path = source_file(job.name, job.module)
    folders = module_folders(job.name) if job.module else import_folders(str(path.parent))
    horovod_import.check_installed(job.horovod, folders)
    try:
        source = path.read_bytes()
        compile(source, str(path), "exec")
    except SyntaxError as error:
        if error.lineno is None:
            raise ValueError(f"{path} can't be read as Python: {error.msg}") from None
        code = f"\n    {error.text.strip()}" if error.text else ""
        raise ValueError(
            f"{path}, line {error.lineno}: {error.msg}{code}\nNo rank was started. HINT: correct "
            "this line"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as Python: {error}") from None
    return source


def source_file(name: str, module: bool) -> Path:
    """Return the file of a script, or of a module that ``-m`` starts.

    Raises:
        ValueError: There is none.
    """
    return _module_file(name) if module else _script_file(name)


def _script_file(name: str) -> Path:
    path = Path(name)
    if path.is_dir():
        raise ValueError(f"{name} is a folder. HINT: name a script, or use -m for a package")
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob("*.py"))[:5] if path.parent.is_dir() else []
        hint = f"that folder has {', '.join(near)}" if near else "-m runs a module by its name"
        raise ValueError(f"{name} does not exist. HINT: {hint}")
    return path


def _module_file(name: str) -> Path:
    """Return the file that ``python -m name`` would run, without importing any module."""
    folders: Any = module_folders(name)
    parts = name.split(".")
    for i, part in enumerate(parts):
        qualified = ".".join(parts[: i + 1])
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None:
            raise ValueError(f"there is no module {qualified}. HINT: leave out -m for a path")
        folders = spec.submodule_search_locations
        if folders is None and i < len(parts) - 1:
            raise ValueError(f"{qualified} is not a package. HINT: -m {qualified}")
    if folders is not None:  # a package runs its __main__
        spec = importlib.machinery.PathFinder.find_spec("__main__", folders)
        if spec is None:
            raise ValueError(f"the package {name} has no __main__. HINT: -m {name}.MODULE")
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"{name} is not a module of Python source")
    return Path(spec.origin)


def _raise_file_limit(needed: int) -> None:
    """Let this process open ``needed`` files. Raises ValueError where the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"the limit of open files is {hard} (ulimit -Hn), and this job needs {needed}. HINT: "
            "start it from a shell with a higher limit, or with fewer ranks"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _check_address_space() -> None:
    """Raise ValueError where this process could not import PyTorch."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE_BYTES:
        raise ValueError(
            f"the address space of a process is limited to {limit >> 10} KiB (ulimit -v), and "
            f"PyTorch needs at least {MIN_ADDRESS_SPACE_BYTES >> 10} KiB. HINT: ulimit -v unlimited"
        )


def preloads(job: Job, source: bytes) -> list[str]:
    """Return the modules to import once for all ranks, before the fork.

    These are torch, and the modules of ``PRELOADED`` that the script imports at its top level. The
    list is empty if ranks get new interpreters.
    """
    if job.own_interpreters:
        return []
    found = ["torch", "torch.distributed", "torch.utils.data", "torch._dynamo"]
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    wanted = [name for name in found if name.split(".")[0] in PRELOADED]
    if any(name.split(".")[0] == "paceline" for name in found):
        wanted.append("paceline.world")
    return list(dict.fromkeys(wanted))
