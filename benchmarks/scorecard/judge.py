"""Judge the answers of ``paceline diagnose`` by the measured faults; rates with intervals."""

import json
import os
import re
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinds import KINDS, LINED, NOISE

sys.path.append(str(Path(__file__).parents[1]))
from rates import rate

COUNTS = 0.08  # share of a step: weaker faults do not count, nor weaker causes in healthy runs
NEAR = 1  # a named line may be off by this many lines, as statements may have several
EXCHANGE = "exchange-"  # how ids of causes of slow gradient exchange begin
BUSY_CORES = 0.2  # used by other programs: then causes of NOISE are not false
PLACE = re.compile(r"([\w./-]+\.py)[:\", ]+(?:line )?(\d+)")


@dataclass
class Case:
    """A script with an injected fault or without any, what is true of it and what was found.

    Attributes:
        injector: Name of the injector; "" for a healthy run.
        wanted: Share of a step that the fault is calibrated to.
        share: Measured share of a step that undoing the fault gains, with its range.
        lines: Lines that are right, by file name.
        found: Causes: id, share, and the first place that it names (file, line), or None.
        foreign: Cores that other programs used meanwhile, without the fault's.
        ended: Whether there was a diagnosis.
        exchange_gain: Share of a step that a faster exchange gains without the fault, if the
            exchange was named; None if it was not.
        error: Why the case could not be measured; such a case does not count.
    """

    script: str
    injector: str = ""
    wanted: float = 0.0
    amount: float = 0.0
    base_s: float = 0.0
    share: float = 0.0
    range: tuple[float, float] = (0.0, 0.0)
    lines: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    found: list[tuple[str, float, tuple[str, int] | None]] = field(default_factory=list)
    seconds: float = 0.0
    foreign: float = 0.0
    ended: bool = False
    exchange_gain: float | None = None
    error: str = ""
    output: str = ""
    peer: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        return self.injector.partition("/")[0]

    @property
    def name(self) -> str:
        return f"{self.injector or 'healthy'} in {self.script}"

    @property
    def counts(self) -> bool:
        """Whether the case was measured, and its fault is strong enough."""
        return not self.error and (not self.injector or self.share >= COUNTS)

    def is_right(self, cause: tuple[str, float, tuple[str, int] | None]) -> bool:
        name, _, place = cause
        return name in KINDS[self.kind].causes or (name in LINED and self.is_injected(place))

    def is_injected(self, place: tuple[str, int] | None) -> bool:
        """Whether a place is in injected code, or in the script's line that calls it."""
        if place is None:
            return False
        ranges = self.lines.get(Path(place[0]).name, [])
        return any(first - NEAR <= place[1] <= last + NEAR for first, last in ranges)

    @property
    def others(self) -> list[tuple[str, float, tuple[str, int] | None]]:
        """The causes, without those that are true of the script or the machine without the fault.

        They are other programs that did run, and an exchange that a faster one shortens enough.
        """
        noisy = self.foreign >= BUSY_CORES and self.kind != "noisy-machine"
        slow = (self.exchange_gain or 0.0) >= COUNTS
        return [
            cause
            for cause in self.found
            if (self.kind and self.is_right(cause))
            or not ((noisy and cause[0] in NOISE) or (slow and cause[0].startswith(EXCHANGE)))
        ]

    @property
    def first(self) -> bool:
        return bool(self.others) and self.is_right(self.others[0])

    @property
    def named(self) -> bool:
        return any(self.is_right(cause) for cause in self.found)

    @property
    def placed(self) -> bool:
        """Whether some cause names a line of the injected code first, whatever its id."""
        return any(self.is_injected(place) for _, _, place in self.found)

    @property
    def false_alarm(self) -> bool:
        """Whether a healthy run has a cause that claims enough to count."""
        return any(share >= COUNTS for _, share, _ in self.others)

    @property
    def names_exchange(self) -> bool:
        return any(name.startswith(EXCHANGE) and share >= COUNTS for name, share, _ in self.found)

    @property
    def off(self) -> float | None:
        """Error of the share in percentage points; None if the fault is not named."""
        shares = [cause[1] for cause in self.found if self.is_right(cause)]
        return 100 * (max(shares) - self.share) if shares else None


def read_answer(case: Case, code: int, out: str, err: str) -> None:
    """Store what diagnose printed."""
    try:
        told = json.loads(out) if not code else {}
        case.found = [
            (str(one["id"]), float(one["share"]), first_place(one)) for one in told["causes"]
        ]
        case.ended = True
        case.output = "" if case.found else "; ".join(map(str, told.get("notes", ())))
    except (ValueError, KeyError):
        case.ended = False
    if not case.ended:
        case.output = err[-600:]


def first_place(cause: dict[str, Any]) -> tuple[str, int] | None:
    """Return the first file and line that a cause names in its evidence, or in its sentence."""
    return _place_in(cause.get("evidence")) or _place_in(cause.get("sentence"))


def _place_in(value: Any) -> tuple[str, int] | None:
    if isinstance(value, dict):
        if "file" in value and str(value.get("line", "")).isdigit():
            return str(value["file"]), int(value["line"])
        value = list(value.values())
    if isinstance(value, list):
        return next(filter(None, map(_place_in, value)), None)
    found = PLACE.search(value) if isinstance(value, str) else None
    return (found[1], int(found[2])) if found else None


class ForeignCores:
    """Measures how many cores other programs use: those of the machine, without our children's."""

    def __enter__(self) -> "ForeignCores":
        self.start, self.busy, self.own = time.monotonic(), _busy_s(), _children_s()
        self.cores = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        used = _busy_s() - self.busy - (_children_s() - self.own)
        self.cores = max(0.0, used / (time.monotonic() - self.start))


def _busy_s() -> float:
    numbers = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq = numbers[:7]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures(cases: list[Case]) -> dict[str, Any]:
    """Return all rates, of all kinds and of each."""
    faults = [case for case in cases if case.counts and case.injector]
    healthy = [case for case in cases if case.counts and not case.injector]
    off = [abs(case.off) for case in faults if case.off is not None]
    known = [case for case in cases if not case.error]
    found: dict[str, Any] = {
        "first": rate([case.first for case in faults]),
        "named": rate([case.named for case in faults]),
        "placed": rate([case.placed for case in faults if any(case.lines.values())]),
        "false_alarms": rate([case.false_alarm for case in healthy]),
        "ended": rate([case.ended for case in known]),
        "off_median": statistics.median(off) if off else None,
        "off_worst": max(off, default=None),
        "weak": sum(not case.counts for case in cases if case.injector and not case.error),
        "not_measured": sum(bool(case.error) for case in cases),
        "kinds": {},
    }
    for kind in KINDS:
        of_kind = [case for case in faults if case.kind == kind]
        if of_kind:
            found["kinds"][kind] = {
                "first": rate([case.first for case in of_kind]),
                "named": rate([case.named for case in of_kind]),
                "placed": rate([case.placed for case in of_kind]),
            }
    peers = [case for case in faults if case.peer is not None]
    if peers:
        found["peer_first"] = rate([bool(case.peer.get("right")) for case in peers])
    return found
