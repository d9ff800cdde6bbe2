"""Claim: the guard of `paceline run --reference` is silent in healthy runs, and tells of a fault
that sets in midway within 5 % of an epoch (median).

References: three runs on one rank for each of two models. Healthy runs and runs with a fault train
on two ranks, with other seeds. Neither their models nor their seeds were used to set the guard's
constants (those were digits and teacher of scripts/verify/guarded.py).

All runs train in two processes, one after the other, and write what the ranks send to the launcher
(scripts/verify/guarded_series.py); the launcher's code takes it. Some runs are repeated with
`paceline run -n 2 --reference`, to check that it says the same.
"""

import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, new_table, options, run, spread

from paceline.launch.guard.loss_guard import LossGuard
from paceline.launch.guard.request import GuardRequest
from paceline.launch.monitor.rank_messages import message_of

SCRIPT = SCRIPTS / "verify/guarded.py"
TASKS = ("text", "waves")  # kept out: the constants were set with digits and teacher
KINDS = ("rate", "replicas", "order", "labels")
STEPS_PER_EPOCH = 300
LIMIT = 0.05  # of an epoch
REFERENCE_SEEDS = (0, 1, 2)
Case = dict[str, Any]


def main() -> None:
    parser = options("guard", __doc__ or "", repeats=1)
    parser.add_argument("--healthy", type=int, default=20, help="healthy runs")
    parser.add_argument("--faults", type=int, default=20, help="runs with a fault")
    parser.add_argument("--real", type=int, default=4, help="runs repeated with paceline run")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="of all ranks")
    parser.add_argument("--work", type=Path, help="folder for the runs, kept; default: temporary")
    args = parser.parse_args()
    kept = args.__dict__.pop("work")  # not a setting of the measurement
    with tempfile.TemporaryDirectory() as temporary:
        work = kept or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        references = make_references(args, work)
        cases = draw_cases(args)
        train(work / "runs", 2, [case["words"] for case in cases])
        for number, case in enumerate(cases):
            case |= replay(work / "runs", number, references[case["task"]])
        real = [run_really(case, references[case["task"]]) for case in choose(cases, args.real)]
    report(args, cases, real)


def words_of(args: Any, task: str, seed: int, *more: str) -> list[str]:
    sizes = ["--epochs", str(args.epochs), "--batch", str(args.batch)]
    return ["--task", task, "--seed", str(seed), *sizes, *more]


def draw_cases(args: Any) -> list[Case]:
    """Return the healthy runs, and those with a fault between 35 and 70 % of the training."""
    draw, cases = random.Random(43), []
    total = STEPS_PER_EPOCH * 32 // args.batch * args.epochs
    for number in range(args.healthy):
        task = args.tasks[number % len(args.tasks)]
        cases.append({"task": task, "fault": "none", "words": words_of(args, task, 100 + number)})
    for number in range(args.faults):
        task = args.tasks[number // len(KINDS) % len(args.tasks)]
        kind, at = KINDS[number % len(KINDS)], draw.randint(int(0.35 * total), int(0.7 * total))
        words = words_of(args, task, 200 + number, "--fault", kind, "--at", str(at))
        cases.append({"task": task, "fault": kind, "at": at, "words": words})
    return cases


def train(folder: Path, ranks: int, cases: list[list[str]]) -> None:
    """Train the cases that ``folder`` does not have yet."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = SCRIPTS / "verify/guarded_series.py"
    command = [sys.executable, str(script), str(folder), str(ranks), str(file)]
    subprocess.run(command, check=True, env={**os.environ, "GUARDED_PORT": str(port)})


def make_references(args: Any, work: Path) -> dict[str, list[str]]:
    """Train the references; return the files of each task."""
    pairs = [(task, seed) for task in args.tasks for seed in REFERENCE_SEEDS]
    train(work / "references", 1, [words_of(args, task, seed) for task, seed in pairs])
    found: dict[str, list[str]] = {task: [] for task in args.tasks}
    for number, (task, seed) in enumerate(pairs):
        file = work / f"reference-{task}-{seed}.json"
        guard = LossGuard(GuardRequest([], "backward", save=str(file)), 1, [str(SCRIPT)])
        feed(guard, work / "references", number, 1, lambda step: None)
        guard.finish(lambda text: None)
        found[task].append(str(file))
    return found


def feed(guard: LossGuard, folder: Path, number: int, ranks: int, after: Any) -> None:
    """Give the guard the messages of a run, and call ``after(step)`` after each."""
    streams = [
        (folder / f"{number}-{rank}.jsonl").read_bytes().splitlines() for rank in range(ranks)
    ]
    for lines in zip(*streams, strict=False):
        for rank, line in enumerate(lines):
            message = message_of(line)
            rows = message.get("steps", [])
            for row in rows or [None]:  # one by one, as if each step were sent at once
                guard.take_message(rank, {**message, "steps": [row]} if row else message)
                after(row[0] if row else 0)
    for rank, stream in enumerate(streams):
        for line in stream[min(map(len, streams)) :]:
            guard.take_message(rank, message_of(line))


def replay(folder: Path, number: int, references: list[str]) -> Case:
    """Return at which step the guard tells of the run, and what."""
    guard = LossGuard(GuardRequest(references), 2, [str(SCRIPT)])
    said: list[str] = []
    found: list[int] = []

    def after(step: int) -> None:
        if guard.check(said.append) == "diverged":
            found.append(step)

    feed(guard, folder, number, 2, after)
    if guard.finish(said.append) == "diverged":
        found.append(-1)
    assert not guard.mistake, guard.mistake
    told = "".join(said)
    rise = re.search(r"the learning rate rose .* at step (\d+)", told)
    by_loss = found[0] if found else None
    places = [place for place in (by_loss, int(rise[1]) if rise else None) if place is not None]
    return {
        "told_at": min(places) if places else None,
        "by": "learning rate"
        if rise and places and min(places) == int(rise[1])
        else "parameters"
        if "the parameters of" in told.partition("There")[0]
        else "loss",
        "left_band_at": by_loss,
        "said": told.strip(),
    }


def run_really(case: Case, references: list[str]) -> Case:
    """Repeat a case with ``paceline run``; return what it says."""
    options = [text for file in references for text in ("--reference", file)]
    command = [str(BIN / "paceline"), "run", "-n", "2", *options, str(SCRIPT), *case["words"]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [x for x in done.stderr.splitlines() if x.startswith(("paceline: guard", "  There"))]
    said = "\n".join(lines[1:])
    found = re.search(r"certain at step (\d+)|since step (\d+)", said)
    return {"words": case["words"], "said": said, "step": found and int(found[1] or found[2])}


def choose(cases: list[Case], count: int) -> list[Case]:
    """Return healthy cases and cases with each fault, in turn."""
    by_kind = [[c for c in cases if c["fault"] == kind] for kind in (*KINDS, "none")]
    turns = [kind[i] for i in range(len(cases)) for kind in by_kind if i < len(kind)]
    return turns[:count]


def report(args: Any, cases: list[Case], real: list[Case]) -> None:
    headings = ("model", "fault", "sets in at step", "told after", "of an epoch")
    table = new_table(*headings, title="Runs with a fault: steps until it was told")
    epoch = STEPS_PER_EPOCH * 32 / args.batch
    healthy = [case for case in cases if case["fault"] == "none"]
    faults = [case for case in cases if case["fault"] != "none"]
    for case in faults:
        told = case["told_at"]
        case["is_early"] = told is not None and 0 <= told <= case["at"]
        case["delay"] = None if told is None or case["is_early"] else told - case["at"]
        delay = case["delay"]
        share = "" if delay is None else f"{100 * delay / epoch:.1f} %"
        shown = "never" if told is None else "before" if case["is_early"] else str(delay)
        table.add_row(case["task"], case["fault"], str(case["at"]), shown, share)
    console.print(table)
    alarms = [case for case in healthy if case["told_at"] is not None]
    early = [case for case in faults if case["is_early"]]
    missed = float(args.epochs)  # a fault that is never told counts as the whole training
    shares = [missed if c["delay"] is None else c["delay"] / epoch for c in faults]
    console.print(f"healthy runs: {len(alarms)} of {len(healthy)} with an alarm")
    for case in alarms + early:
        console.print(f"  {' '.join(case['words'])}: {case['said']}", markup=False)
    kinds = {
        kind: spread([s for s, c in zip(shares, faults, strict=True) if c["fault"] == kind])
        for kind in KINDS
        if any(case["fault"] == kind for case in faults)
    }
    by_loss = [
        missed if c["left_band_at"] is None else (c["left_band_at"] - c["at"]) / epoch
        for c in faults
    ]
    figures = {"shares": shares, **spread(shares)} if shares else {}
    false = len(alarms) + len(early)
    targets = [
        {
            "claim": f"no alarm in {len(healthy)} healthy runs, and none before a fault",
            "limit": 0,
            "value": false,
            "interval": [false, false],
            "met": false == 0,
            "decided": True,
        },
        {
            "claim": f"{len(faults)} faults told within {LIMIT} of an epoch, median",
            "limit": LIMIT,
            "value": figures.get("median", 0.0),
            "interval": [figures.get("q1", 0.0), figures.get("q3", 0.0)],
            "met": figures.get("median", 0.0) <= LIMIT,
            "decided": len(faults) >= 6,
        },
    ]
    finish(
        args,
        cases,
        {
            "of_an_epoch": figures,
            "by_fault": kinds,
            "loss_or_parameters_alone": spread(by_loss) if by_loss else {},
            "missed": sum(case["told_at"] is None for case in faults),
        },
        {},
        targets,
        real_runs=real,
    )


if __name__ == "__main__":
    run(main)
