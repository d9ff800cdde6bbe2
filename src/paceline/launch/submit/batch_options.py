"""Options of a batch job, parsed from the command line; independent of the scheduler."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Resources:
    """Resources that the job requests. None: the scheduler's default.

    Attributes:
        hosts: Number of nodes.
        ranks: Ranks per node.
        cpus: Cores per rank.
        gpus: GPUs per node.
        memory: Memory per node, such as 64G: a number and one of K, M, G, T (powers of 1024).
        seconds: Time limit, in seconds.
    """

    hosts: int = 1
    ranks: int | None = None
    cpus: int | None = None
    gpus: int | None = None
    memory: str | None = None
    seconds: int | None = None

    def __post_init__(self) -> None:
        for option, value in (
            ("--nodes", self.hosts),
            ("--ranks-per-node", self.ranks),
            ("--cpus-per-rank", self.cpus),
            ("--gpus-per-node", self.gpus),
        ):
            if value is not None and value < 1:
                hint = "1 or more" if option == "--nodes" else "1 or more, or leave it out"
                raise ValueError(f"{option} {value}: at least one is needed. HINT: {hint}")

    @property
    def tasks(self) -> int:
        """Number of tasks per node that the scheduler is asked for."""
        return self.ranks or self.gpus or 1

    @property
    def slots(self) -> int:
        """Number of cores per node."""
        return self.tasks * (self.cpus or 1)

    @property
    def total(self) -> int | None:
        """Total number of ranks; None if the options do not determine it. ``paceline run`` then
        chooses it from the hardware of the nodes.
        """
        return self.hosts * self.tasks if self.ranks or self.gpus or self.cpus else None


@dataclass(frozen=True)
class Array:
    """A job array.

    Attributes:
        indices: Indices in the form 0-15, 1-9:2 or 1,3,5-7.
        at_once: Maximum number of jobs that run at the same time; None: no limit.
    """

    indices: str
    at_once: int | None = None

    @property
    def first(self) -> int:
        return min(int(part.split("-")[0]) for part in self.indices.split(","))

    def __str__(self) -> str:
        return self.indices + (f"%{self.at_once}" if self.at_once else "")


@dataclass(frozen=True)
class Switches:
    """A limit on the leaf switches (switches that connect nodes) over which the nodes are spread.

    Attributes:
        count: Maximum number of leaf switches.
        wait: Seconds after which the job may start on more; None: as the site has configured.
    """

    count: int
    wait: int | None = None

    def __str__(self) -> str:
        return f"{self.count}" + (f"@{clock(self.wait)}" if self.wait else "")


@dataclass(frozen=True)
class Batch:
    """A job for a scheduler, without the command that it runs.

    Attributes:
        name: Name of the job.
        want: Requested resources.
        queue: Queue or partition.
        account: Account or project to charge.
        output: File for the job's output.
        switches: Limit on the leaf switches of the nodes, if there is one.
        array: The job array, if the job is one.
        warn: Seconds before the time limit at which the job gets a signal. 0: no signal.
        requeue: Whether the scheduler may put the job back in the queue.
        goes_on: Whether the job continues without nodes that it loses. The scheduler must then
            not end the job on the remaining nodes.
        options: Options that are passed to the scheduler unchanged.
    """

    name: str
    want: Resources = field(default_factory=Resources)
    queue: str | None = None
    account: str | None = None
    output: str | None = None
    array: Array | None = None
    switches: Switches | None = None
    warn: int = 0
    requeue: bool = False
    goes_on: bool = False
    options: list[str] = field(default_factory=list)


def seconds(text: str) -> int:
    """Return the seconds of a ``--time`` value: 2:00:00, 1-12:00:00, 90min or 1h30min.

    Raises:
        ValueError: The value is invalid, has no unit, or is zero.
    """
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
    units = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?", text)
    match = clock or units
    if match is None or not text:
        why = "has no unit" if text.isdigit() else "can't be read as a time"
        raise ValueError(
            f"--time {text!r} {why}; schedulers differ in what a bare number or 2:00 means. "
            "HINT: 2:00:00, 90min, 2h, 1h30min or 1-12:00:00"
        )
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if total == 0:
        raise ValueError(f"--time must be more than 0; this is {text!r}. HINT: --time 2h")
    return total


def usual_warning(limit: int | None) -> int:
    """Return the default of ``--warn``: seconds before the time limit ``limit`` (seconds)."""
    return 120 if limit is not None and limit >= 600 else 0


def clock(total: int) -> str:
    """Return a duration in seconds as HH:MM:SS, for Slurm and PBS. Hours may exceed 24."""
    return f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"


def memory(text: str) -> str:
    """Return a ``--memory`` value in the form 64G.

    64G, 64GB and 64GiB mean the same, because G is 2^30 for schedulers.

    Raises:
        ValueError: The value is invalid, has no unit, or is zero.
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT])(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        why = "has no unit" if text.isdigit() else "can't be read as whole K, M, G or T"
        raise ValueError(f"--memory {text!r} {why}. HINT: --memory 64G, for each node")
    if int(match[1]) == 0:  # Slurm would reserve all memory of the node
        raise ValueError(
            f"--memory must be more than 0; this is {text!r}. HINT: --memory 64G, or leave it out"
        )
    return match[1] + match[2].upper()


def array(text: str) -> Array:
    """Return the job array of an ``--array`` value: 0-15, 0-15%4, 1,3,5-7 or 1-9:2.

    Raises:
        ValueError: The value is invalid, or a range ends before its start.
    """
    part = r"\d+(?:-\d+(?::[1-9]\d*)?)?"
    match = re.fullmatch(rf"({part}(?:,{part})*)(?:%([1-9]\d*))?", text)
    if match is None:
        raise ValueError(
            f"--array {text!r} can't be read. HINT: 0-15, 0-15%4 (4 at once), 1,3,5-7 or 1-9:2"
        )
    for first, last in re.findall(r"(\d+)-(\d+)", match[1]):
        if int(last) < int(first):
            raise ValueError(f"--array {text!r}: {last} is before {first}. HINT: {last}-{first}")
    return Array(match[1], int(match[2]) if match[2] else None)


def switches(text: str) -> Switches:
    """Return the limit of a ``--switches`` value: 1, 2 or 1@30min.

    Raises:
        ValueError: The number is not a positive integer, or the time is invalid.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})(?:@(.+))?", text)
    if match is None:
        raise ValueError(
            "--switches must be a number of leaf switches, and optionally the time to wait for "
            f"them; this is {text!r}. HINT: --switches 1 or 1@30min"
        )
    try:
        return Switches(int(match[1]), seconds(match[2]) if match[2] else None)
    except ValueError as mistake:
        raise ValueError(f"--switches {text!r}: {mistake}".replace("--time ", "")) from None


def one_line(option: str, value: str) -> str:
    """Return ``value`` if it fits on one line of a batch script.

    A newline in a value could add directives or commands to the script.

    Raises:
        ValueError: The value contains a control character other than a tab.
    """
    if any(ord(letter) < 32 and letter != "\t" for letter in value):
        raise ValueError(
            f"{option} {value!r} contains a line end or another control character, which a line "
            "of a batch script can't have. HINT: remove it"
        )
    return value


def job_name(given: str | None, script: str) -> str:
    """Return a job name that every scheduler accepts; by default derived from the script's name.

    Raises:
        ValueError: The given name contains other characters.
    """
    if given is None:
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", script.rsplit("/", 1)[-1].removesuffix(".py"))
        return stem if re.match("[A-Za-z]", stem) else f"run-{stem}"
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", given):
        raise ValueError(
            "--name must be a letter, then letters, digits, '.', '_' and '-'; this is "
            f"{given!r}. HINT: --name train-1"
        )
    return given


def filled(table: Mapping[str, object]) -> list[str]:
    """Return the options of a table whose value is not None, with the values shell-quoted."""
    return [
        form.format(shlex.quote(str(value))) for form, value in table.items() if value is not None
    ]
