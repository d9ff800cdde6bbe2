"""Run a target with damaged and hostile input: ``python -m fuzz TARGET --seconds 60``.

Run this in tests/. A target is a module of fuzz.targets with

    seeds()     valid inputs (bytes) to start from
    run(data)   what Paceline does with such an input; returns, or raises an error that a user would
                see (ValueError, OSError). Findings are any other exception, a run longer than
                TIMEOUT_S, and memory above RSS_MB. Their inputs are stored in --artifacts.

The corpus grows in --corpus, and a later run continues from it. Exit code 1 if anything was found.
"""

import argparse
import importlib
import os
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import targets

TIMEOUT_S, RSS_MB = 10, 3072


def names() -> list[str]:
    """Return the names of the targets."""
    modules = pkgutil.walk_packages(targets.__path__, f"{targets.__name__}.")
    found = (one.name.removeprefix(f"{targets.__name__}.") for one in modules if not one.ispkg)
    return sorted(name for name in found if not name.rpartition(".")[2].startswith("_"))


def start(target: str, seconds: int, corpus: Path, artifacts: Path) -> "subprocess.Popen[bytes]":
    """Start fuzzing in a separate process; its exit code is 0 if nothing was found."""
    seeds = corpus / "seeds"
    for folder in (corpus, seeds, artifacts):
        folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(importlib.import_module(f"fuzz.targets.{target}").seeds()):
        (seeds / f"{target}-{number}").write_bytes(data)
    words = [sys.executable, "-m", "fuzz.instrumented", target, str(corpus), str(seeds)]
    limits = [f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={RSS_MB}", f"-max_total_time={seconds}"]
    shown = ["-print_final_stats=1", f"-artifact_prefix={artifacts}/{target}-"]
    # libFuzzer ends without cleanup, so the target's files go into a folder beside the corpus.
    scratch = corpus.with_name(f"{corpus.name}-scratch")
    scratch.mkdir(exist_ok=True)
    where = {**os.environ, "TMPDIR": str(scratch)}
    return subprocess.Popen([*words, *limits, *shown], cwd=Path(__file__).parents[1], env=where)


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("target", choices=[*names(), "all"])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--corpus", type=Path, help="default: a temporary folder")
    parser.add_argument("--artifacts", type=Path, default=Path("run/fuzz"))
    given = parser.parse_args()
    chosen, found = names() if given.target == "all" else [given.target], []
    with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as scratch:
        for target in chosen:
            corpus = (given.corpus or Path(scratch)) / target
            print(f"fuzzing {target} for {given.seconds} s", flush=True)
            if start(target, given.seconds, corpus.absolute(), given.artifacts.absolute()).wait():
                found.append(target)
    print(f"findings in: {', '.join(found)}" if found else "no finding")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
