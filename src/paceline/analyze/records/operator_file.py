"""Read the operators of a rank's profiled steps (rank-N.operators).

The layout is in docs/reference/formats/record-format.md; the writer is
record.experiments.operators.operator_profile.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from ...record.ring.header_schema import without_line_breaks
from ...record.ring.ring import OPERATORS_SUFFIX
from ...security.files import InvalidFileError, error_reason
from ...security.schema import read_json

MAX_FILE_BYTES = 8 << 20
MAX_ROWS = 4096
MAX_FILES = 1 << 13
VERSION = 1

Amount = Annotated[float, msgspec.Meta(ge=0, le=1e24)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class ScriptLine(msgspec.Struct, frozen=True):
    """A line of the script; ``file`` is empty for operators that no line leads to."""

    file: Text
    line: Number
    function: Text
    code: Text


class OperatorRow(msgspec.Struct, frozen=True):
    """One operator at one line, in one module and phase: sums per step.

    Attributes:
        line: Index in ``OperatorFile.lines``.
        phase: "forward" (with all other work of the script), "recomputation" (activation
            checkpointing), "backward", "second backward" (through the same operators as another
            one of the step) or "optimizer".
        copy: "layout", "cast" or "transfer" for an operator that copies, else empty.
        shapes: Dtypes and shapes of the first inputs of the longest call.
        small_calls: Calls that take about as long as an operator on one element.
        repeated_s: Seconds of calls that repeat an operator on the same values.
        unused_s: Seconds of calls whose result is not used.
        unneeded_s: Seconds for gradients that no optimizer uses.
        float64_s: Seconds of calls in float64.
        output_bytes: Largest output of a call.
        growth: Largest ratio of the bytes of outputs and inputs.
        widens: 1 if a call has a float64 output and no float64 input.
        random: 1 if the operator draws random numbers.
        padded_s: Seconds, times the share of the module's inputs that is padding.
        pads: 1 if an output is such an input.
    """

    line: Number
    module: Text
    operator: Text
    phase: Text
    copy: Text
    shapes: Text
    calls: Amount
    seconds: Seconds
    flops: Amount
    bytes: Amount
    small_calls: Amount
    small_s: Seconds
    repeated_s: Seconds
    unused_s: Seconds
    unneeded_s: Seconds
    float64_s: Seconds
    output_bytes: Amount
    growth: Amount
    widens: Amount
    random: Amount
    padded_s: Seconds = 0.0
    pads: Amount = 0.0


class MachineLimits(msgspec.Struct, frozen=True):
    """Limits of the rank's device, measured in the rank while the others measured theirs."""

    flops_per_s: Amount
    bytes_per_s: Amount
    memory_bytes: Amount


class OperatorFile(msgspec.Struct, frozen=True):
    """The operators of one rank.

    Attributes:
        step_s: Median duration of a step without the profile.
        core_wait: Factor by which waits for a core lengthen the computation of a step.
        profiled_step_s: Duration of a step with it.
        dispatch_s: Seconds of an operator on one element.
        compiled: Whether torch.compile had compiled code, which the profile does not see.
        failure: Why the profile is incomplete, or empty.
        parameter_bytes: Bytes of the parameters of the optimizers, by dtype.
        left_out_s: Seconds per step of operators that ``operators`` does not list.
        whole_s: Duration of the profile with its measurements.
    """

    version: Number
    steps: Number
    step_s: Seconds
    core_wait: Annotated[float, msgspec.Meta(ge=1, le=1e6)]
    profiled_step_s: Seconds
    device: Text
    dispatch_s: Seconds
    compiled: bool
    failure: Text
    parameter_bytes: dict[Text, Amount]
    limits: MachineLimits
    lines: Annotated[list[ScriptLine], msgspec.Meta(max_length=MAX_ROWS)]
    operators: Annotated[list[OperatorRow], msgspec.Meta(max_length=MAX_ROWS)]
    left_out_s: Seconds
    whole_s: Seconds


@dataclass(frozen=True)
class OperatorFiles:
    """Profiles of the ranks that have one, and the reasons why others have none."""

    files: list[OperatorFile]
    notes: list[str]


def read_operator_files(folder: Path) -> tuple[list[OperatorFile], list[str]]:
    """Return the profiles of a run's ranks, and the reasons why others cannot be read."""
    found, notes = [], []
    for path in sorted(folder.glob(f"rank-*{OPERATORS_SUFFIX}"))[:MAX_FILES]:
        try:
            found.append(read_operator_file(path))
        except (InvalidFileError, OSError) as error:
            notes.append(without_line_breaks(f"{path.name}: {error_reason(error)}"))
    return found, notes


def read_operator_file(path: Path) -> OperatorFile:
    """Return the profile of one rank.

    Raises:
        InvalidFileError: The file is too large, does not match its format, or is newer.
        OSError: The file cannot be opened.
    """
    file = read_json(path, OperatorFile, MAX_FILE_BYTES)
    if file.version > VERSION:
        raise InvalidFileError(path, f"has version {file.version}. HINT: update Paceline")
    if any(row.line >= len(file.lines) for row in file.operators):
        raise InvalidFileError(path, "names a line that it does not list")
    return file
