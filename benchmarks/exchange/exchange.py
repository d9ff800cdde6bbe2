"""How fast ranks of one host exchange, over memory and through gloo.

All-reduces by size on 2 and 4 ranks (`paceline bench comm`: in turns, beside a copy of as many
bytes, and MPI where it is installed), the share of a training step's processor time that is the
model's own, of three models on 2 ranks, and the samples/s of the examples on 2 ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    BENCHMARKS,
    BIN,
    OUT,
    console,
    finish,
    launch,
    new_table,
    on_ranks,
    options,
    ratio,
    result_of,
    rounds,
    run,
    spread,
    target,
)
from rich.table import Table

MIB = 1 << 20
GLOO, OWN = "gloo", "paceline"
TRAINING = ("alone", "nothing exchanged", "gloo", "gloo, views", "paceline, views")
EXAMPLES = ("digits", "surrogate")


def main() -> None:
    parser = options("exchange", __doc__ or "", repeats=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3, help="of paceline bench comm")
    parser.add_argument("--steps", type=int, default=5, help="of each round of the training")
    parser.add_argument("--runs", type=int, default=7, help="of each example, over each")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = {str(n): [by_size(n) for _ in range(args.rounds)] for n in args.ranks}
    training = train_models(args)
    examples = {name: train_example(name, args.runs) for name in EXAMPLES}
    targets = [*of_sizes(sizes), *of_training(training), *of_examples(examples)]
    console.print(shown(training))
    console.print(shown_examples(examples))
    found = {"sizes": sizes, "training": training, "examples": examples}
    finish(args, found, {}, {}, targets)


def by_size(count: int) -> dict[str, Any]:
    """What one run of the command found."""
    words = [str(BIN / "paceline"), "bench", "comm", "-n", str(count), "--json"]
    console.print(f"paceline bench comm -n {count}", highlight=False)
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def train_models(args: Any) -> dict[str, dict[str, list[tuple[float, float]]]]:
    console.print("three models")
    script = "exchange/exchange_training.py"
    return dict(result_of(on_ranks(2, script, OUT, args.repeats, args.steps)))


def train_example(name: str, runs: int) -> dict[str, list[float]]:
    """Samples/s of an example from its second step on, as its record has it."""
    console.print(f"examples/{name}.py", highlight=False)
    found: dict[str, list[float]] = {GLOO: [], OWN: []}
    script = str(BENCHMARKS.parent / "examples" / f"{name}.py")
    for turn in rounds([GLOO, OWN], runs):
        for over in turn:
            with tempfile.TemporaryDirectory() as folder:
                words = [str(BIN / "paceline"), "run", "-n", "2", "--exchange", over]
                launch([*words, "--record", f"{folder}/record", script])
                report = [str(BIN / "paceline"), "report", "--json", f"{folder}/record"]
                done = subprocess.run(report, capture_output=True, text=True, check=True)
            found[over].append(float(json.loads(done.stdout)["samples_per_s"]))
    return found


def medians(run: dict[str, Any], backend: str) -> dict[int, float]:
    """Seconds by size of one run."""
    found = [one for one in run["collectives"] if one["backend"] == backend]
    return {at["bytes"]: at["seconds"]["median"] for one in found for at in one["sizes"]}


def of_sizes(sizes: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The ratios that were asked for; of several sizes the worst."""

    def worst(count: str, low: int, high: int, below: str) -> dict[str, Any]:
        each = []
        for one in sizes.get(count, []):
            own = medians(one, OWN)
            others = (
                medians(one, below)
                if below != "copy"
                else {at["bytes"]: at["seconds"]["median"] for at in one["copies"]}
            )
            found = [own[n] / others[n] for n in own if low <= n <= high and n in others]
            each += [max(found)] if found else []
        return ratio(each, [1.0] * len(each)) if each else {}

    wanted = [
        ("2", 0, MIB, GLOO, 0.1, "2 ranks, up to 1 MiB: at most a tenth of gloo's time"),
        ("2", 16 * MIB, 256 * MIB, GLOO, 0.2, "2 ranks, 16 to 256 MiB: at most a fifth of gloo's"),
        ("2", 0, 16 * MIB, "copy", 1.2, "2 ranks, up to 16 MiB: at most 1.2 copies"),
        ("2", MIB, 16 * MIB, "copy", 1.2, "2 ranks, 1 to 16 MiB: at most 1.2 copies"),
        ("2", 16 * MIB, 16 * MIB, "mpi", 0.5, "2 ranks, 16 MiB: at most half of MPI's"),
        ("4", 0, 1 << 40, GLOO, 1.0, "4 ranks: never slower than gloo"),
    ]
    goals = []
    for count, low, high, below, limit, claim in wanted:
        if found := worst(count, low, high, below):
            goals.append(target(claim, limit, found))
    return goals


def shares(times: dict[str, list[tuple[float, float]]], way: str) -> list[float]:
    """By round: the processor's time of the model alone, of that of a way."""
    pairs = zip(times["alone"], times[way], strict=True)
    return [alone[0] / one[0] for alone, one in pairs]


def of_training(training: dict[str, dict[str, list[tuple[float, float]]]]) -> list[dict[str, Any]]:
    goals = []
    for name, times in training.items():
        own, gloo = shares(times, TRAINING[4]), shares(times, TRAINING[3])
        least = 0.0 if name == "ResNet-50" else 0.1
        less = [b - a + least for a, b in zip(own, gloo, strict=True)]
        claim = f"{name}: the model's own share is {least:g} above that over gloo with views"
        goals.append(target(claim, 0.0, less))
    return goals


def of_examples(examples: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    return [
        target(f"examples/{name}.py: faster than over gloo", 1.0, ratio(found[GLOO], found[OWN]))
        for name, found in examples.items()
    ]


def shown_examples(examples: dict[str, dict[str, list[float]]]) -> Table:
    table = new_table(
        "", "gloo", "paceline", "times as fast", title="Samples/s of the examples, 2 ranks"
    )
    for name, found in examples.items():
        each = (f"{spread(found[way])['median']:,.0f}" for way in (GLOO, OWN))
        faster = ratio(found[OWN], found[GLOO])
        table.add_row(
            name, *each, f"{faster['median']:.2f} ({faster['q1']:.2f}-{faster['q3']:.2f})"
        )
    return table


def shown(training: dict[str, dict[str, list[tuple[float, float]]]]) -> Table:
    title = "Share of a step's processor time that is the model's own, 2 ranks"
    table = new_table("model", *TRAINING[1:], title=title)
    for name, times in training.items():
        found = [spread(shares(times, way)) for way in TRAINING[1:]]
        cells = (f"{one['median']:.2f} ({one['q1']:.2f}-{one['q3']:.2f})" for one in found)
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    run(main)
