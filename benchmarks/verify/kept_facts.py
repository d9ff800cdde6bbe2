"""Verify a script as ``paceline verify --json`` does, and keep the facts that its rules judge.

    python kept_facts.py -n 2 FILE train.py --epochs 3

Rules that have changed since can judge the same facts again without running the script
(``battery.py --facts FOLDER --again``).
"""

import argparse
import json
import pickle
import sys
from pathlib import Path

from paceline.analyze.verification.find import judge
from paceline.analyze.verification.runs_facts import VerifyRuns
from paceline.report.verification_document import as_json, exit_code
from paceline.study.trials import ScriptRequest
from paceline.study.verify import run_verification


def answer_of(file: Path) -> tuple[int, str, float]:
    """Return the exit code and the output of the command, and the seconds of its runs."""
    # The files were written by this program.
    runs: VerifyRuns = pickle.loads(file.read_bytes())
    found = (runs, *judge(runs))
    text = json.dumps(as_json(found), indent=1)
    return exit_code(found), text, runs.seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="receives the facts")
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--minutes", type=float, default=5.0, help="time of all runs")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="script and its arguments")
    args = parser.parse_args()
    asked = ScriptRequest(args.words[0], args.words[1:], ranks=args.n, minutes=args.minutes)
    try:
        runs = run_verification(asked, lambda _: None)
    except ValueError as error:
        sys.exit(f"{error}")
    args.file.write_bytes(pickle.dumps(runs))
    code, text, _ = answer_of(args.file)
    print(text)
    sys.exit(code)


if __name__ == "__main__":
    main()
