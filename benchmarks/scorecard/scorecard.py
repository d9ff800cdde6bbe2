"""How often is `paceline diagnose` right? Faults of known kinds and strengths are planted in a
plain DDP script on two ranks of this machine (or two hosts, which are namespaces of it), alone and
in pairs, and in some cases none. Printed: the share of cases whose strongest fault is named first,
of faults named at all, and false alarms where nothing was planted. "jitter", the noise of a machine
that is not quiet, counts for nothing.

    python benchmarks/scorecard/scorecard.py                24 cases by a seed, at most 40 minutes
    python benchmarks/scorecard/scorecard.py --kinds input-waiting,slow-rank+script
    python benchmarks/scorecard/scorecard.py --all          every kind at three strengths: hours
    python benchmarks/scorecard/scorecard.py --all --resume   goes on where that was stopped
"""

import argparse
import json
import os
import random
import re
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from beside import here, runner
from faults import BY_KIND, FAULTS, REDUCE_S, STRENGTHS, STRONG, WEAK
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PACELINE = Path(sysconfig.get_path("scripts")) / "paceline"
EXAMPLES = HERE.parents[1] / "examples"
PLANTED = "planted"
# In the planted script, steps are long compared with the gradient synchronization of a small model,
# so that no other cause slows it down. The steps of the examples are short, so only faults that
# outweigh their other causes are planted there.
PRODUCTS = 100
SCRIPTS = {
    PLANTED: [HERE / "planted.py", "--products", PRODUCTS],
    "digits": [HERE / "wrapped.py", EXAMPLES / "digits.py", "--epochs", "300"],
    "surrogate": [HERE / "wrapped.py", EXAMPLES / "surrogate.py", "--epochs", "300"],
}
WRAPPED = ("input-waiting", "input-preprocessing", "slow-rank", "exchange-latency", "script")
OUTWEIGHS = 3.0  # strength of faults in the examples, in base steps
FIRST, FALSE = 0.95, 0.0  # targets: rate of correct first causes, and of false alarms
TWO = ("-n", "2", "--threads", "1")
HEALTHY = "healthy"
NOISE = "jitter"  # caused by other load on the machine, so it does not count as a false alarm


@dataclass
class Case:
    """A run with planted faults, and what diagnose found.

    Attributes:
        faults: Kinds and strengths, the strongest first; empty for a healthy run.
        script: Name of the script in SCRIPTS.
        found: IDs and shares of the causes that diagnose names.
        ideal: Measured throughput as a fraction of the ideal.
        seconds: Duration of diagnose.
        error: Error message of a failed run.
    """

    faults: list[tuple[str, float]]
    script: str = PLANTED
    found: list[tuple[str, float]] = field(default_factory=list)
    ideal: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def name(self) -> str:
        faults = " + ".join(f"{kind} {s}" for kind, s in self.faults) or HEALTHY
        return faults if self.script == PLANTED else f"{self.script}: {faults}"

    @property
    def first(self) -> bool:
        """Whether the strongest fault is named first, or nothing is named in a healthy run."""
        if not self.faults:
            return not self.error and all(name == NOISE for name, _ in self.found)
        named = [name for name, _ in self.found if name != NOISE]
        return named[:1] != [] and named[0] in BY_KIND[self.faults[0][0]].named

    @property
    def named(self) -> int:
        """Number of planted faults that are named."""
        ids = {name for name, _ in self.found}
        return sum(bool(ids & set(BY_KIND[kind].named)) for kind, _ in self.faults)


def chosen(args: argparse.Namespace) -> list[Case]:
    """Return the cases for the seed: kinds drawn without replacement, pairs and healthy runs."""
    draw = random.Random(args.seed)
    if args.kinds:
        kinds = args.kinds.split(",")
        strengths = STRENGTHS if args.all else (args.strength,)
        return [Case(_faults(kind, s)) for kind in kinds for s in strengths]
    if args.all:
        alone = [Case([(fault.kind, s)]) for fault in FAULTS for s in STRENGTHS]
        pairs = [_pair(draw) for _ in range(len(FAULTS))]
        other = [_on(name, kind) for name in SCRIPTS if name != PLANTED for kind in WRAPPED]
        cases = [*alone, *pairs, *other, *(Case([]) for _ in range(20))]
        draw.shuffle(cases)  # so that the first part of the cases represents all of them
        return cases
    healthy = pairs = args.cases // 6
    cases = [_on(name, draw.choice(WRAPPED)) for name in SCRIPTS if name != PLANTED]
    kinds = draw.sample(FAULTS, min(args.cases - healthy - pairs - len(cases), len(FAULTS)))
    cases += [Case([(fault.kind, draw.choice(STRENGTHS))]) for fault in kinds]
    cases += [_pair(draw) for _ in range(pairs)]
    cases += [Case([]) for _ in range(healthy)]
    draw.shuffle(cases)
    return cases


def _faults(kinds: str, strength: float) -> list[tuple[str, float]]:
    """Return the faults of a text such as "slow-rank+script"; none for "healthy".

    Each fault has half the strength of the previous one.
    """
    named = [] if kinds == HEALTHY else kinds.split("+")
    return [(kind, strength / 2**at) for at, kind in enumerate(named)]


def _on(script: str, kind: str) -> Case:
    """Return a case in one of the example scripts."""
    return Case([(kind, OUTWEIGHS)], script)


def _pair(draw: random.Random) -> Case:
    """Return a case of two faults with different causes, one of them clearly stronger."""
    while True:
        one, other = draw.sample([fault for fault in FAULTS if not fault.alone], 2)
        if not set(one.named) & set(other.named):
            return Case([(one.kind, STRONG), (other.kind, WEAK)])


def base_step(script: str, long_s: float) -> float:
    """Return the seconds of a step without faults; the planted script is adjusted to ``long_s``."""
    words = [*SCRIPTS[script], *(["--steps", "40"] if script == PLANTED else ["--epochs", "2"])]
    with tempfile.TemporaryDirectory() as folder:
        record = str(Path(folder) / "record")
        _done("run", *TWO, "--record", record, *words)
        told = _done("report", "--json", record)
    took = float(json.loads(told)["step_times"]["median_s"])
    if script == PLANTED:
        SCRIPTS[PLANTED][-1], took = round(PRODUCTS * long_s / took), long_s
    return took


def reduce_time(script: str) -> float:
    """Return the seconds of a small all-reduce with the backend of the script."""
    if script == PLANTED:
        return REDUCE_S
    wrapped, *rest = SCRIPTS[script]
    told = _done("run", *TWO, wrapped, "--tell-reduce", *rest, "--epochs", "2")
    return float(re.findall(r"reduce_s (\S+)", told)[0])


def _done(*words: object) -> str:
    """Run a Paceline command and return its output; exit if it fails."""
    done = here([str(PACELINE), *map(str, words)])
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def judge(case: Case, minutes: float, base_s: float) -> None:
    """Run diagnose on a case, and store the causes that it names."""
    case.error = ""
    plant: list[str] = []
    outside, strongest = "", 0.0
    for kind, strength in case.faults:
        fault = BY_KIND[kind]
        seconds = base_s * (strength + fault.beside)
        if kind == "exchange-latency":  # the number of all-reduces depends on their time here
            seconds *= REDUCE_S / reduce_time(case.script)
        plant += fault.plant(seconds, strength)
        outside, strongest = outside or fault.outside, max(strongest, strength)
    program, *rest = map(str, SCRIPTS[case.script])
    # Options of faults come last, because they may override options of the script.
    script = [program, *rest, *plant] if case.script == PLANTED else [program, *plant, *rest]
    start = time.monotonic()
    with runner(outside, strongest) as (run, where):
        words = [*where, "--threads", "1", "--minutes", f"{minutes}", "--json"]
        done = run([str(PACELINE), "diagnose", *words, *script])
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
    parser.add_argument("--minutes", type=float, default=1.2, help="of each diagnosis")
    parser.add_argument(
        "--step", type=float, default=0.1, help="s that a step takes of the planted script"
    )
    parser.add_argument("--kinds", help="only these, with commas; a+b: both at once")
    parser.add_argument(
        "--strength", type=float, default=STRENGTHS[1], help="of --kinds, in base steps"
    )
    parser.add_argument("--all", action="store_true", help="every kind at three strengths")
    parser.add_argument("--json", type=Path, default=HERE.parent / "out" / "scorecard.json")
    parser.add_argument("--resume", action="store_true", help="keep the cases that --json holds")
    parser.add_argument(
        "--redo", nargs="*", default=[], help="but not those of these names, as healthy"
    )
    args = parser.parse_args()
    console, cases = Console(), chosen(args)
    done = resumed(args.json, cases) if args.resume else 0
    bases: dict[str, float] = {}
    for number, case in enumerate(cases, 1):
        if number <= done and case.name not in args.redo:
            continue
        if case.script not in bases:
            bases[case.script] = base_step(case.script, args.step)
            took = f"{1e3 * bases[case.script]:.3g} ms"
            console.print(f"A step of {case.script} without any fault takes {took}.")
        judge(case, args.minutes, bases[case.script])
        sign = "[green]ok[/]" if case.first else "[red]no[/]"
        found = ", ".join(f"{name} {100 * share:.0f} %" for name, share in case.found)
        console.print(
            f"{number:3}/{len(cases)} {sign}  {case.name}: {case.error or found or 'nothing'}  "
            f"({100 * case.ideal:.0f} % of the ideal, {case.seconds:.0f} s)",
            highlight=False,
        )
        known = cases[: max(number, done)]
        write(args, "scorecard", figures_of(known), known)
    report(console, args, cases)


def resumed(path: Path, cases: list[Case]) -> int:
    """Fill in the first cases with the results in the file; return their number."""
    before = json.loads(path.read_text())["cases"] if path.exists() else []
    for case, told in zip(cases, before, strict=False):
        same = Case([(kind, s) for kind, s in told["faults"]], told["script"])
        if case.name != same.name:
            sys.exit(f"{path} has other cases. HINT: the same --seed, --kinds and --all, or --json")
        case.found = [(name, share) for name, share in told["found"]]
        case.ideal, case.seconds, case.error = told["ideal"], told["seconds"], told["error"]
    return len(before)


def figures_of(cases: list[Case]) -> dict[str, float | None]:
    planted = [case for case in cases if case.faults]
    healthy = [case for case in cases if not case.faults]
    faults = sum(len(case.faults) for case in planted)
    return {
        "named_first": sum(c.first for c in planted) / len(planted) if planted else None,
        "named": sum(c.named for c in planted) / faults if faults else None,
        "false_alarms": sum(not c.first for c in healthy) / len(healthy) if healthy else None,
    }


def report(console: Console, args: argparse.Namespace, cases: list[Case]) -> None:
    figures = figures_of(cases)
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
    console.print(f"JSON: {args.json}")


def write(args: argparse.Namespace, name: str, figures: dict, cases: list) -> None:
    """Write the results; called after each case, so that a failure loses only the last one."""
    args.json.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "settings": {name: str(value) for name, value in vars(args).items()},
        "figures": figures,
        "cases": [asdict(case) for case in cases],
    }
    part = args.json.with_suffix(".part")
    part.write_text(json.dumps(whole, indent=1) + "\n")
    part.replace(args.json)


if __name__ == "__main__":
    main()
