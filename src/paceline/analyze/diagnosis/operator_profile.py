"""Operators of a job's steps: the sums of all ranks, with shares of a step and of the roofline."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from ..records.operator_file import MachineLimits, OperatorFile, OperatorRow

SUMS = (
    *("calls", "seconds", "flops", "bytes", "small_calls", "small_s"),
    *("repeated_s", "unused_s", "unneeded_s", "float64_s", "padded_s"),
)


@dataclass(frozen=True)
class ProfiledOperator:
    """One operator at one line of the script, in one module and phase; the mean of all ranks.

    Attributes:
        share: Share of a step's time.
        of_roofline: Rate as a share of the attainable one; None if it has no FLOPs.
        row: Sums per step. Its ``line`` is meaningless.
    """

    file: str
    line: int
    code: str
    share: float
    of_roofline: float | None
    row: OperatorRow

    @property
    def place(self) -> tuple[str, int]:
        return self.file, self.line


@dataclass(frozen=True)
class OperatorProfile:
    """The operators of a step.

    Attributes:
        ranks: Number of ranks that were profiled.
        step_s: Duration of a step without the profile.
        core_wait: Factor by which waits for a core lengthen the operators.
        profiled_step_s: Duration of a step with it.
        accounted: Share of a step in operators. The rest is Python, input, waiting and
            communication.
        dispatch_s: Seconds of an operator on one element.
        limits: The smallest limits of all ranks.
        operators: Those that take longest first.
        notes: Remarks for the user.
    """

    ranks: int
    step_s: float
    core_wait: float
    profiled_step_s: float
    accounted: float
    dispatch_s: float
    device: str
    parameter_bytes: dict[str, float]
    limits: MachineLimits
    operators: list[ProfiledOperator] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def share(self, seconds: float) -> float:
        """Return seconds of a step as a share of a step.

        If the operators take longer than a step without the profile, of their sum.
        """
        whole = max(self.step_s, self.step_s * self.accounted)
        return seconds * self.core_wait / whole if whole else 0.0


def profile_notes(files: list[OperatorFile], notes: list[str]) -> list[str]:
    """Return ``notes`` and what the profiles lack."""
    compiled = "the script uses torch.compile, whose operators were not profiled"
    failures = [f"the profile is incomplete: {file.failure}" for file in files if file.failure]
    return [*notes, *[compiled] * any(file.compiled for file in files), *dict.fromkeys(failures)]


def combine_profiles(files: list[OperatorFile], notes: list[str]) -> OperatorProfile | None:
    """Return the mean over all ranks, or None without a profile that can be used."""
    used = [file for file in files if file.steps and file.step_s and not file.compiled]
    if not used:
        return None
    count = len(used)
    step_s = sum(file.step_s for file in used) / count
    total = sum(sum(row.seconds for row in f.operators) + f.left_out_s for f in used) / count
    core_wait = sum(file.core_wait for file in used) / count
    profile = OperatorProfile(
        ranks=count,
        step_s=step_s,
        core_wait=core_wait,
        profiled_step_s=sum(file.profiled_step_s for file in used) / count,
        accounted=total * core_wait / step_s,
        dispatch_s=sum(file.dispatch_s for file in used) / count,
        device=used[0].device,
        parameter_bytes=used[0].parameter_bytes,
        limits=MachineLimits(
            *(
                min(getattr(file.limits, name) for file in used)
                for name in ("flops_per_s", "bytes_per_s", "memory_bytes")
            )
        ),
        notes=profile_notes(files, notes),
    )
    return replace(profile, operators=_operators(used, profile))


def _operators(files: list[OperatorFile], profile: OperatorProfile) -> list[ProfiledOperator]:
    rows: dict[tuple[Any, ...], list[OperatorRow]] = defaultdict(list)
    for file in files:
        for row in file.operators:
            line = file.lines[row.line]
            place = (line.file, line.line, line.code)
            rows[(*place, row.module, row.operator, row.phase, row.copy)].append(row)
    found = []
    for (file_name, number, code, *_), same in rows.items():
        longest = max(same, key=lambda row: row.seconds)
        values: dict[str, Any] = {
            name: getattr(longest, name) for name in longest.__struct_fields__
        }
        values |= {n: sum(getattr(row, n) for row in same) / len(files) for n in SUMS}
        row = OperatorRow(**values)
        share = profile.share(row.seconds)
        of_roofline = _roofline_share(row, profile.limits)
        found.append(ProfiledOperator(file_name, number, code, share, of_roofline, row))
    return sorted(found, key=lambda one: -one.share)


def _roofline_share(row: OperatorRow, limits: MachineLimits) -> float | None:
    if not (row.flops and row.bytes and row.seconds and limits.flops_per_s):
        return None
    attainable = min(limits.flops_per_s, limits.bytes_per_s * row.flops / row.bytes)
    return row.flops / row.seconds / attainable if attainable else None
