"""The profiles beside a record: lines (rank-0.profile) and operators (rank-0.operators).

The first byte gives the kind, the rest is the content of the file. What can be read must give
finite shares, in the terminal, the page and the JSON.
"""

import io
import json
from collections.abc import Iterator

from fuzz.scratch import new_folder
from fuzz.targets.record import about, ring
from paceline.analyze.diagnosis.exchanged_calls import measure_exchanged_calls
from paceline.analyze.diagnosis.line_profile import profile_of_runs
from paceline.analyze.diagnosis.operator_profile import combine_profiles
from paceline.analyze.diagnosis.rules.operators import findings
from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.records.load_run import load_run
from paceline.analyze.records.operator_file import (
    MachineLimits,
    OperatorFile,
    OperatorRow,
    read_operator_file,
)
from paceline.record.ring.ring import EVENT
from paceline.record.ring.states import Op, State
from paceline.report.console import PlainConsole
from paceline.report.diagnosis.profile_tables import (
    lines_as_json,
    lines_section,
    operators_as_json,
    operators_section,
)
from paceline.report.terminal.draw import draw

FOLDER = new_folder()
STEP_NS = 1_000_000


def record(rank: int) -> bytes:
    """Return a record of one of two ranks: ten steps of 1 ms with an all-reduce in each."""
    events = [EVENT.pack(0, STEP_NS, 0, 0, 0, 0, State.STEP, 0, -1)]
    for step in range(1, 11):
        start, end = step * STEP_NS, (step + 1) * STEP_NS
        reduces, call = end - (rank + 1) * STEP_NS // 4, (step, step, 1)
        events += [
            EVENT.pack(start, reduces, 0, 0, step, 0, State.FORWARD, 0, -1),
            EVENT.pack(reduces, end - 9, 99, *call, State.BLOCKED, Op.ALL_REDUCE, -1),
            EVENT.pack(reduces, end - 9, 99, *call, State.COLLECTIVE, Op.ALL_REDUCE, -1),
            EVENT.pack(start, end, 8, 0, step, 0, State.STEP, 0, -1),
        ]
    return ring(about(rank, 2, 1), b"".join(events))


def seeds() -> Iterator[bytes]:
    profile = {
        "version": 1,
        "start_ns": STEP_NS,
        "interval_ns": STEP_NS // 2,
        "frames": [["train.py", 3, "main", "loss = model(x)"], ["a.py", 1, "f", "y"]],
        "stacks": [
            {"frames": [0], "activity": "torch", "what": "torch.mm"},
            {"frames": [1, 0], "activity": "python", "what": ""},
        ],
        "samples": [[i * STEP_NS // 2, 10, i % 2, 400_000, 1000, 1000] for i in range(20)],
        "lost": 0,
        "executions": [[1, 40]],
        "workers": 1,
        "worker_ns": 10 * STEP_NS,
        "worker_times": [{"stack": 1, "samples": 3, "ns": STEP_NS, "on_core_ns": 5}],
        "collective_sites": [{"kind": "metric", "stack": 1, "count": 10, "bytes": 990}],
        "collectives": [[1, step, 0] for step in range(1, 11)],
    }
    yield b"\0" + json.dumps(profile).encode()
    numbers = dict.fromkeys(OperatorRow.__struct_fields__, 1.0)
    texts = {"module": "0", "operator": "mm", "phase": "forward", "copy": "cast", "shapes": "f32"}
    row = numbers | texts | {"line": 0}
    file = dict.fromkeys(OperatorFile.__struct_fields__, 1.0)
    file |= {"version": 1, "steps": 3, "device": "cpu", "failure": "", "compiled": False}
    file |= {"parameter_bytes": {"float32": 8.0, "float64": 80.0}, "operators": [row, row]}
    file |= {"limits": dict.fromkeys(MachineLimits.__struct_fields__, 1e9)}
    line = {"file": "train.py", "line": 3, "function": "main", "code": "loss = model(x)"}
    yield b"\1" + json.dumps(file | {"lines": [line]}).encode()


for number in range(2):
    (FOLDER / f"rank-{number}.ring").write_bytes(record(number))
(FOLDER / "rank-1.profile").write_bytes(next(seeds())[1:])


def run(data: bytes) -> None:
    if not data:
        return
    draw = data[-1] % 16 == 0 or data[-1:] == b"}"
    console = PlainConsole(file=io.StringIO(), width=100)
    if data[0] % 2:
        _operators(data[1:], console if draw else None)
    else:
        _lines(data[1:], console if draw else None)


def _lines(data: bytes, console: PlainConsole | None) -> None:
    (FOLDER / "rank-0.profile").write_bytes(data)
    examined = analyse_with_window(load_run(FOLDER))
    if examined.measured is None:
        return
    profile = profile_of_runs([examined.measured], 1e-3)
    if profile is None:
        return
    json.dumps(lines_as_json(profile), allow_nan=False)
    (shown,) = lines_section(profile)
    assert all(0 <= one.share <= 1 + 1e-6 for one in profile.lines())
    exchanged = measure_exchanged_calls(examined.measured)
    assert sum(one.transfer + one.wait for one in exchanged) <= 1 + 1e-6
    if console is not None:
        console.print(*draw(shown.blocks))


def _operators(data: bytes, console: PlainConsole | None) -> None:
    path = FOLDER / "one.operators"
    path.write_bytes(data)
    profile = combine_profiles([read_operator_file(path)], [])
    if profile is None:
        return
    json.dumps(operators_as_json(profile), allow_nan=False, default=str)
    shown = operators_section(profile)
    assert all(one.share >= 0 for one in findings(profile))
    if console is not None:
        console.print(*(line for section in shown for line in draw(section.blocks)))
