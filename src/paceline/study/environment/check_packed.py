"""``paceline check --pack-env``: compare ``import torch`` from an environment and from one file.

Each is measured twice: the first import after its files were dropped from the page cache, and
repeated imports.
"""

import errno
import os
import re
import secrets
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...cluster.topology.local_resources import file_system_type
from ...cost.import_cost import Load, Packed
from ...cost.machine.machine_file import SECONDS, Figure
from ...launch.linux_processes import exit_on_signal, signals_handled
from ...record.ring.resource_usage import bytes_read
from ...security.processes import find_program, program_command, run_program
from ...security.removal import TemporaryFolder
from ..probe.measure import page_cache
from ..probe.measure.host_facts import free_space
from ..probe.measure.import_time import Timed, import_torch, timed
from .find_environment import Environment, find_environment, regular_files

ROUNDS = 3
NOT_ROOM = 1.1  # space on disk per byte of files: folders and partly filled blocks need space too


# Pack an environment into one file: a squashfs image to mount, or a tar archive to unpack.
#
# The file is written under a temporary name in the same folder and renamed when it is complete.

SQUASHFS, TAR = (".squashfs", ".sqsh"), (".tar",)
# The first compression that mksquashfs supports is used. Level 3 of zstd compresses several times
# faster than the default level, and decompresses equally fast.
COMPRESSIONS = {"zstd": ["-Xcompression-level", "3"], "lz4": [], "gzip": []}
LOOK_S = 0.2
Step = Callable[[float], None]  # called with the completed fraction


def choose_format(file: Path | None) -> Path:
    """Return the absolute path of the file to write; None chooses a name in the working directory.

    Raises:
        ValueError: The suffix is unknown, or mksquashfs is needed and not installed.
    """
    tool = find_program("mksquashfs")
    file = file or Path("env.squashfs" if tool else "env.tar")
    if file.suffix not in (*SQUASHFS, *TAR):
        raise ValueError(
            f"--packed FILE must end in .squashfs, .sqsh or .tar; this is {str(file)!r}. HINT: "
            "env.squashfs, which is mounted, or env.tar, which is unpacked"
        )
    if file.suffix in SQUASHFS and tool is None:
        raise ValueError(
            f"--packed {file}: mksquashfs is not installed. HINT: apt-get install squashfs-tools, "
            f"module avail squashfs, or --packed {file.with_suffix('.tar')}"
        )
    return file.absolute()


def ready(environment: Environment, file: Path) -> None:
    """Check that the file can be written.

    Raises:
        ValueError: The file exists, its folder is not usable, or the space does not suffice.
    """
    folder = file.parent
    if os.path.lexists(file):
        raise ValueError(
            f"--packed {file}: the file exists, and is never overwritten. HINT: remove it, or "
            "choose another name"
        )
    if not folder.is_dir():
        raise ValueError(f"--packed {file}: the folder does not exist. HINT: mkdir -p {folder}")
    if folder.resolve().is_relative_to(environment.prefix.resolve()):
        raise ValueError(
            f"--packed {file} is inside the environment to pack. HINT: choose another folder"
        )
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _refused(file, error) from None
    needed = environment.bytes + 1024 * environment.files * (file.suffix in TAR)
    free = free_space(folder)
    if free is not None and free < needed:
        raise ValueError(
            f"--packed {file}: {folder} has {free / 1e6:,.0f} MB free, and the environment "
            f"has {needed / 1e6:,.0f} MB. HINT: make room, or choose another folder (--packed FILE)"
        )


def pack(environment: Environment, file: Path, step: Step) -> float:
    """Write the file; return the seconds that it took.

    Args:
        step: Called with the completed fraction.

    Raises:
        ValueError: The file can't be written, or was created by another process meanwhile.
    """
    # A random name, so that another user can't create a link there before the tool opens it.
    part = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
    write = _squashfs if file.suffix in SQUASHFS else _tar
    start = time.perf_counter()
    try:
        write(environment, part, step)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        took = time.perf_counter() - start
        if os.path.lexists(file):
            raise ValueError(
                f"--packed {file}: another process has created the file. HINT: choose another name"
            )
        part.replace(file)
    except OSError as error:
        raise _refused(file, error) from None
    finally:
        part.unlink(missing_ok=True)
    return took


def _refused(file: Path, error: OSError) -> ValueError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "make room, or " * full + "choose a folder that you can write to (--packed FILE)"
    why = error.strerror or error
    return ValueError(f"--packed {file} can't be written: {why}. HINT: {hint}")


def _squashfs(environment: Environment, part: Path, step: Step) -> None:
    offered = run_program("mksquashfs", "-help")
    names = re.findall(r"^\s+(\w+)(?: \(default\))?$", offered.stdout + offered.stderr, re.M)
    kind = next((name for name in COMPRESSIONS if name in names), None)
    words = program_command("mksquashfs", str(environment.prefix), str(part))
    words += ["-noappend", "-no-recovery"]
    words += ["-no-xattrs", "-no-progress", "-quiet", "-mem", "1G"]
    words += ["-processors", str(len(os.sched_getaffinity(0)))]
    words += ["-comp", kind, *COMPRESSIONS[kind]] if kind else []
    # mksquashfs would set the files' times to it, and Python validates __pycache__ by these times.
    known = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=known
        )
        try:
            while process.poll() is None:
                step(bytes_read(str(process.pid))[0] / max(1, environment.bytes))
                try:
                    process.wait(LOOK_S)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            output.seek(0)
            lines = [line for line in output.read().splitlines() if line.strip()] or ["no output"]
            code = process.returncode
            ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise OSError(None, f"mksquashfs {ended}: {'; '.join(lines[:2])}")


def _tar(environment: Environment, part: Path, step: Step) -> None:
    done = 0
    # GNU format: a header is one block if the name is short, and times are whole seconds.
    with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(environment.prefix.rglob("*")):
            archive.add(path, path.relative_to(environment.prefix), recursive=False)
            done += 1
            step(done / max(1, environment.files))


@contextmanager
def describe(what: str) -> Iterator[Step]:
    """Show the progress of a long operation on standard error.

    On a terminal the percentage is updated in place; otherwise only start and end are printed.
    """
    terminal, start, last = sys.stderr.isatty(), time.perf_counter(), -1

    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def step(part: float) -> None:
        nonlocal last
        now = min(99, int(100 * part))
        if terminal and now > last:
            last = now
            write(f"\rpaceline: {what} ... {now:2} %")

    write(f"paceline: {what} ..." + "\n" * (not terminal))
    try:
        yield step
    except BaseException:
        write("\n" * terminal)
        raise
    took = f"{time.perf_counter() - start:.1f} s"
    write(f"\rpaceline: {what}: {took}  \n" if terminal else f"paceline: {what}: {took}\n")


# Temporary folder on which a packed environment is mounted, or into which it is unpacked.
#
# The folder is removed afterwards, also if the process is interrupted.

COMMAND_TIMEOUT_S = 30.0  # timeout of mount and unmount commands
BUSY_TIMEOUT_S = 3.0  # how long a busy mount is retried before it is unmounted lazily
FUSE = "/dev/fuse"


class CannotMountError(Exception):
    """Raised if the packed file can't be mounted or unpacked on this host, with the reason."""


@dataclass(frozen=True)
class Mounted:
    """A mounted or unpacked environment.

    Attributes:
        folder: The temporary folder.
        how: Description for the user, with the name of the tool.
        seconds: Time to mount or unpack.
    """

    folder: Path
    how: str
    seconds: float


@contextmanager
def mount_file(file: Path) -> Iterator[Mounted]:
    """Mount a squashfs file for the duration of the context.

    Raises:
        CannotMountError: The file can't be mounted on this host.
    """
    with _folder() as folder:
        how = ""
        try:
            start = time.perf_counter()
            how = _mount(file, folder)
            yield Mounted(folder, how, time.perf_counter() - start)
        finally:
            with _ignore_signals():
                _unmount(folder)


@contextmanager
def unpack_file(file: Path, needed: int) -> Iterator[Mounted]:
    """Unpack a squashfs or tar file into a temporary folder for the duration of the context.

    Args:
        needed: Required free space in bytes.

    Raises:
        CannotMountError: The tool is not installed, there is too little space, or it failed.
    """
    tool = "tar" if file.suffix == ".tar" else "unsquashfs"
    if find_program(tool) is None:
        raise CannotMountError(f"{tool} is not installed")
    with _folder() as folder:
        free = free_space(folder)
        if free is not None and free < needed:
            where = f"{folder.parent} has {free / 1e6:,.0f} MB free"
            raise CannotMountError(
                f"{where}, and {needed / 1e6:,.0f} MB are needed (set TMPDIR to another folder)"
            )
        words = ["tar", "-xf", str(file), "-C", str(folder)]
        if tool == "unsquashfs":
            words = ["unsquashfs", "-f", "-n", "-q", "-d", str(folder), str(file)]
        start = time.perf_counter()
        failed = _run_command(words, None)
        if failed:
            raise CannotMountError(failed)
        yield Mounted(folder, f"unpacked by {tool}", time.perf_counter() - start)


def _mount(file: Path, folder: Path) -> str:
    why = []
    if find_program("squashfuse") is None:
        why.append("squashfuse is not installed")
    else:
        failed = _open_error(FUSE) or _run_command(
            ["squashfuse", str(file), str(folder)], COMMAND_TIMEOUT_S
        )
        if not failed and os.path.ismount(folder):
            return "mounted by squashfuse"
        why.append(failed or "squashfuse mounted nothing")
    if os.geteuid() != 0:
        why.append("mount needs root")
    else:
        words = ["mount", "-t", "squashfs", "-o", "loop,ro", str(file), str(folder)]
        failed = _run_command(words, COMMAND_TIMEOUT_S)
        if not failed:
            return "mounted by the kernel"
        why.append(failed)
    raise CannotMountError("; ".join(why))


def _open_error(device: str) -> str:
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        return f"{device} can't be opened: {error.strerror}"
    return ""


def _run_command(words: list[str], seconds: float | None) -> str:
    """Run a command; return the reason of a failure in one line, or ""."""
    try:
        done = run_program(*words, seconds=seconds, text="")
    except OSError as error:
        return f"{words[0]}: {error}"
    if done.returncode == 0:
        return ""
    output = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
    return f"{words[0]} ended with exit code {done.returncode}: {output[-1].strip()}"


def _unmount(folder: Path) -> None:
    """Unmount with any of the installed tools; a mount that stays busy is detached lazily."""
    tools = [["fusermount3", "-u"], ["fusermount", "-u"], ["umount"]]
    known = [tool for tool in tools if find_program(tool[0])]
    end = time.monotonic() + BUSY_TIMEOUT_S
    while os.path.ismount(folder):
        lazy = time.monotonic() > end
        for tool in known:
            late = [] if not lazy else ["-l"] if tool[0] == "umount" else ["-z"]
            if not _run_command([*tool, *late, str(folder)], COMMAND_TIMEOUT_S):
                break
        else:
            if lazy:
                sys.stderr.write(f"paceline: {folder} is still mounted. HINT: umount {folder}\n")
                return
        if os.path.ismount(folder):
            time.sleep(0.1)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = TemporaryFolder("paceline-pack-")
    try:
        yield folder.path
    finally:
        with _ignore_signals():
            folder.remove()  # what is mounted on it stays as it is


def _ignore_signals() -> AbstractContextManager[None]:
    """Ignore signals, so that a second Ctrl-C does not interrupt the cleanup."""
    return signals_handled(signal.SIG_IGN, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


def pack_environment(file: Path | None) -> Packed:
    """Pack the environment of this process into a file, and measure ``import torch`` from both.

    Args:
        file: File to write; None chooses env.squashfs or env.tar in the working directory.

    Raises:
        ValueError: The environment can't be packed, the file can't be written, or torch can't be
            imported from the environment.
    """
    target = choose_format(file)
    own = find_environment()
    ready(own, target)
    with signals_handled(exit_on_signal):
        with describe("import torch from the environment"):
            # One import first: it completes __pycache__, and fails early if torch is missing.
            file_of_torch = timed(own.interpreter).file
            _inside(file_of_torch, own.prefix, "HINT: pip install torch in this environment")
            own = find_environment()
            known = import_torch(1, own.interpreter)
            before = _loads(own.interpreter, own.prefix, [*regular_files(own.prefix)])
        with describe(f"packing {own.files:,} files into {target.name}") as step:
            seconds = pack(own, target, step)
        how, place, load, notes = _used(own, target)
    return Packed(
        str(own.prefix),
        file_system_type(own.prefix),
        own.files,
        own.bytes,
        own.outside,
        known.calls,
        known.counted_by,
        before,
        str(target),
        file_system_type(target.parent),
        target.stat().st_size,
        seconds,
        how,
        place,
        load,
        tuple(notes),
    )


Use = tuple[str, Figure | None, Load | None, list[str]]


def _used(own: Environment, file: Path) -> Use:
    """Measure imports from the file: mounted if possible, else unpacked."""
    notes: list[str] = []
    if file.suffix in SQUASHFS:
        try:
            with describe(f"import torch from {file.name}, mounted"):
                return *_from_mounts(file), notes
        except CannotMountError as why:
            notes.append(
                f"{file.name} can't be mounted on this host: {why}. It was unpacked instead"
            )
    try:
        with describe(f"import torch from {file.name}, unpacked"):
            return *_from_unpacked(own, file), notes
    except CannotMountError as why:
        notes = [note.replace(" It was unpacked instead", "") for note in notes]
        notes.append(
            f"{file.name} can't be unpacked on this host: {why}. It was not measured and is kept"
        )
    return "", None, None, notes


def _from_mounts(file: Path) -> tuple[str, Figure, Load]:
    """Measure with a new mount in each round, because its page cache is empty."""
    places: list[Mounted] = []
    firsts, others = [], []
    kept = 0.0
    for _ in range(ROUNDS):
        kept = max(kept, page_cache.drop_files([file]) or 0.0)
        with mount_file(file) as place:
            places.append(place)
            firsts.append(_timed(place))
            others.append(_timed(place))
    known = _visible(file.parent)
    load = _load(firsts, others, kept if known else None)
    return places[0].how, Figure.of([place.seconds for place in places], SECONDS), load


def _from_unpacked(own: Environment, file: Path) -> tuple[str, Figure, Load]:
    page_cache.drop_files([file])
    with unpack_file(file, int(NOT_ROOM * own.bytes)) as place:
        firsts = [_timed(place)]
        others = [_timed(place) for _ in range(ROUNDS)]
    return place.how, Figure.of([place.seconds], SECONDS), _load(firsts, others, None)


def _timed(place: Mounted) -> Timed:
    found = timed(str(place.folder / "bin" / "python"))
    _inside(
        found.file,
        place.folder,
        "HINT: unset PYTHONPATH; a .pth file or a link in it may lead out of the environment",
    )
    return found


def _loads(interpreter: str, prefix: Path, files: list[Path]) -> Load:
    firsts, others, kept = [], [], None
    for _ in range(ROUNDS):
        kept = page_cache.drop_files(files)
        firsts.append(timed(interpreter))
        others.append(timed(interpreter))
    return _load(firsts, others, kept if _visible(prefix) else None)


def _load(firsts: list[Timed], others: list[Timed], kept: float | None) -> Load:
    def figure(values: Iterable[float]) -> Figure:
        return Figure.of(values, SECONDS)

    first, repeated = (figure(load.seconds for load in some) for some in (firsts, others))
    return Load(first, repeated, figure(load.busy_s for load in others), kept)


def _visible(folder: Path) -> bool:
    """Return whether the page cache is the only cache of a folder's file system on this host."""
    return file_system_type(folder).partition(".")[0] not in page_cache.OWN_CACHE


def _inside(file: str, folder: Path, hint: str) -> None:
    if not Path(file).resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--pack-env: torch is imported from {file}, outside of {folder}: there is nothing to "
            f"compare. {hint}"
        )
