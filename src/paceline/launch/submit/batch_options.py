"""What a batch job asks for, read from the user's words; the same for all schedulers."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Resources:
    """What the job gets; None leaves it to the scheduler."""

    hosts: int = 1
    ranks: int | None = None  # a host
    cpus: int | None = None  # a rank
    gpus: int | None = None  # a host
    memory: str | None = None  # a host, as 64G: a number and one of K, M, G, T
    seconds: int | None = None

    def __post_init__(self) -> None:
        for option, value in (
            ("--hosts", self.hosts),
            ("--ranks-per-host", self.ranks),
            ("--cpus-per-rank", self.cpus),
            ("--gpus-per-host", self.gpus),
        ):
            if value is not None and value < 1:
                hint = "1 or more" if option == "--hosts" else "1 or more, or leave it out"
                raise ValueError(f"{option} {value}: at least one is needed. HINT: {hint}")

    @property
    def tasks(self) -> int:
        """Ranks a host, as far as the scheduler needs to know."""
        return self.ranks or self.gpus or 1

    @property
    def slots(self) -> int:
        """Cores a host."""
        return self.tasks * (self.cpus or 1)

    @property
    def total(self) -> int | None:
        """All ranks, where the user's words settle it; else paceline run looks at the host."""
        return self.hosts * self.tasks if self.ranks or self.gpus or self.cpus else None


@dataclass(frozen=True)
class Array:
    """The same job for each of some numbers."""

    indices: str  # 0-15, 1-9:2 or 1,3,5-7
    at_once: int | None = None

    @property
    def first(self) -> int:
        return min(int(part.split("-")[0]) for part in self.indices.split(","))

    def __str__(self) -> str:
        return self.indices + (f"%{self.at_once}" if self.at_once else "")


@dataclass(frozen=True)
class Batch:
    """One job for a scheduler, without what it runs."""

    name: str
    want: Resources = field(default_factory=Resources)
    queue: str | None = None
    account: str | None = None
    output: str | None = None
    array: Array | None = None
    warn: int = 0  # seconds before the limit; 0: no signal
    requeue: bool = False
    goes_on: bool = (
        False  # without the hosts that it loses: the scheduler is to leave it the others
    )
    options: list[str] = field(default_factory=list)  # the scheduler's own, as they are


def seconds(text: str) -> int:
    """--time: 2:00:00, 1-12:00:00, 90min, 1h30min."""
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
        raise ValueError(f"--time {text!r} is no time at all. HINT: 2h")
    return total


def usual_warning(limit: int | None) -> int:
    """Seconds before the limit, where the user does not say."""
    return 120 if limit is not None and limit >= 600 else 0


def clock(total: int) -> str:
    """HH:MM:SS, as Slurm and PBS read it; hours may be more than 24."""
    return f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"


def memory(text: str) -> str:
    """--memory: 64G, 64GB and 64GiB are the same: to schedulers G is 2^30."""
    match = re.fullmatch(r"(\d+)\s*([KMGT])(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        why = "has no unit" if text.isdigit() else "can't be read as whole K, M, G or T"
        raise ValueError(f"--memory {text!r} {why}. HINT: 64G, for each host")
    if int(match[1]) == 0:  # to Slurm it would be all of the host's
        raise ValueError(f"--memory {text!r}: HINT: more than 0, or leave it out")
    return match[1] + match[2].upper()


def array(text: str) -> Array:
    """--array: 0-15, 0-15%4, 1,3,5-7 or 1-9:2."""
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


def one_line(option: str, value: str) -> str:
    """A newline would let a value bring directives of its own into the script."""
    if any(ord(letter) < 32 and letter != "\t" for letter in value):
        raise ValueError(
            f"{option} {value!r}: a line's end or another control character can't stand in a "
            "batch script's line. HINT: take it out"
        )
    return value


def job_name(given: str | None, script: str) -> str:
    """A name that every scheduler takes; by default the script's."""
    if given is None:
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", script.rsplit("/", 1)[-1].removesuffix(".py"))
        return stem if re.match("[A-Za-z]", stem) else f"run-{stem}"
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", given):
        raise ValueError(
            f"--name {given!r}: schedulers take a letter first, then letters, digits, '.', '_' "
            "and '-'. HINT: --name train-1"
        )
    return given


def filled(table: Mapping[str, object]) -> list[str]:
    """The options of a table whose value is not None, quoted for the scheduler."""
    return [
        form.format(shlex.quote(str(value))) for form, value in table.items() if value is not None
    ]
