"""Run a script, note when each of its optimizer steps ends, and end after some of them:

    paceline run -n 2 clock.py --out FOLDER --steps 60 SCRIPT [ARGUMENTS]

Independent of Paceline's recorder. With ``--watch FILE``, the first rank samples its stack, and
notes the lines of the script from which code of FILE, or the lines given with it, is called.
"""

import argparse
import json
import os
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

PEER_TIMEOUT_S = 20.0  # at the end, ranks wait for each other, so that none loses its connection
SAMPLE_INTERVAL_S = 0.003
NOTICE = 10  # steps between the decision to end early, and the end: every rank has seen it by then


def run_delay() -> float:
    """Return for how many seconds this thread could have run, and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class StepClock:
    """Notes the end of each step of the script's first optimizer.

    Attributes:
        steps: Steps until the end; the first rank may reduce them after ``seconds``.
        peer: Whether the script ends with an exception, so that the process goes on.
    """

    def __init__(self, folder: Path, steps: int, seconds: float, peer: bool) -> None:
        self.folder, self.steps, self.peer = folder, steps, peer
        self.seconds, self.decision = seconds, folder / "last-step"
        self.rank, self.ranks = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", 1))
        self.pid, self.optimizer = os.getpid(), None
        self.ends: list[float] = []
        self.delays: list[float] = []  # s without a core so far, of the training thread
        self.watcher: Watcher | None = None

    def after_step(self, optimizer: object, *_: object) -> None:
        if os.getpid() != self.pid:
            return
        self.optimizer = self.optimizer or id(optimizer)
        if id(optimizer) != self.optimizer:
            return
        self.ends.append(time.monotonic())
        self.delays.append(run_delay())
        if self.decision.exists():
            self.steps = int(self.decision.read_text())
        elif self.rank == "0" and self.ends[-1] - self.ends[0] > self.seconds:
            part = self.decision.with_suffix(".part")
            part.write_text(f"{min(self.steps, len(self.ends) + NOTICE)}")
            part.replace(self.decision)
        if len(self.ends) > self.steps:
            self.finish()

    def finish(self) -> None:
        """Write the times and end this process, or only the script if a peer is to go on."""
        called = self.watcher.found() if self.watcher else []
        found = {"ends": self.ends, "delays": self.delays, "called": called}
        part = self.folder / f"{self.rank}.part"
        part.write_text(json.dumps(found))
        part.replace(self.folder / f"{self.rank}.json")
        end = time.monotonic() + PEER_TIMEOUT_S
        while time.monotonic() < end and len(list(self.folder.glob("*.json"))) < self.ranks:
            time.sleep(0.01)
        if self.peer:
            raise SystemExit(0)
        sys.stdout.flush()
        os._exit(0)


class Watcher(threading.Thread):
    """Samples the stacks of this process: which lines of the script call the watched code?

    Args:
        script: Path of the script.
        watched: Path of a file whose lines are all watched, or of the script, with a range of lines
            (``train.py:20-24``).
    """

    def __init__(self, script: str, watched: list[str]) -> None:
        super().__init__(daemon=True)
        self.script, self.calls = script, Counter()
        self.ranges = []
        for one in watched:
            path, _, lines = one.partition(":")
            first, _, last = lines.partition("-")
            self.ranges.append((path, int(first or 0), int(last or 1_000_000)))

    def run(self) -> None:
        while True:
            time.sleep(SAMPLE_INTERVAL_S)
            for frame in sys._current_frames().values():
                self.note(frame)

    def note(self, frame: types.FrameType | None) -> None:
        inside = False
        while frame is not None:
            path, line = frame.f_code.co_filename, frame.f_lineno
            if any(path == file and a <= line <= b for file, a, b in self.ranges):
                inside = True
            elif inside and path == self.script:
                self.calls[line] += 1
                return
            frame = frame.f_back

    def found(self) -> list[tuple[int, int]]:
        return self.calls.most_common(6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="after these, end early")
    parser.add_argument("--peer", action="store_true", help="end the script, not the process")
    parser.add_argument("--watch", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    script = str(Path(args.command[0]).resolve())
    clock = StepClock(args.out, args.steps, args.seconds, args.peer)
    register_optimizer_step_post_hook(clock.after_step)
    if args.watch and clock.rank == "0":
        clock.watcher = Watcher(script, args.watch)
        clock.watcher.start()
    sys.argv = [script, *args.command[1:]]
    sys.path[0] = str(Path(script).parent)
    main_module = types.ModuleType("__main__")
    main_module.__file__ = script
    sys.modules["__main__"] = main_module
    exec(compile(Path(script).read_text(), script, "exec"), main_module.__dict__)


if __name__ == "__main__":
    main()
