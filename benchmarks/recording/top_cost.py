"""Claim: looking at a job with `paceline top` costs it at most 1 % of its steps.

One recorded job of 2 ranks (a plain DDP loop, about 5 ms a step) runs all the time. In turns
`paceline top` looks at it on a terminal, every 2 seconds as it does by itself, or every second,
or nobody looks; every alternative is compared with the time without of the same round. What is
compared is the mean of the steps, so that a single step that a refresh makes longer counts.
"Nobody, again" is what the comparison itself makes of nothing. `paceline top`'s own start, a
quarter of a second of a core, is left out.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    BIN,
    SCRIPTS,
    console,
    cost_cells,
    cost_table,
    finish,
    options,
    ratio,
    rounds,
    run,
    spread,
    target,
)

from paceline.security.processes import stat_fields

LIMIT = 1.01
MEANING = {
    "nobody": "nobody looks",
    "top": "paceline top",
    "again": "nobody, again",
    "every": "paceline top --every 1",
}
WORDS: dict[str, list[str]] = {"top": [], "every": ["--every", "1"]}
BASE = "nobody"
TIMES = {"wall_us": "wall time", "cpu_us": "main thread's time"}


def main() -> None:
    parser = options("top_cost", __doc__ or "", repeats=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured of each turn")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds before them")
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank's step")
    parser.add_argument("--quick", action="store_true", help="one rank, a second: shows it runs")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.seconds = 1, 1.0
    order = [name for names in rounds(list(MEANING), args.repeats) for name in names]
    with console.status("cost of looking"):
        blocks = measure(order, args)
    report(args, blocks)


def measure(order: list[str], args: Any) -> list[dict[str, Any]]:
    """The turns: the mean of their steps, and the processor time that looking took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        turns = []
        with job(folder, args):
            for who in order:
                with running_top(folder / "record", WORDS.get(who)) as pid:
                    time.sleep(args.settle)
                    before, start = cpu_seconds_of(pid), time.monotonic_ns()
                    time.sleep(args.seconds)
                    turns.append((who, start, time.monotonic_ns(), cpu_seconds_of(pid) - before))
        stamps = [array("q", path.read_bytes()) for path in sorted(folder.glob("stamps-*"))]
    return [
        {"name": who, **steps(stamps, start, end), "own_share": own / (end - start) * 1e9}
        for who, start, end, own in turns
    ]


@contextlib.contextmanager
def job(folder: Path, args: Any) -> Iterator[None]:
    command = [str(BIN / "paceline"), "run", "-n", str(args.ranks)]
    command += ["--record", str(folder / "record"), str(SCRIPTS / "recording/watched_steps.py")]
    process = subprocess.Popen(
        [*command, str(folder), str(args.batch)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while len(list(folder.glob("up-*"))) < args.ranks:
            if process.poll() is not None:
                raise SystemExit(process.communicate()[0])
            time.sleep(0.1)
        time.sleep(args.settle)
        yield
        (folder / "end").touch()
        said, _ = process.communicate(timeout=60)
        if process.returncode:
            raise SystemExit(said)
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextlib.contextmanager
def running_top(record: Path, words: list[str] | None) -> Iterator[int | None]:
    """Run ``paceline top`` on a terminal of its own in the body of ``with``; yield its PID."""
    if words is None:
        yield None
        return
    outer, inner = os.openpty()
    process = subprocess.Popen(
        [str(BIN / "paceline"), "top", str(record), *words],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env={**os.environ, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(inner)
    drawn = threading.Event()
    reader = threading.Thread(target=drain, args=(outer, drawn))
    reader.start()
    try:
        if not drawn.wait(60):
            raise SystemExit("paceline top has drawn nothing in 60 s")
        yield process.pid
    finally:
        process.terminate()
        code = process.wait(30)
        reader.join()
        os.close(outer)
    if code != 128 + signal.SIGTERM:
        raise SystemExit(f"paceline top ended with {code}")


def drain(outer: int, drawn: threading.Event) -> None:
    """Read what is drawn until the other side closes; ``drawn`` is set at the first of it."""
    with contextlib.suppress(OSError):  # the other side was closed
        while os.read(outer, 1 << 16):
            drawn.set()


def cpu_seconds_of(pid: int | None) -> float:
    """Return the CPU time of a process, in seconds."""
    if pid is None:
        return 0.0
    return sum(map(int, stat_fields(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def steps(stamps: list[Any], start: int, end: int) -> dict[str, float]:
    """Mean wall and main thread's time of the steps between two times, of all ranks."""
    found: dict[str, list[float]] = {name: [] for name in TIMES}
    for rank in stamps:
        inside = [i for i in range(0, len(rank), 2) if start <= rank[i] <= end]
        first, last, number = inside[0], inside[-1], len(inside) - 1
        found["wall_us"].append((rank[last] - rank[first]) / number / 1000)
        found["cpu_us"].append((rank[last + 1] - rank[first + 1]) / number / 1000)
    return {name: sum(values) / len(values) for name, values in found.items()}


def report(args: Any, blocks: list[dict[str, Any]]) -> None:
    def of(name: str, what: str) -> list[float]:
        return [block[what] for block in blocks if block["name"] == name]

    medians: dict[str, Any] = {
        what: {name: spread(of(name, what)) for name in MEANING} for what in (*TIMES, "own_share")
    }
    ratios = {
        what: {name: ratio(of(name, what), of(BASE, what)) for name in MEANING} for what in TIMES
    }
    show(args, medians, ratios)
    claim = f"a step's {{}} with {{}} looking, at most {LIMIT} of what it is without"
    targets = [
        target(claim.format(TIMES[what], MEANING[name]), LIMIT, ratios[what][name])
        for name in WORDS
        for what in TIMES
    ]
    finish(args, blocks, medians, ratios, targets)


def show(args: Any, medians: dict[str, Any], ratios: dict[str, Any]) -> None:
    title = (
        f"Cost of looking at {args.ranks} ranks, {args.repeats} rounds of {args.seconds:g} "
        "s: median (quartiles)"
    )
    table = cost_table(title, "who looks", TIMES, "its own processor time, % of a core")
    for name, meaning in MEANING.items():
        cells = cost_cells(name, BASE, medians, ratios)
        own = f"{100 * medians['own_share'][name]['median']:.1f}" if name in WORDS else ""
        table.add_row(meaning, *cells, own)
    console.print(table)


if __name__ == "__main__":
    run(main)
