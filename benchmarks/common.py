"""Common code of the benchmarks: options, jobs, statistics, tables, and the JSON output.

Every benchmark writes one JSON object:

    benchmark, date    name of the benchmark, and time (UTC)
    machine            cores, cpu, platform, python, torch, and the load average at the start
    settings           options of the benchmark; settings.repeats is the number of rounds
    measurements       every single measurement, one entry per round
    medians            for each alternative: median, q1, q3, low, high over the rounds
    ratios             ratios of two alternatives within each round: rounds, and the same statistics
    targets            claim, limit, value (the median of a ratio), interval (95 % confidence
                       interval of the median), met, and decided: whether the interval excludes the
                       limit and there are enough rounds
"""

import argparse
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

BENCHMARKS = Path(__file__).parent
SCRIPTS = BENCHMARKS / "scripts"
BIN = Path(sysconfig.get_path("scripts"))
OUT = object()  # in a command of result_of: the file that the command writes
console = Console()


def options(name: str, what: str, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks.

    The parsed arguments also hold ``benchmark``, the name, and ``machine``, for ``finish``.
    """
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--repeats", type=int, default=repeats, help=f"rounds, default {repeats}")
    parser.add_argument("--json", type=Path, default=BENCHMARKS / "out" / f"{name}.json")
    parser.set_defaults(benchmark=name, machine=machine())
    return parser


def rounds(alternatives: list[Any], repeats: int) -> list[list[Any]]:
    """Return the alternatives of each round; every other round is reversed.

    A drift of the machine's speed then affects all alternatives equally.
    """
    return [alternatives[:: -1 if i % 2 else 1] for i in range(repeats)]


def launch(command: list[Any], **environment: str) -> tuple[float, float]:
    """Run a command to its end; return its start and end as values of ``time.monotonic()``.

    Raises:
        SystemExit: The command failed; the text is its output.
    """
    words = [str(word) for word in command]
    early: list[int] = []
    with tempfile.TemporaryFile() as output:
        handler = signal.signal(signal.SIGINT, lambda number, _: early.append(number))
        start = time.monotonic()
        # In a new session, so that Ctrl-C reaches the command only once, through this process.
        process = subprocess.Popen(
            words,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            signal.signal(signal.SIGINT, handler)
            if early:  # Ctrl-C before the process was started
                raise KeyboardInterrupt
            code = process.wait()
        except KeyboardInterrupt:
            _end(process)
            raise
        end = time.monotonic()
        if code:
            output.seek(0)
            text = output.read().decode(errors="replace")
            raise SystemExit(f"{text}\nexit code {code} of: {' '.join(words)}")
    return start, end


def on_ranks(ranks: int, script: str, *words: Any, options: Sequence[Any] = ()) -> list[Any]:
    """Return the command that runs a script of ``benchmarks/scripts`` on ranks of this machine.

    ``options``: further options of ``paceline run``.
    """
    return [BIN / "paceline", "run", "-n", ranks, *options, SCRIPTS / script, *words]


def result_of(command: list[Any], **environment: str) -> Any:
    """Run a command, in which OUT stands for a file; return what the command writes there as JSON.

    Raises:
        SystemExit: The command failed; the text is its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        launch([path if word is OUT else word for word in command], **environment)
        return json.loads(path.read_text())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Heard:
    """Readers of the standard error of launchers, which are terminated at the end of ``with``.

    Attributes:
        times: Values of ``time.monotonic()`` when a line contained one of the words.
    """

    def __init__(self, launchers: list[subprocess.Popen[str]], words: tuple[str, ...]) -> None:
        self.times: list[float] = []
        self._launchers, self._words = launchers, words
        self._readers = [
            threading.Thread(target=self._read, args=(launcher,), daemon=True)
            for launcher in launchers
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, launcher: subprocess.Popen[str]) -> None:
        assert launcher.stderr is not None
        for line in launcher.stderr:
            if any(word in line for word in self._words):
                self.times.append(time.monotonic())

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether all output of the first launcher was read."""
        self._readers[0].join(seconds)
        return not self._readers[0].is_alive()

    def __enter__(self) -> "Heard":
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self._launchers:
            launcher.terminate()
        for launcher in self._launchers:
            try:
                launcher.wait(10)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def spread(values: list[float]) -> dict[str, float]:
    q1, median, q3 = (
        statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
    )
    return {"median": median, "q1": q1, "q3": q3, "low": min(values), "high": max(values)}


def with_rounds(values: list[float]) -> dict[str, Any]:
    """Return the values of all rounds, and their statistics, as ``ratio`` does."""
    return {"rounds": values, **spread(values)}


def shown(found: dict[str, float], digits: int = 2, scale: float = 1.0) -> str:
    """Return the median and the quartiles of ``spread`` for a table."""
    median, q1, q3 = (f"{scale * found[key]:.{digits}f}" for key in ("median", "q1", "q3"))
    return f"{median} ({q1} to {q3})"


def ratio(above: list[float], below: list[float]) -> dict[str, Any]:
    """Return the ratios of two alternatives in each round, and their statistics."""
    return with_rounds([a / b for a, b in zip(above, below, strict=True)])


def new_table(*headings: str, left: int = 1, **options: Any) -> Table:
    """Return a table: texts in the first columns (how many: ``left``), numbers in the others."""
    table = Table(**options)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right")
    return table


def cost_table(title: str, heading: str, times: dict[str, str], *more: str) -> Table:
    """Return a table with two columns for each time: of a step, and how much more than the base."""
    columns = [text for label in times.values() for text in (f"{label}, µs a step", "more, %")]
    return new_table(heading, *columns, *more, title=title)


def cost_cells(name: str, base: str, medians: dict[str, Any], ratios: dict[str, Any]) -> list[str]:
    """Return the cells of one alternative in a ``cost_table``."""
    cells = []
    for what, of in ratios.items():
        more = {key: 100 * of[name][key] - 100 for key in ("median", "q1", "q3")}
        cells += [shown(medians[what][name], 0), "" if name == base else shown(more, 1)]
    return cells


def interval(values: list[float]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the median, between two of the values (sign test).

    With fewer than six values, return the minimum and maximum, whose confidence is lower.
    """
    n, cut, outside = len(values), 0, 2 / 2 ** len(values)
    while (outside := outside + 2 * math.comb(n, cut + 1) / 2**n) <= 0.05:
        cut += 1
    return sorted(values)[cut], sorted(values)[n - 1 - cut]


def target(
    claim: str, limit: float, found: dict[str, Any] | list[float], counted: bool = False
) -> dict[str, Any]:
    """Return whether the median of the rounds is within its limit, and whether that is significant.

    Args:
        claim: What is claimed.
        limit: Largest median with which the claim is met.
        found: A ratio, or the values of all rounds.
        counted: The value is counted, such as bytes of an allocator, and equal in each round.
    """
    if isinstance(found, list):
        found = with_rounds(found)
    low, high = interval(found["rounds"])
    return {
        "claim": claim,
        "limit": limit,
        "value": found["median"],
        "interval": [low, high],
        "met": found["median"] <= limit,
        "decided": counted or (len(found["rounds"]) > 5 and not low <= limit < high),
    }


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def finish(
    args: argparse.Namespace,
    measurements: Any,
    medians: dict[str, Any],
    ratios: dict[str, Any],
    targets: list[dict[str, Any]],
    **more: Any,
) -> None:
    """Print which targets were met, and write the JSON."""
    for goal in targets:
        word = "[green]met[/]" if goal["met"] else "[bold red]MISSED[/]"
        low, high = goal["interval"]
        console.print(
            f"target {word}: {goal['claim']} (measured {goal['value']:.3f}, between {low:.3f} "
            f"and {high:.3f})"
        )
        if not goal["decided"]:
            console.print("[yellow]  not decided: the rounds differ too much, or are too few[/]")
    hidden = ("json", "python", "runs", "pictures", "benchmark", "machine")
    settings = {
        key: value and True if key.endswith("_python") else value  # whether there is one
        for key, value in vars(args).items()
        if key not in hidden
    }
    date = datetime.now(UTC).isoformat(timespec="seconds")
    whole = {
        "benchmark": args.benchmark,
        "date": date,
        "machine": args.machine,
        "settings": settings,
        "measurements": measurements,
        "medians": medians,
        "ratios": ratios,
        "targets": targets,
        **more,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(whole, indent=1) + "\n")
    console.print(f"{args.json}")


def run(main: Callable[[], None]) -> None:
    """Call ``main``; exit without a traceback on Ctrl-C."""
    try:
        main()
    except KeyboardInterrupt:
        console.print("\ninterrupted: nothing was written")
        sys.exit(130)
