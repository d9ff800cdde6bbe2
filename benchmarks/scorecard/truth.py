"""What a fault takes of a step, as measured: the script with and without it, in alternation.

Other programs on the machine lengthen steps. Therefore only the shortest times count, and the time
in which a rank had no core is left out, except for faults that consist of it.
"""

import json
import os
import statistics
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from build import Built, build
from injectors import Injector

HERE = Path(__file__).parent
PACELINE = Path(sysconfig.get_path("scripts")) / "paceline"
WARM_UP = 8  # steps
# Steps of a run, in blocks that contain whole periods of all faults (4 and 5 steps).
MIN_STEPS, MAX_STEPS, BLOCK = 60, 200, 20
BEST = 0.25  # of the measured times count, the shortest: other programs make the others longer
SECONDS = 2.0  # of a run's steps
MOST_SECONDS = 15.0  # then the run ends, with the blocks that it has
TIMEOUT_S = 120.0
CLOSE = 1.4  # calibrated: the extra time is wrong by less than this factor
MAX_SCALE = 12.0  # of the amount, from one trial to the next


class CaseError(RuntimeError):
    """A run of a case failed."""


@dataclass(frozen=True)
class Truth:
    """The measured fault.

    Attributes:
        base_s: Seconds of a step without the fault.
        share: Share of a step's time that undoing the fault by hand gains, in the shortest steps.
        low: Smallest share in a round.
        high: Largest share in a round.
        lines: Lines that are right, by file name: of injected code, and the script's that call it.
    """

    base_s: float
    share: float
    low: float
    high: float
    lines: dict[str, list[tuple[int, int]]]


@dataclass
class Bench:
    """Runs a script with and without one injector.

    Attributes:
        folder: Folder of the case, with a folder for each of the two.
        steps: Measured steps of a run.
    """

    folder: Path
    script: str
    injector: Injector | None
    steps: int = MIN_STEPS

    def __post_init__(self) -> None:
        for name in ("base", "fault"):
            (self.folder / name).mkdir(exist_ok=True)
        if self.injector and self.injector.files:
            self.injector.files(self.folder / "fault")

    def build(self, amount: float | None) -> Built:
        """Build the script with the fault, or without it if ``amount`` is None."""
        if amount is None:
            return build(self.folder / "base", self.script, None, 0.0)
        return build(self.folder / "fault", self.script, self.injector, amount)

    def run(self, words: list[str], amount: float | None, timeout: float) -> tuple[int, str, str]:
        """Run a command with what the injector puts around it; return exit code and output."""
        injector = self.injector if amount is not None else None
        environment = {**os.environ, **(injector.environment if injector else {})}
        if injector and injector.around:
            around = injector.around(amount, self.folder / "fault")
        else:
            around = nullcontext()
        command = [*(injector.command if injector else ()), *words]
        with around, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                code = -1
            out.seek(0)
            err.seek(0)
            return code, out.read(), err.read()

    def options(self, amount: float | None) -> list[str]:
        own = amount is not None and self.injector is not None and self.injector.own_threads
        return ["-n", "2", *([] if own else ["--threads", "1"])]

    def step_time(self, amount: float | None, called: Counter | None = None) -> float:
        """Run the script and return the seconds of a step."""
        return self.typical(self.blocks(amount, called))

    def typical(self, blocks: list[list[float]]) -> float:
        """Return the seconds of a step: the shortest ones of each place in a block, or blocks."""
        if self.injector is None or self.injector.steady:
            return statistics.fmean(shortest(same) for same in zip(*blocks, strict=False))
        return shortest([statistics.fmean(block) for block in blocks])

    def gain_of(self, options: Sequence[str], rounds: int) -> float:
        """Return the share of a step that options of ``paceline run`` gain without a fault."""
        pairs = [(self.blocks(None), self.blocks(None, options=options)) for _ in range(rounds)]
        plain, changed = (self.typical([x for pair in pairs for x in pair[at]]) for at in (0, 1))
        return 1 - changed / plain

    def blocks(
        self, amount: float | None, called: Counter | None = None, options: Sequence[str] = ()
    ) -> list[list[float]]:
        """Run the script and return the seconds of each step, in blocks.

        With ``called``, the lines of the script that call injected code are counted there.

        Raises:
            CaseError: The script failed.
        """
        built = self.build(amount)
        with tempfile.TemporaryDirectory() as folder:
            words = [str(PACELINE), "run", *self.options(amount), *options, str(HERE / "clock.py")]
            words += ["--out", folder, "--steps", f"{WARM_UP + self.steps}"]
            words += ["--seconds", f"{MOST_SECONDS}"]
            for one in built.watched() if called is not None else []:
                words += ["--watch", one]
            words += [str(built.script), *built.arguments]
            code, _, err = self.run(words, amount, TIMEOUT_S)
            paths = sorted(Path(folder).glob("*.json"))
            if code or not paths:
                raise CaseError(f"exit code {code}: {err[-1500:]}")
            found = [json.loads(path.read_text()) for path in paths]
        if called is not None:
            called.update(dict(found[0]["called"]))
        times = _steps_of(found[0]["ends"])
        if self.injector is None or self.injector.steady:
            delays = zip(*(_steps_of(rank["delays"]) for rank in found), strict=False)
            times = [time - max(each) for time, each in zip(times, delays, strict=False)]
        blocks = [times[at : at + BLOCK] for at in range(0, len(times), BLOCK)]
        return [block for block in blocks if len(block) == BLOCK] or blocks


def _steps_of(readings: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(readings[WARM_UP:])]


def shortest(times: Sequence[float]) -> float:
    """Return the mean of the shortest times."""
    return statistics.fmean(sorted(times)[: max(1, round(BEST * len(times)))])


def measure(bench: Bench, wanted: float, trials: int, rounds: int) -> tuple[float, Truth]:
    """Calibrate the fault to about the wanted share of a step, in trials; measure it in rounds.

    Returns:
        Amount of the injector, and what it takes of a step.
    """
    injector = bench.injector
    base_s = bench.step_time(None)
    amount, called = injector.start, Counter()
    extra_s = base_s * wanted / (1 - wanted)
    for trial in range(1 if injector.fixed else trials):
        if trial:
            base_s = bench.step_time(None)
        found_s = bench.step_time(amount, called) - base_s
        if 1 / CLOSE < found_s / extra_s < CLOSE or injector.fixed:
            break
        scale = extra_s / found_s if found_s > 0.02 * extra_s else MAX_SCALE
        new = amount * min(max(scale, 1 / MAX_SCALE), MAX_SCALE)
        new = min(max(1.0, round(new)) if injector.whole else new, injector.most)
        if new == amount:
            break
        amount = new
    bench.steps = _steps(base_s)
    pairs = [(bench.blocks(None), bench.blocks(amount)) for _ in range(rounds)]
    typical = bench.typical
    shares = sorted(1 - typical(base) / typical(fault) for base, fault in pairs)
    base_s, fault_s = (typical([x for pair in pairs for x in pair[at]]) for at in (0, 1))
    lines = {name: list(ranges) for name, ranges in bench.build(amount).injected.items()}
    calls = [(line, line) for line, count in called.items() if 10 * count > called.total()]
    lines.setdefault("train.py", []).extend(calls)
    return amount, Truth(base_s, 1 - base_s / fault_s, shares[0], shares[-1], lines)


def _steps(step_s: float) -> int:
    steps = min(max(SECONDS / step_s, MIN_STEPS), MAX_STEPS)
    return round(steps / BLOCK) * BLOCK
