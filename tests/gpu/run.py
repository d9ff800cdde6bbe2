"""Run the GPU tests and measurements within a time limit: ``make gpu``.

Each group of tests is a pytest process of its own, because a hung kernel cannot be interrupted: a
test that takes longer than its limit is killed with all its processes, and the group goes on with
the next test. Groups of tests run a few at a time, measurements afterwards and alone. Results are
written to ``results.jsonl`` as they come, one JSON object a line: group, name, outcome, seconds,
reason. Measurements write one JSON file each, as the benchmarks do.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
START_S = 45.0  # limit of a group's start, before its first test
CPU_PATIENCE = 8  # a rehearsal on few cores takes longer
GRACE_S = 3.0  # between SIGTERM and SIGKILL
TAIL = 1500  # characters of output that belong to a killed test


@dataclass(frozen=True)
class Group:
    """A pytest process, or one measurement.

    Attributes:
        name: Of ``test_gpu_NAME.py``, or of ``benchmarks/gpu/NAME.py``; a number may follow.
        what: What it runs.
        seconds: Its limit.
        words: Parts of the names of its tests; without them all tests of the file.
    """

    name: str
    what: str
    seconds: float
    words: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"test_gpu_{self.name.partition(' ')[0]}.py"

    def has(self, test: str) -> bool:
        """Return whether a test, by its id, belongs to this group."""
        file, _, name = test.partition("::")
        return Path(file).name == self.file and (
            not self.words or any(word in name for word in self.words)
        )


COMMANDS = ("check", "roof", "spread", "bench"), ("verify", "guard")
DIAGNOSED = ("input_stall", "nothing"), ("synchronization", "copy", "remedy"), ("slow_kernel",)
# The most valuable first.
TESTS = (
    Group("training", "precision, loss scaling, equality with the CPU, non-finite values", 240),
    Group("layouts", "NCCL, DDP, FSDP2 on a mesh of one", 240),
    Group("axes", "tensor, pipeline and spatial layouts: ranks as threads on one GPU", 240),
    Group("commands 1", "check, roofline, bench comm", 240, COMMANDS[0]),
    Group("commands 2", "verify, guard of the loss", 240, COMMANDS[1]),
    Group("diagnose 1", "paceline diagnose of planted faults", 240, DIAGNOSED[0]),
    Group("diagnose 2", "paceline diagnose of planted faults", 240, DIAGNOSED[1]),
    Group("diagnose 3", "paceline diagnose of a planted kernel", 240, DIAGNOSED[2]),
    Group("ranks", "ranks that share a GPU, binding, visible devices", 240),
    Group("records", "kernels of sampled steps, states, losses, planted faults", 240),
    Group("hangs", "hangs, failures and interrupts beside a busy GPU", 240),
    Group("streams", "loader, pinned memory, copies beside kernels, CUDA graphs", 240),
    Group("memory", "recomputation, activations on the host, offload, memory prediction", 240),
    Group("knobs", "knobs that a settings file sets", 240),
    Group("checkpoints", "resuming on another device, after a kill, and export", 240),
)
MEASUREMENTS = (
    Group("gpu_recording_cost", "cost of recording: eager, CUDA graphs, torch.compile", 75),
    Group("gpu_layout_memory", "predicted and measured memory of five models, four layouts", 40),
    Group("gpu_roofline", "roofline of paceline check against the data sheet", 35),
    Group("gpu_recomputation", "recompute='auto' and offload: time and memory", 40),
    Group("gpu_loaders", "batches to the GPU: Loader and DataLoader", 35),
)


@dataclass
class Running:
    """A process of a group."""

    group: Group
    process: subprocess.Popen[bytes]
    output: Any
    began: float
    restarts: int
    current: Path
    last: tuple[str, float] = ("", 0.0)
    spent: float = 0.0
    log: Path = field(default_factory=Path)


class Results:
    """The file of results, to which each pytest process also appends (conftest.py)."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0
        path.write_text("")

    def add(self, group: str, name: str, outcome: str, seconds: float, reason: str = "") -> None:
        line = {"group": group, "name": name, "outcome": outcome, "seconds": round(seconds, 2)}
        with self.path.open("a") as file:
            file.write(json.dumps({**line, "reason": reason}) + "\n")

    def new(self) -> list[dict[str, Any]]:
        """Return the lines that were not returned before."""
        with self.path.open() as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole.encode())
        return [json.loads(line) for line in whole.splitlines()]

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class Suite:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.patience = CPU_PATIENCE if args.device == "cpu" else 1
        self.began = time.monotonic()
        args.results.mkdir(parents=True, exist_ok=True)
        self.results = Results(args.results / "results.jsonl")
        self.scratch = Path(tempfile.mkdtemp(prefix="paceline-gpu-"))
        self.output = (args.results / "output.txt").open("wb")

    def left(self) -> float:
        return self.args.limit * self.patience - (time.monotonic() - self.began)

    def run(self) -> int:
        """Run everything; return the exit code."""
        try:
            chosen = set(self.args.only)
            tests = [g for g in TESTS if not chosen or {g.name, g.name.split()[0]} & chosen]
            measured = [g for g in MEASUREMENTS if not chosen or g.name in chosen]
            if self.args.skip_measurements:
                measured = []
            reserved = min(sum(g.seconds for g in measured), 0.45 * self.args.limit)
            self._tests(tests, reserved)
            for number, group in enumerate(measured):
                rest = sum(each.seconds for each in measured[number:])
                self._measure(group, self.left() * group.seconds / rest)
        finally:
            self._print_new()
            code = self._summary()
            self.output.close()
            shutil.rmtree(self.scratch, ignore_errors=True)
        return code

    # tests

    def _tests(self, groups: list[Group], reserved: float) -> None:
        waiting, running = list(groups), []
        while waiting or running:
            if self.left() < 5:
                for one in running:
                    self._end(one, "the time of the whole run is over")
                for group in waiting:
                    self.results.add(group.name, group.name, "not run", 0, "no time left")
                return
            while waiting and len(running) < self.args.parallel:
                running.append(self._start(waiting.pop(0), time.monotonic(), 0))
            time.sleep(0.1)
            self._print_new()
            running = [one for each in running for one in self._watch(each, reserved)]

    def _start(self, group: Group, began: float, restarts: int) -> Running:
        current, log = self.scratch / f"{group.name}.current", self.scratch / f"{group.name}.log"
        current.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "GPU_TESTS_DEVICE": self.args.device,
            "GPU_TESTS_GROUP": group.name,
            "GPU_TESTS_RESULTS": str(self.results.path.resolve()),
            "GPU_TESTS_CURRENT": str(current),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "2",
            "PACELINE_TESTS_WARM": "0",
            "TMPDIR": str(self.scratch),
        }
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"),
            *("--basetemp", str(self.scratch / f"{group.name.replace(' ', '')}-{restarts}")),
            str(HERE / group.file),
        ]
        words = [f"({' or '.join(group.words)})"] if group.words else []
        words += [f"({self.args.keyword})"] if self.args.keyword else []
        if words:
            command += ["-k", " and ".join(words)]
        output = log.open("ab")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return Running(group, process, output, began, restarts, current, log=log)

    def _watch(self, one: Running, reserved: float) -> list[Running]:
        """Return what runs of this group from now on."""
        name, since, limit = self._current(one)
        code = one.process.poll()
        now = time.monotonic()
        spent = now - one.began
        is_over = spent > one.group.seconds * self.patience or self.left() < reserved
        if code is None and not is_over and now - since < limit:
            return [] if False else [one]
        if code is None:
            why = "the time of its group is over" if is_over else f"no end after {limit:.0f} s"
            self._end(one, why)
            if is_over:
                return []
        else:
            self._close(one)
            if code in (0, 1, 5):  # all passed, some failed, nothing collected
                return []
            self.results.add(
                *(one.group.name, name or one.group.name, "crashed", now - since),
                f"exit code {code}: {self._tail(one)}",
            ) if code != 70 else None
        if one.restarts >= 6 or not name:
            return []
        return [self._start(one.group, one.began, one.restarts + 1)]

    def _current(self, one: Running) -> tuple[str, float, float]:
        """Return the present test, when it began, and its limit in seconds."""
        try:
            name, limit = one.current.read_text().rsplit(" ", 1)
        except (OSError, ValueError):
            name, limit = "", str(START_S)
        if name != one.last[0] or not one.last[1]:
            one.last = (name, time.monotonic())
        return name, one.last[1], float(limit) * self.patience

    def _end(self, one: Running, why: str) -> None:
        name, since, _ = self._current(one)
        kill_family(one.process)
        self._close(one)
        taken = time.monotonic() - since
        reason = f"{why}: {self._tail(one)}"
        self.results.add(one.group.name, name or one.group.name, "timeout", taken, reason)

    def _close(self, one: Running) -> None:
        kill_family(one.process)  # also what a test has left running
        one.output.close()
        self.output.write(f"\n===== {one.group.name}\n".encode() + one.log.read_bytes())
        self.output.flush()
        one.log.unlink()

    def _tail(self, one: Running) -> str:
        self.output.flush()
        text = (self.args.results / "output.txt").read_bytes()[-TAIL:]
        return text.decode(errors="replace")

    # measurements

    def _measure(self, group: Group, share: float) -> None:
        """Run a measurement for its share of the time that is left."""
        limit = min(group.seconds * self.patience, share, self.left() - 3)
        if limit < 10:
            self.results.add(group.name, group.name, "not run", 0, "no time left")
            return
        out = self.args.results / f"{group.name}.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, str(ROOT / f"benchmarks/gpu/{group.name}.py")]
        command += ["--device", self.args.device, "--json", str(out.resolve())]
        command += ["--seconds", f"{max(limit - 15, limit / 2):.1f}"]
        if self.args.device == "cpu":
            command.append("--quick")
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(self.scratch), "COLUMNS": "110"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=limit)
            outcome = "measured" if process.returncode == 0 and out.exists() else "failed"
        except subprocess.TimeoutExpired:
            kill_family(process)
            text, _ = process.communicate()
            outcome = "timeout"
        kill_family(process)
        self.output.write(f"\n===== {group.name}\n".encode() + text)
        said = text.decode(errors="replace")
        reason = "" if outcome == "measured" else said[-TAIL:]
        self.results.add(group.name, group.name, outcome, time.monotonic() - began, reason)
        self._print_new()
        if outcome == "measured":
            print(said[-1600:], flush=True)

    # output

    def _print_new(self) -> None:
        for line in self.results.new():
            bad = line["outcome"] not in ("passed", "skipped", "measured")
            reason = f"  {line['reason'][-300:]!r}" if bad else ""
            if bad or self.args.verbose:
                name = f"{line['group']} {line['name'].partition('::')[2] or line['name']}"
                print(f"{line['outcome']:8} {line['seconds']:6.1f} s  {name}{reason}", flush=True)

    def _summary(self) -> int:
        lines = self.results.all()
        counts = Counter(line["outcome"] for line in lines)
        parts = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        print(f"\n{parts or 'nothing ran'}; {time.monotonic() - self.began:.0f} s in total")
        by_group = {}
        for line in lines:
            by_group.setdefault(line["group"], []).append(line)
        for name, found in by_group.items():
            good = sum(line["outcome"] in ("passed", "measured") for line in found)
            skipped = sum(line["outcome"] == "skipped" for line in found)
            seconds = sum(line["seconds"] for line in found)
            print(
                f"  {name:20} {good} of {len(found) - skipped}, {skipped} skipped, {seconds:.0f} s"
            )
        bad = [line for line in lines if line["outcome"] not in ("passed", "skipped", "measured")]
        for line in bad:
            print(f"  {line['outcome'].upper()}: {line['name']}")
        print(f"results: {self.results.path}")
        return 1 if bad or not lines else 0


def kill_family(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, its group and all its descendants, which may have sessions of their own."""
    found = [process.pid] if process.poll() is None else []
    found = [pid for one in found for pid in family(one)]
    for number, wait in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 0.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            if process.poll() is not None:
                break
        try:
            process.wait(wait or 10)
        except subprocess.TimeoutExpired:
            continue
    for pid in found[1:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def show_plan() -> None:
    """Print what would run, and its time limits."""
    tests = collected_tests()
    print("make gpu needs a GPU, and PyTorch finds none here. On a GPU it runs:")
    print(f"  {'group':20} {'tests':>5}  limit  what")
    for group in TESTS:
        number = sum(map(group.has, tests))
        print(f"  {group.name:20} {number:>5}  {group.seconds:3.0f} s  {group.what}")
    for group in MEASUREMENTS:
        print(f"  {group.name:20} {'':>5}  {group.seconds:3.0f} s  measurement: {group.what}")
    print(f"{len(tests)} tests. Groups of tests run twelve at a time, measurements alone;")
    print("together at most 8 minutes.")
    print("HINT: make gpu DEVICE=cpu rehearses on the CPU what has a meaning there.")


def collected_tests() -> list[str]:
    """Return the ids of all tests."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", str(HERE)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if "::" in line]


def difference_to_checkout() -> str:
    """Return a note if the installed Paceline is not that of this checkout; "" if it is."""
    found = importlib.util.find_spec("paceline")
    if found is None or found.origin is None:
        return "Paceline is not installed. HINT: make gpu, or make gpu OFFLINE=FOLDER"
    installed, source = Path(found.origin).parent, ROOT / "src/paceline"
    for path in source.rglob("*.py"):
        other = installed / path.relative_to(source)
        if not other.exists() or other.read_bytes() != path.read_bytes():
            text = f"note: the installed Paceline differs from this checkout ({path.name})"
            return f"{text}. HINT: tools/offline_wheels.sh"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=ROOT / "run/gpu")
    parser.add_argument("--limit", type=float, default=480, help="seconds in total")
    parser.add_argument("--parallel", type=int, help="groups of tests at a time")
    parser.add_argument("--only", nargs="*", default=[], help="names of groups or measurements")
    parser.add_argument("--keyword", default="", help="pytest's -k")
    parser.add_argument("--skip-measurements", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print the passed tests too")
    args = parser.parse_args()
    args.parallel = args.parallel or (12 if args.device == "cuda" else 1)
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            show_plan()
            return 0
    if note := difference_to_checkout():
        print(note)
    names = {group.name.split()[0] for group in (*TESTS, *MEASUREMENTS)}
    if unknown := set(args.only) - names:
        parser.error(f"unknown: {', '.join(sorted(unknown))}. HINT: {', '.join(sorted(names))}")
    return Suite(args).run()


if __name__ == "__main__":
    sys.exit(main())
