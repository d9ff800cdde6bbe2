"""The case of docs/explanation/case-patches.md: what each of five steps does to a training that
waits for its input. Claims: the last one waits for input for a tenth of its time at most, takes
half as long a sample as more workers, and its loss is that of the training as it was found (to a
twentieth).

The patches are SYNTHETIC (examples/patches.py). Every run is recorded, on two ranks, with the
files' pages dropped from the cache before it (what the storage itself remembers is not touched).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, options, ratio, rounds, run, spread, target

EXAMPLES = SCRIPTS.parents[1] / "examples"
INPUT, FASTER, LOSS = 0.1, 0.5, 1.05
STATES = ("useful", "input", "wait", "transfer", "other")
HEADS = ("samples/s", *STATES, "files opened a sample", "MB from the disk", "loss")


@dataclass(frozen=True)
class Step:
    """Of the case. folder: that is trained from. words: the example's options."""

    name: str
    folder: str
    words: tuple[str, ...]
    staged: bool = False


def steps(workers: int, threads: int) -> list[Step]:
    packed = ("--input", "packed", "--workers", f"{threads}")
    return [
        Step("1. files, as found", "files", ()),
        Step(f"2. {workers} workers a rank", "files", ("--workers", f"{workers}")),
        Step("3. packed as they are", "packed", packed),
        Step("4. upsampled while packing", "upsampled", packed),
        Step("5. staged in memory", "upsampled", packed, staged=True),
    ]


def main() -> None:
    parser = options("patches", __doc__ or "", repeats=5)
    parser.add_argument("--patches", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=100, help="of each training")
    parser.add_argument("--workers", type=int, default=4, help="of step 2, a rank")
    parser.add_argument("--threads", type=int, default=2, help="of the Loader, a rank")
    parser.add_argument("--folder", type=Path, help="on the storage that is meant; default: here")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="of step 5")
    parser.add_argument("--minutes", type=float, default=1.5, help="of diagnose; 0: without")
    args = parser.parse_args()
    where = (args.folder or Path.cwd()).resolve()
    with tempfile.TemporaryDirectory(dir=where) as name, staging(args.memory.resolve()) as stage:
        case = Case(Path(name), Path(stage), args)
        prepared = case.prepared()
        console.print(f"prepared: {prepared}", highlight=False)
        told = case.asked() if args.minutes else {}
        found = case.measured()
    args.folder, args.memory = str(args.folder or ""), str(args.memory)
    report(args, found, prepared, told)


def staging(memory: Path) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(dir=memory, prefix="paceline-patches-")


class Case:
    def __init__(self, folder: Path, stage: Path, args: argparse.Namespace) -> None:
        self.folder, self.stage, self.args = folder, stage, args
        self.sets = {name: folder / name for name in ("files", "packed", "upsampled")}

    def output_of(self, *words: object, cwd: Path = EXAMPLES, **environment: object) -> str:
        """Return what a command prints; exit if it fails."""
        command = [str(BIN / "paceline"), *map(str, words)]
        more = {name: str(value) for name, value in environment.items()}
        env = {**os.environ, "PATCHES": str(self.sets["files"]), "PACELINE_PROGRESS": "0", **more}
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}\nexit code of: {' '.join(command)}")
        return done.stdout

    def prepared(self) -> dict[str, float]:
        """The sets are made: seconds and bytes of each step."""
        found, patches = {}, ("--patches", self.args.patches)
        pack = ("pack", "patches:samples")
        ways: dict[str, tuple[object, ...]] = {
            "files": ("run", "-n", 1, "patches.py", "make", self.sets["files"], *patches),
            "packed": (*pack, self.sets["packed"]),
            "upsampled": (*pack, self.sets["upsampled"], "--apply", "patches:upsampled"),
        }
        for name, words in ways.items():
            began = time.monotonic()
            self.output_of(*words)
            found[f"{name}_s"] = round(time.monotonic() - began, 1)
            sizes = [path.stat().st_size for path in files_of(self.sets[name])]
            found |= {f"{name}_files": len(sizes), f"{name}_bytes": sum(sizes)}
        began = time.monotonic()
        self.output_of("stage", self.sets["upsampled"], self.stage)
        found["stage_s"] = round(time.monotonic() - began, 1)
        os.sync()  # pages that are not on the disk yet can't be dropped
        return found

    def asked(self) -> dict[str, Any]:
        """What paceline says of the first step, and of the third."""
        check = ("check", "-n", 2, "--quick", "--json", "--data")
        bands = json.loads(self.output_of(*check, self.sets["files"] / "bands"))
        as_is = json.loads(
            self.output_of(*check, self.sets["packed"], "--transform", "patches:augmented")
        )
        minutes = ("--minutes", self.args.minutes)
        train = ("patches.py", "train", self.sets["files"], "--steps", 100_000)
        found = json.loads(self.output_of("diagnose", "-n", 2, "--json", *minutes, *train))
        causes = [f"{100 * one['share']:.1f} %  {one['sentence']}" for one in found["causes"]]
        gains = [f"{one['knob']}: {gain(one['gain'])}" for one in found["remedies"]]
        for line in (*causes, *gains):
            console.print(f"diagnose: {line}", highlight=False)
        for name, one in (("files", bands), ("packed", as_is)):
            for remedy in one["remedies"]:
                text = f"{remedy['samples_s']:,.0f} samples/s with {remedy['sentence']}"
                console.print(f"check, {name}: {text}", highlight=False)
        found = {name: found[name] for name in ("causes", "remedies", "waterfall", "witnesses")}
        return {"diagnosis": found, "check": {"files": bands, "packed": as_is}}

    def measured(self) -> dict[str, list[dict[str, float]]]:
        """By step, one entry a round."""
        ways = steps(self.args.workers, self.args.threads)
        found: dict[str, list[dict[str, float]]] = {step.name: [] for step in ways}
        for number, turn in enumerate(rounds(ways, self.args.repeats), 1):
            console.print(f"round {number} of {self.args.repeats}", highlight=False)
            for step in turn:
                found[step.name].append(self.trained(step))
        return found

    def trained(self, step: Step) -> dict[str, float]:
        """Shares of all ranks' time, and what was read: of the ranks together."""
        source, record = self.sets[step.folder], self.folder / "record"
        evict_pages(files_of(source))
        shutil.rmtree(record, ignore_errors=True)
        start: tuple[object, ...] = ("run", "-n", 2, "--record", record)
        more = {"PACELINE_STAGE": self.stage} if step.staged else {}
        if step.staged:
            start = (*start, "--stage", source)
        counts = self.folder / "counts"
        words = (counts, "train", source, "--steps", self.args.steps, *step.words)
        printed = self.output_of(*start, SCRIPTS / "data/counted.py", *words, **more)
        figures = json.loads(self.output_of("report", "--json", record))
        ranks = figures["states"]
        shares = {state: sum(one[state] for one in ranks) / len(ranks) for state in ranks[0]}
        reads = [json.loads(Path(f"{counts}{rank}").read_text()) for rank in range(len(ranks))]
        sums = {name: float(sum(one[name] for one in reads)) for name in reads[0]}
        loss = re.search(r"([\d.]+) in the last", printed)
        assert loss is not None, printed
        rate = {
            "samples_s": figures["samples_per_s"],
            "loss": float(loss[1]),
            "wall_s": figures["wall_s"],
        }
        # All but the first step.
        samples = figures["samples"] * self.args.steps / (self.args.steps - 1)
        return {**shares, **rate, **sums, "opened_a_sample": sums["opened"] / samples}


def gain(found: dict[str, float] | None) -> str:
    return "?" if found is None else f"{100 * found['mean']:+.0f} % of the throughput predicted"


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def evict_pages(files: Iterable[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(
    args: argparse.Namespace,
    found: dict[str, list[dict[str, float]]],
    prepared: dict[str, float],
    told: dict[str, Any],
) -> None:
    medians = {
        name: {key: spread([one[key] for one in each]) for key in each[0]}
        for name, each in found.items()
    }
    print("\n".join(table(medians)))
    first, workers, *_, last = found
    seconds = {name: [1 / one["samples_s"] for one in each] for name, each in found.items()}
    losses = {name: [one["loss"] for one in each] for name, each in found.items()}
    ratios = {name: ratio(seconds[first], each) for name, each in seconds.items()}
    waits = [one["input"] for one in found[last]]
    targets = [
        target("5: share of input", INPUT, waits),
        target("5: time a sample, of step 2's", FASTER, ratio(seconds[last], seconds[workers])),
        target("5: loss, of step 1's", LOSS, ratio(losses[last], losses[first])),
    ]
    finish(args, found, medians, ratios, targets, prepared=prepared, told=told)


def table(medians: dict[str, Any]) -> list[str]:
    """Return a table in Markdown, for the docs."""
    lines = [f"| step | {' | '.join(HEADS)} |", "| --- |" + " --- |" * len(HEADS)]
    for name, one in medians.items():
        rate = one["samples_s"]
        cells = [f"{rate['median']:,.0f} ({rate['q1']:,.0f} to {rate['q3']:,.0f})"]
        cells += [f"{100 * one[state]['median']:.1f} %" for state in STATES]
        cells += [f"{one['opened_a_sample']['median']:.3g}"]
        cells += [f"{one['stored']['median'] / 1e6:,.0f}", f"{one['loss']['median']:.4f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    run(main)
