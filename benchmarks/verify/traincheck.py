"""TrainCheck (OSDI 2025) on the battery's cases, with invariants of the right script of each.

TrainCheck is not installed with the project. It needs a virtual environment of its own:

    python3 -m venv /tmp/traincheck-venv
    /tmp/traincheck-venv/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    /tmp/traincheck-venv/bin/pip install traincheck==0.2.0
    python benchmarks/verify/traincheck.py --python /tmp/traincheck-venv/bin/python

On a machine without a GPU, torch has to be a build for CPUs: TrainCheck 0.2.0 reads all attributes
of torch.backends.cuda, and a build with CUDA then raises "Found no NVIDIA driver on your system".

It learns invariants from the trace of a run that is known to be good, and checks traces of other
runs. Each wrong script is checked with invariants of the right script of which it is an edit: the
best reference that there can be, which a user of a wrong script does not have. To see what it
accuses wrongly, a second run of the right script, with another learning rate or batch size, is
checked too. A mistake counts as found if its run breaks an invariant that the second right run does
not break: TrainCheck reports invariants, and names neither a mistake nor a line.

Examined are scripts that need nothing but torch and keep the model and the optimizer in variables
that its instrumentation finds.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cases import HALVES, path_of, planted, strip

sys.path.append(str(Path(__file__).parents[1]))
from common import BENCHMARKS, console, machine, run
from rates import rate

SCRIPT = "train.py"
SHORT = {  # arguments of a short run, and of another right run of each script
    "cnn_ddp": (("--epochs", "2", "--batch-size", "24"), ("--epochs", "2", "--lr", "0.02")),
    "mlp_fsdp": (("--epochs", "2", "--batch", "32"), ("--epochs", "2", "--lr", "1e-3")),
    "regress_resume": (("--epochs", "2", "-b", "20"), ("--epochs", "2", "-b", "16")),
    "own_each": ((), ()),
    "vae_dropout": ((), ()),
    "resnet_ddp": (("--epochs", "2", "--batch-size", "24"), ("--epochs", "2", "--lr", "0.02")),
}
ENVIRONMENT = {  # the same for scripts whose settings are environment variables
    "own_each": ({"NUM_EPOCHS": "2", "BATCH_SIZE": "30"}, {"NUM_EPOCHS": "2", "BATCH_SIZE": "20"}),
    "vae_dropout": ({"EPOCHS": "2", "BATCH_SIZE": "32"}, {"EPOCHS": "2", "BATCH_SIZE": "16"}),
}
COLORS = re.compile(r"\x1b\[\d+m")
# TrainCheck writes lines above it, where Python does not allow it.
FUTURE = re.compile(r"^from __future__ import annotations\n", re.MULTILINE)
MODEL = "model"  # the variable of the model in all of them


class PeerError(RuntimeError):
    """A command of TrainCheck failed."""


@dataclass
class Outcome:
    """What TrainCheck said of a script.

    Attributes:
        name: "KIND/WAY", or the name of a right script.
        kind: Id of the planted mistake; "" for a right script.
        checked: Number of invariants.
        broken: Descriptions of the invariants that the run broke.
        new: How many of them the second right run does not break.
        collect_s: Seconds to run the instrumented script.
        check_s: Seconds to check its trace.
        mib: Size of the trace.
        error: Why there is no answer.
    """

    name: str
    kind: str = ""
    checked: int = 0
    broken: list[str] = field(default_factory=list)
    new: int = 0
    collect_s: float = 0.0
    check_s: float = 0.0
    mib: float = 0.0
    error: str = ""


def call(command: list[str], folder: Path, limit_s: float, **environment: str) -> str:
    """Run a command in a folder; return its output.

    Raises:
        PeerError: It failed, or took longer than ``limit_s`` seconds.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as raised:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if isinstance(raised, subprocess.TimeoutExpired):
            raise PeerError(f"{Path(command[0]).name}: more than {limit_s:.0f} s") from None
        raise
    if process.returncode:
        raised = [line for line in output.splitlines() if re.search(r"\w(Error|Exception): ", line)]
        why = raised[0] if raised else output[-700:]  # the first one is the cause of the others
        why = COLORS.sub("", why)
        raise PeerError(f"{Path(command[0]).name}: exit code {process.returncode}: {why[-700:]}")
    return output


class Peer:
    """TrainCheck in its environment, with a folder for traces."""

    def __init__(self, python: Path, folder: Path, style: str, limit_s: float) -> None:
        self.bin, self.folder, self.style, self.limit_s = python.parent, folder, style, limit_s

    def collect(
        self, name: str, text: str, base: str, second: bool, invariants: Path | None
    ) -> tuple[Path, float]:
        """Run an instrumented script on two ranks; return its trace's folder and the seconds."""
        work = self.folder / name
        work.mkdir(parents=True)
        (work / SCRIPT).write_text(FUTURE.sub("", text))
        words = " ".join(SHORT[base][second])
        start = f"{self.bin}/torchrun --standalone --nproc-per-node 2 {SCRIPT} {words}"
        (work / "run.sh").write_text(f"cd {work}\n{start}\n")
        command = [f"{self.bin}/traincheck-collect", "--pyscript", SCRIPT, "--shscript", "run.sh"]
        command += ["--models-to-track", MODEL, "--model-tracker-style", self.style]
        command += ["--output-dir", f"{work}/trace"]
        if invariants:
            command += ["--invariants", str(invariants)]
        begin = time.monotonic()
        settings = ENVIRONMENT.get(base, ({}, {}))[second]
        call(command, work, self.limit_s, **settings)
        return work / "trace", time.monotonic() - begin

    def infer(self, trace: Path) -> tuple[Path, float]:
        """Learn invariants from a trace; return their file and the seconds."""
        found, begin = trace.parent / "invariants.json", time.monotonic()
        words = [f"{self.bin}/traincheck-infer", "-f", str(trace), "-o", str(found)]
        call(words, trace.parent, self.limit_s)
        if not found.exists() or not found.stat().st_size:
            raise PeerError("traincheck-infer: no invariants")
        return found, time.monotonic() - begin

    def check(self, trace: Path, invariants: Path, outcome: Outcome) -> None:
        """Check a trace, and fill in which invariants it breaks."""
        begin, results = time.monotonic(), trace.parent / "results"
        words = [f"{self.bin}/traincheck-check", "-f", str(trace), "-i", str(invariants)]
        words += ["-o", str(results), "--no-html-report"]
        output = call(words, trace.parent, self.limit_s)
        outcome.check_s = round(time.monotonic() - begin, 1)
        outcome.checked = int(output.rpartition(" invariants checked")[0].rsplit(None, 1)[-1])
        failed = (results / trace.name / "failed.log").read_text()
        outcome.broken = [describe(one["invariant"]) for one in objects(failed)]

    def examine(
        self, outcome: Outcome, text: str, base: str, second: bool, invariants: Path
    ) -> None:
        """Run and check a script."""
        try:
            name = outcome.name.replace("/", "-") + "-again" * second
            trace, seconds = self.collect(name, text, base, second, invariants)
            outcome.collect_s, outcome.mib = round(seconds, 1), mib(trace)
            self.check(trace, invariants, outcome)
        except PeerError as failed:
            outcome.error = str(failed)


def learn(peer: Peer, base: str, text: str) -> tuple[dict[str, Any], Path | None]:
    """Learn the invariants of a right script; return the costs, or the error, and their file."""
    try:
        trace, collect_s = peer.collect(base, text, base, False, None)
        invariants, infer_s = peer.infer(trace)
    except PeerError as failed:
        return {"error": str(failed)}, None
    costs = {"collect_s": round(collect_s, 1), "infer_s": round(infer_s, 1), "mib": mib(trace)}
    return costs, invariants


def objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects that follow each other in a text."""
    found, decoder, at = [], json.JSONDecoder(), 0
    while (start := text.find("{", at)) >= 0:
        one, at = decoder.raw_decode(text, start)
        found.append(one)
    return found


def describe(invariant: dict[str, Any]) -> str:
    """Return an invariant as text that is equal for equal invariants."""
    kept = {key: invariant.get(key) for key in ("relation", "params", "precondition")}
    return json.dumps(kept, sort_keys=True)


def mib(folder: Path) -> float:
    return round(
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20, 1
    )


def figures(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the rates; scripts without an answer count as not found."""
    wrong = [one for one in outcomes if one.kind]
    right = [one for one in outcomes if not one.kind]
    answered = [one for one in right if not one.error]
    return {
        "found": rate([one.new > 0 for one in wrong]),
        "accused_right": rate([bool(one.broken) for one in answered]),
        "no_answer": rate([bool(one.error) for one in outcomes]),
        "kinds": {
            kind: rate([one.new > 0 for one in wrong if one.kind == kind])
            for kind in sorted({one.kind for one in wrong})
        },
    }


def write(
    args: argparse.Namespace,
    facts: dict[str, Any],
    references: dict[str, dict[str, Any]],
    outcomes: list[Outcome],
) -> None:
    """Write the results; called after each case."""
    cases = [asdict(one) for one in outcomes]
    for case in cases:
        case["broken"] = len(case["broken"])
    whole = {
        "benchmark": "traincheck",
        "machine": facts,
        "settings": {k: str(v) for k, v in vars(args).items() if k not in ("json", "python")},
        "figures": figures(outcomes),
        "references": references,
        "cases": cases,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(whole, indent=1) + "\n")


def line_of(one: Outcome) -> str:
    if one.error:
        return f"--   {one.name}: {one.error[-300:]}"
    sign = ("ok" if one.new else "no") if one.kind else ("no" if one.broken else "ok")
    return (
        f"{sign:4} {one.name}: {len(one.broken)} of {one.checked} invariants broken, {one.new} of "
        f"them not by a right run [{one.collect_s:.0f} s run, {one.check_s:.0f} s check, "
        f"{one.mib:.0f} MiB]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, required=True, help="of TrainCheck's environment")
    parser.add_argument("--half", choices=list(HALVES), default="open")
    parser.add_argument("--scripts", help="only cases of these right scripts, with commas")
    parser.add_argument("--cases", type=int, default=1000, help="of each script, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--style", choices=["sampler", "proxy", "subclass"], default="sampler")
    parser.add_argument("--limit", type=float, default=300, help="seconds of each command")
    parser.add_argument("--json", type=Path, help="default: benchmarks/out/traincheck-HALF.json")
    args = parser.parse_args()
    args.json = args.json or BENCHMARKS / "out" / f"traincheck-{args.half}.json"
    wanted = args.scripts.split(",") if args.scripts else list(SHORT)
    cases = [one for one in planted(args.half) if one.script in wanted and one.ranks == 2]
    facts, outcomes, references = machine(), [], {}
    with tempfile.TemporaryDirectory(prefix="traincheck-") as temporary:
        peer = Peer(args.python, Path(temporary), args.style, args.limit)
        for base in sorted({one.script for one in cases}):
            text, of_base = path_of(base).read_text(), [c for c in cases if c.script == base]
            references[base], invariants = learn(peer, base, text)
            right = Outcome(base)
            todo = [(right, text)]
            drawn = random.Random(args.seed).sample(of_base, min(args.cases, len(of_base)))
            todo += [(Outcome(c.name, c.kind), strip(c.text()).text) for c in drawn]
            for one, source in todo:
                if invariants is None:
                    one.error = "no reference: " + references[base]["error"]
                else:
                    peer.examine(one, source, base, one is right, invariants)
                one.new = len(set(one.broken) - set(right.broken)) if one.kind else 0
                outcomes.append(one)
                console.print(line_of(one), markup=False, highlight=False, soft_wrap=True)
                write(args, facts, references, outcomes)
    console.print(json.dumps(figures(outcomes), indent=1))


if __name__ == "__main__":
    run(main)
