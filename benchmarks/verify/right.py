"""Are the battery's right scripts right?

Each is run by torchrun and by ``paceline run``, and on one rank with the same global batch: what
they print has to agree, to rounding, where the script draws no random numbers of a rank.

    python benchmarks/verify/right.py [--half kept-out] [--scripts cnn_ddp,gan]
    python benchmarks/verify/right.py --planted      only whether scripts with mistakes run at all
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cases import HALVES, SCRIPTS, Planted, path_of, planted, right_scripts, strip

BIN = Path(sysconfig.get_path("scripts"))
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|\bnan\b|\binf\b")
TIMES = re.compile(r"'(train|eval)_\w*(?:runtime|per_second)': \S+")  # of the Trainer
OTHER = re.compile(r"samples/s|^[│╭╰]|^W\d{4}| s$")  # progress, summaries, warnings, times
TIMEOUT_S = 150
TOLERANCE = 2e-3  # relative: sums in another order, over some tens of steps


def numbers(text: str) -> list[float]:
    """Return the numbers that a script printed, without times and progress."""
    lines = [line for line in text.splitlines() if not OTHER.search(line)]
    return [float(one) for one in NUMBER.findall(TIMES.sub("", "\n".join(lines)))]


def run(launcher: str, ranks: int, script: str, one_process: bool = False) -> str:
    """Run a right script; return its output.

    Raises:
        RuntimeError: The exit code is not 0.
    """
    facts, environment = SCRIPTS[script], {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [*facts.arguments, *(facts.exact if launcher == "torchrun" else ())]
    if one_process and facts.batch:
        size = str(2 * facts.size)
        if facts.batch.startswith("-"):
            words += [facts.batch, size]
        else:
            environment[facts.batch] = size
    return output_of(launcher, ranks, path_of(script).read_text(), words, environment)


def output_of(
    launcher: str, ranks: int, text: str, words: Sequence[str], environment: dict[str, str]
) -> str:
    """Run a script in an empty folder; return its output.

    Raises:
        RuntimeError: The exit code is not 0.
    """
    start = {
        "torchrun": [f"{BIN}/torchrun", "--standalone", "--nproc-per-node", str(ranks)],
        "paceline": [f"{BIN}/paceline", "run", "-n", str(ranks)],
    }[launcher]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(text)
        process = subprocess.Popen(
            [*start, "train.py", *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except BaseException as raised:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun and paceline end their ranks then
            process.communicate()
            if isinstance(raised, subprocess.TimeoutExpired):
                raise RuntimeError(f"not at its end after {TIMEOUT_S} s") from None
            raise
    if process.returncode:
        raise RuntimeError((output + errors)[-1500:])
    return output or errors  # world.log prints to standard error


def examine(script: str) -> str:
    """Return what is wrong with a right script, "" if nothing is."""
    try:
        one = numbers(run("torchrun", 1, script, one_process=True))
        two = numbers(run("torchrun", 2, script))
        launched = run("paceline", 2, script)
    except RuntimeError as failed:
        return str(failed)
    if not one or not launched.strip():
        return "it prints nothing"
    if SCRIPTS[script].equal:
        if len(one) != len(two):
            return f"one process prints {len(one)} numbers, two ranks {len(two)}"
        for at, (a, b) in enumerate(zip(one, two, strict=True)):
            if not abs(a - b) <= TOLERANCE * max(abs(a), 0.01):
                return f"number {at + 1} of {len(one)}: {a} in one process, {b} on two ranks"
    return ""


def run_planted(one: Planted) -> str:
    """Run a script with a mistake; return why it fails, "" if it runs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        output_of("torchrun", one.ranks, strip(one.text()).text, one.words, environment)
    except RuntimeError as failed:
        return str(failed)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--half", choices=list(HALVES), default="open")
    parser.add_argument("--scripts", help="only these, with commas")
    parser.add_argument("--planted", action="store_true")
    args = parser.parse_args()
    wrong = 0
    if args.planted:
        for one in planted(args.half):
            if not args.scripts or one.name in args.scripts.split(","):
                found = run_planted(one)
                wrong += bool(found)
                print(f"{one.name:50} {found or 'runs'}", flush=True)
        sys.exit(1 if wrong else 0)
    for script in args.scripts.split(",") if args.scripts else right_scripts(args.half):
        found = examine(script)
        wrong += bool(found)
        print(f"{script:22} {found or 'right'}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
