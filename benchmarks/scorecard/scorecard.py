"""How often is `paceline diagnose` right? Faults of known kinds and strengths are planted in a
plain DDP script on two ranks of this machine, alone and in pairs, and in some cases none. Printed:
the share of cases whose strongest fault is named first, of faults named at all, and false alarms
where nothing was planted. "jitter", the noise of a machine that is not quiet, counts for nothing.

    python benchmarks/scorecard/scorecard.py                24 cases by a seed, at most 40 minutes
    python benchmarks/scorecard/scorecard.py --kinds input-waiting,slow-rank
    python benchmarks/scorecard/scorecard.py --all          every kind at three strengths
"""

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PACELINE = Path(sysconfig.get_path("scripts")) / "paceline"
# What a step computes: long beside the exchange of a small model, so that nothing holds it back.
BASE = ["--products", "150"]
BASE_STEPS = 40  # of the run that shows how long such a step takes here
STRENGTHS = (0.3, 0.6, 1.2)  # of the base step's time, that the fault adds
FIRST, FALSE = 0.95, 0.0  # targets


@dataclass(frozen=True)
class Fault:
    """named: the ids of diagnose that are right. plant: the script's options for so many seconds a
    step. beside: these are beside the step, which hides as many of them as it takes itself."""

    kind: str
    named: tuple[str, ...]
    plant: Callable[[float], list[str]]
    beside: bool = False


FAULTS = (
    Fault("input-waiting", ("input-waiting",), lambda s: ["--load-sleep", f"{s}"]),
    Fault(
        "input-workers",
        ("input-waiting",),
        lambda s: ["--load-sleep", f"{2 * s}", "--workers", "2"],
        beside=True,
    ),
    Fault("input-preprocessing", ("input-preprocessing",), lambda s: ["--load-work", f"{s}"]),
    Fault("slow-rank", ("slow-rank",), lambda s: ["--slow-rank", "1", "--slow", f"{s}"]),
    Fault(
        "exchange-latency",
        ("exchange-latency",),
        lambda s: ["--reduces", f"{round(s / 0.0002)}"],
    ),
    Fault(
        "exchange-bandwidth",
        ("exchange-bandwidth",),
        lambda s: ["--width", f"{round(s / 0.020 * 60_000)}"],
    ),
    Fault(
        "validation-on-one-rank", ("validation-on-one-rank",), lambda s: ["--validate", f"{5 * s}"]
    ),
    Fault("checkpoint-on-one-rank", ("checkpoint-on-one-rank",), lambda s: ["--save", f"{5 * s}"]),
    Fault("script", ("script",), lambda s: ["--script", f"{s}"]),
)
HEALTHY = "healthy"
NOISE = "jitter"  # of a machine that is not quiet: no false alarm


@dataclass
class Case:
    """Planted faults with their strengths, the strongest first; none: a healthy run."""

    faults: list[tuple[str, float]]
    found: list[tuple[str, float]] = field(default_factory=list)
    ideal: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def name(self) -> str:
        return " + ".join(f"{kind} {s}" for kind, s in self.faults) or HEALTHY

    @property
    def first(self) -> bool:
        """Whether the strongest is named first; of a healthy run, whether nothing is named."""
        if not self.faults:
            return not self.error and all(name == NOISE for name, _ in self.found)
        named = [name for name, _ in self.found if name != NOISE]
        return named[:1] != [] and named[0] in BY_KIND[self.faults[0][0]].named

    @property
    def named(self) -> int:
        """How many of the planted are named."""
        ids = {name for name, _ in self.found}
        return sum(bool(ids & set(BY_KIND[kind].named)) for kind, _ in self.faults)


BY_KIND = {fault.kind: fault for fault in FAULTS}


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases, by seed: every kind once, then pairs and healthy runs."""
    draw = random.Random(args.seed)
    if args.kinds:
        kinds = args.kinds.split(",")
        strengths = STRENGTHS if args.all else STRENGTHS[1:2]
        return [Case([] if k == HEALTHY else [(k, s)]) for k in kinds for s in strengths]
    if args.all:
        alone = [Case([(fault.kind, s)]) for fault in FAULTS for s in STRENGTHS]
        pairs = [_pair(draw) for _ in range(len(FAULTS))]
        return [*alone, *pairs, *(Case([]) for _ in range(20))]
    cases = [Case([(fault.kind, draw.choice(STRENGTHS))]) for fault in FAULTS]
    cases += [_pair(draw) for _ in range((args.cases - len(cases)) // 2)]
    cases += [Case([]) for _ in range(args.cases - len(cases))]
    draw.shuffle(cases)
    return cases[: args.cases]


def _pair(draw: random.Random) -> Case:
    """Two of different names, one clearly stronger."""
    while True:
        one, other = draw.sample(FAULTS, 2)
        if not set(one.named) & set(other.named):
            return Case([(one.kind, STRENGTHS[2]), (other.kind, STRENGTHS[0])])


def base_step() -> float:
    """Seconds of a step in which nothing is planted."""
    with tempfile.TemporaryDirectory() as folder:
        record = str(Path(folder) / "record")
        words = ["run", "-n", "2", "--threads", "1", "--record", record, str(HERE / "planted.py")]
        for command in ([*words, *BASE, "--steps", str(BASE_STEPS)], ["report", "--json", record]):
            done = subprocess.run([str(PACELINE), *command], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
    return float(json.loads(done.stdout)["step_times"]["median_s"])


def judge(case: Case, minutes: float, base_s: float) -> None:
    """Run diagnose on a case, and take in what it names."""
    script, options = list(BASE), ["-n", "2", "--threads", "1", "--minutes", f"{minutes}"]
    for kind, strength in case.faults:
        fault = BY_KIND[kind]
        script += fault.plant(base_s * (strength + fault.beside))
    start = time.monotonic()
    done = subprocess.run(
        [str(PACELINE), "diagnose", *options, "--json", str(HERE / "planted.py"), *script],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    case.seconds = time.monotonic() - start
    if done.returncode:
        case.error = done.stderr[-400:]
        return
    found = json.loads(done.stdout)
    case.found = [(cause["id"], round(cause["share"], 3)) for cause in found["causes"]]
    whole = found["waterfall"]
    case.ideal = round(whole["measured"]["mean"] / whole["ideal"]["mean"], 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.75, help="of each diagnosis")
    parser.add_argument("--kinds", help="only these, with commas")
    parser.add_argument("--all", action="store_true", help="every kind at three strengths")
    parser.add_argument("--json", type=Path, default=HERE.parent / "out" / "scorecard.json")
    args = parser.parse_args()
    console, cases = Console(), chosen(args)
    base_s = base_step()
    console.print(f"A step without any fault takes {1e3 * base_s:.0f} ms.")
    for number, case in enumerate(cases, 1):
        judge(case, args.minutes, base_s)
        sign = "[green]ok[/]" if case.first else "[red]no[/]"
        found = ", ".join(f"{name} {100 * share:.0f} %" for name, share in case.found)
        console.print(
            f"{number:3}/{len(cases)} {sign}  {case.name}: {case.error or found or 'nothing'}  "
            f"({100 * case.ideal:.0f} % of the ideal, {case.seconds:.0f} s)",
            highlight=False,
        )
    report(console, args, cases)
    sys.exit(0)


def report(console: Console, args: argparse.Namespace, cases: list[Case]) -> None:
    planted = [case for case in cases if case.faults]
    healthy = [case for case in cases if not case.faults]
    faults = sum(len(case.faults) for case in planted)
    figures = {
        "named_first": sum(c.first for c in planted) / len(planted) if planted else None,
        "named": sum(c.named for c in planted) / faults if faults else None,
        "false_alarms": sum(not c.first for c in healthy) / len(healthy) if healthy else None,
    }
    table = Table(title=f"{len(cases)} cases, seed {args.seed}")
    for heading in ("", "measured", "target"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = (
        ("strongest fault named first", figures["named_first"], f"{100 * FIRST:.0f} %"),
        ("planted faults named", figures["named"], ""),
        ("false alarms on healthy runs", figures["false_alarms"], f"{100 * FALSE:.0f} %"),
    )
    for name, value, wanted in rows:
        table.add_row(name, "" if value is None else f"{100 * value:.0f} %", wanted)
    console.print(table)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "benchmark": "scorecard",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "settings": {name: str(value) for name, value in vars(args).items()},
        "figures": figures,
        "cases": [asdict(case) for case in cases],
    }
    args.json.write_text(json.dumps(whole, indent=1) + "\n")
    console.print(f"JSON: {args.json}")


if __name__ == "__main__":
    main()
