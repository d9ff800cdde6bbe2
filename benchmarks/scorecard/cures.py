"""What is `paceline diagnose --try all` worth? Faults that a knob cures are planted in a plain DDP
script on two ranks of this machine. Printed for each: what a cure by hand gains of the throughput
(the script's own options undo the fault), what --try gained, and by how many percentage points its
predictions were off.

    python benchmarks/scorecard/cures.py                       every kind, three minutes each
    python benchmarks/scorecard/cures.py --kinds input-waiting,too-many-threads
    python benchmarks/scorecard/cures.py --resume              goes on where that was stopped
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from beside import here
from faults import FAULTS, STRENGTHS, Fault
from rich.console import Console
from rich.table import Table
from scorecard import HERE, PACELINE, PLANTED, SCRIPTS, base_step, write

RECOVERED, MEDIAN, WORST = 0.8, 5.0, 15.0  # targets: a fraction, and percentage points
WORTH = 0.05  # minimum gain of the manual cure for a fault to count as curable
ROUNDS = 3
STEPS = 60
# --minutes is a limit for a diagnosis, and with --try everything takes at most 1.5 times as long:
# with less, the trials of one remedy do not fit.
MIN_MINUTES = 1.5


@dataclass
class Cure:
    """The result for one planted fault.

    Attributes:
        kind: Kind of the fault.
        by_hand: Relative gain of throughput by the script's options that undo the fault.
        tried: Relative gain of throughput by the settings that --try kept.
        kept: Settings that --try kept.
        off: Error of each prediction, in percentage points of the throughput.
        slower: Settings that were kept although they made steps slower.
        trials: Prediction and measurement of each trial.
        error: Error message of a failed run.
    """

    kind: str
    by_hand: float = 0.0
    tried: float = 0.0
    kept: dict = field(default_factory=dict)
    off: list[float] = field(default_factory=list)
    slower: list[str] = field(default_factory=list)
    trials: list[dict] = field(default_factory=list)
    error: str = ""

    @property
    def recovered(self) -> float:
        return self.tried / self.by_hand if self.by_hand > 0 else 0.0


def rate(words: list[str], *options: str) -> float:
    """Run a script and return its throughput in samples per second."""
    with tempfile.TemporaryDirectory() as folder:
        record = str(Path(folder) / "record")
        run = ["run", "-n", "2", "--threads", "1", *options, "--record", record, *words]
        for command in ([*run, "--steps", str(STEPS)], ["report", "--json", record]):
            done = here([str(PACELINE), *command])
            if done.returncode:
                raise SystemExit(done.stderr)
    return float(json.loads(done.stdout)["samples_per_s"])


def judge(fault: Fault, strength: float, base_s: float, minutes: float) -> Cure:
    """Let --try find settings for a fault, and measure their gain.

    The script is measured in interleaved rounds: unchanged, with the fault undone by its options,
    and with the settings that were kept.
    """
    plant = fault.plant(base_s * (strength + fault.beside), strength)
    words = [*map(str, SCRIPTS[PLANTED]), *plant]
    cure = Cure(fault.kind)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "fast.toml"
        options = ["--threads", "1", "--minutes", f"{minutes}", "--try", "all", "--json"]
        saves = ["--save-settings", str(settings)]
        done = here([str(PACELINE), "diagnose", "-n", "2", *options, *saves, *words])
        if done.returncode:
            cure.error = done.stderr[-300:]
            return cure
        kept = ["--settings", str(settings)] if settings.exists() else []
        rates = [
            (rate(words), rate([*words, *fault.cure]), rate(words, *kept)) for _ in range(ROUNDS)
        ]
    cure.by_hand = statistics.median(hand / ill for ill, hand, _ in rates) - 1
    cure.tried = statistics.median(fast / ill for ill, _, fast in rates) - 1
    found = json.loads(done.stdout)
    cure.kept = found["kept"]
    for trial in found["tried"]:
        if trial["off"] is not None:
            cure.off.append(100 * trial["off"])
        if trial["kept"] and trial["gain"]["mean"] < 0:
            cure.slower.append(trial["remedy"]["knob"])
        cure.trials.append(
            {"knob": trial["remedy"]["knob"], "source": trial["source"], "why": trial["why"]}
            | {name: trial[name] for name in ("first", "predicted", "gain")}
        )
    return cure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", help="only these, with commas")
    parser.add_argument("--strength", type=float, default=STRENGTHS[1], help="in base steps")
    parser.add_argument("--step", type=float, default=0.1, help="s of a step without any fault")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MIN_MINUTES,
        help=f"limit of each diagnosis, at least {MIN_MINUTES:g} (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, default=HERE.parent / "out" / "cures.json")
    parser.add_argument("--resume", action="store_true", help="keep the cases that --json holds")
    args = parser.parse_args()
    if args.minutes < MIN_MINUTES:
        parser.error(
            f"--minutes {args.minutes:g} is too short for the trials of a remedy, and every gain "
            f"would be 0. HINT: --minutes {MIN_MINUTES:g} or more"
        )
    wanted = args.kinds.split(",") if args.kinds else [one.kind for one in FAULTS if one.cure]
    console, base_s = Console(), base_step(PLANTED, args.step)
    cures = resumed(args.json) if args.resume else []
    known = {one.kind for one in cures}
    for fault in FAULTS:
        if fault.kind in wanted and fault.cure and fault.kind not in known:
            cures.append(judge(fault, args.strength, base_s, args.minutes))
            console.print(said(cures[-1]), highlight=False)
            write(args, "cures", figures(cures), cures)
    console.print(table(cures))
    console.print(f"JSON: {args.json}")


def resumed(path: Path) -> list[Cure]:
    """Return the results of an earlier run."""
    before = json.loads(path.read_text())["cases"] if path.exists() else []
    return [Cure(**one) for one in before if not one["error"]]


def said(cure: Cure) -> str:
    if cure.error:
        return f"{cure.kind}: {cure.error}"
    off = ", ".join(f"{one:+.0f}" for one in cure.off)
    return (
        f"{cure.kind}: by hand {100 * cure.by_hand:+.0f} %, --try {100 * cure.tried:+.0f} % "
        f"(kept {cure.kept}; predictions off by {off or 'nothing'} points)"
    )


def figures(cures: list[Cure]) -> dict[str, float]:
    """Return the figures over curable faults; errors of predictions count for all faults."""
    curable = [one for one in cures if one.by_hand >= WORTH] or cures
    off = [abs(one) for cure in cures for one in cure.off]
    return {
        "recovered_median": statistics.median(one.recovered for one in curable),
        "recovered_least": min(one.recovered for one in curable),
        "off_median": statistics.median(off) if off else 0.0,
        "off_worst": max(off, default=0.0),
        "kept_slower": sum(len(one.slower) for one in cures),
    }


def table(cures: list[Cure]) -> Table:
    found, shown = figures(cures), Table(title=f"{len(cures)} faults that a knob cures")
    for heading in ("", "measured", "target"):
        shown.add_column(heading, justify="right" if heading else "left")
    least, median = found["recovered_least"], found["recovered_median"]
    shown.add_row("of the cure by hand, median", f"{100 * median:.0f} %", "")
    shown.add_row("of the cure by hand, least", f"{100 * least:.0f} %", f"{100 * RECOVERED:.0f} %")
    shown.add_row("prediction off, median", f"{found['off_median']:.1f}", f"{MEDIAN:.0f} points")
    shown.add_row("prediction off, worst", f"{found['off_worst']:.1f}", f"{WORST:.0f} points")
    shown.add_row("kept, and slower", f"{found['kept_slower']}", "0")
    return shown


if __name__ == "__main__":
    main()
