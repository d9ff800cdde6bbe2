"""How often does `paceline verify` name a planted mistake, with its line, and accuse nobody else?

Right scripts by different hands, and scripts with one planted mistake each. One half of both is
kept out while rules are made (kept_out/README.md).

    python benchmarks/verify/battery.py                            the open half
    python benchmarks/verify/battery.py --cases 10                 each kind once before any twice
    python benchmarks/verify/battery.py --kinds same-samples,right
    python benchmarks/verify/battery.py --only gan,same-samples/no-sampler --keep folder
    python benchmarks/verify/battery.py --resume                   go on where it was stopped
    python benchmarks/verify/battery.py --facts folder             keep the facts of each case
    python benchmarks/verify/battery.py --facts folder --again     judge them with other rules
    python benchmarks/verify/battery.py --half kept-out            once, to publish the figures
    python benchmarks/verify/battery.py --half all --jobs 8 --until-minutes 9
"""

import argparse
import contextlib
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from case_runs import Commands, results
from cases import HALVES, SCRIPTS, Planted, path_of, planted, right_scripts, strip
from kept_facts import answer_of
from rich.table import Table
from verdict import SCRIPT, Case, figures, line_of, read_answer

sys.path.append(str(Path(__file__).parents[1]))
from common import BENCHMARKS, BIN, console, machine, new_table, run

ALL = "all"  # both halves
RIGHT = "right"  # the kind of right scripts in --kinds
ENDS = 2.0  # times --minutes, after which a command is ended
PUBLISHED = Path(__file__).parents[2] / "docs" / "benchmarks" / "verify"
FACTS = Path(__file__).parent / "kept_facts.py"
MEASURED = 0.85  # target: wrong scripts with exit code 1
NAMED = 0.95  # target: mistakes named with their lines


def chosen(half: str, seed: int) -> list[Planted | str]:
    """Return all cases of a half in random order: each kind once before any kind is there again."""
    if half == ALL:
        return [one for each in HALVES for one in chosen(each, seed)]
    draw = random.Random(seed)
    by_kind: dict[str, list[Planted | str]] = {}
    for one in planted(half):
        by_kind.setdefault(one.kind, []).append(one)
    mistakes: list[Planted | str] = []
    while any(by_kind.values()):
        kinds = sorted(kind for kind, ones in by_kind.items() if ones)
        of_kinds = [by_kind[kind] for kind in draw.sample(kinds, len(kinds))]
        mistakes.extend(ones.pop(draw.randrange(len(ones))) for ones in of_kinds)
    scripts = right_scripts(half)
    right = draw.sample(scripts, len(scripts))
    cases: list[Planted | str] = []
    every = max(2, len(mistakes) // max(len(right), 1) + 1)
    while mistakes or right:
        take_right = right and (not mistakes or len(cases) % every == every - 1)
        cases.append(right.pop(0) if take_right else mistakes.pop(0))
    return cases


def name_of(one: Planted | str) -> str:
    return one if isinstance(one, str) else one.name


def longest_first(cases: list[Planted | str]) -> list[Planted | str]:
    """Sort cases by the seconds that they took when figures were published; unknown ones first."""
    seconds: dict[str, float] = {}
    for path in sorted(PUBLISHED.glob("battery-*.json")):
        seconds |= {one["name"]: one["seconds"] for one in json.loads(path.read_text())["cases"]}
    return sorted(cases, key=lambda one: seconds.get(name_of(one), math.inf), reverse=True)


def examine(one: Planted | str, args: argparse.Namespace, commands: Commands) -> Case:
    """Verify a script.

    Args:
        one: A planted mistake, or the name of a right script.
        args: The options: ``options`` of ``paceline verify``; ``keep``, the folder in which the
            case's folder is kept; ``facts`` and ``again``.
        commands: Runs the command.

    Raises:
        CutOffError: The time of all cases was over.
    """
    keep = args.keep
    if isinstance(one, str):
        case, words, text = Case(one), SCRIPTS[one].arguments, path_of(one).read_text()
    else:
        built = strip(one.text())
        names = [one.kind, *one.names]
        case = Case(one.name, one.kind, names, list(one.true), sorted(built.lines), one.ranks)
        words, text = one.words, built.text
    with work_folder(case.name, keep) as folder:
        (folder / SCRIPT).write_text(text)
        command = [str(BIN / "paceline"), "verify", "-n", str(case.ranks), "--json"]
        command += ["--minutes", str(args.minutes), *args.options.split()]
        file = facts_file(args.facts, case.name) if args.facts else None
        if file:
            command = [sys.executable, str(FACTS), "-n", str(case.ranks)]
            command += ["--minutes", str(args.minutes), str(file)]
        start = time.monotonic()
        if args.again and file and file.exists():
            code, output, seconds = answer_of(file)
            answer: tuple[int | None, str, str] = (code, output, "")
        else:
            limit_s = 60 * ENDS * args.minutes
            answer = commands.outcome([*command, SCRIPT, *words], folder, limit_s)
            seconds = time.monotonic() - start
        case.seconds = round(seconds, 1)
        if keep:
            (folder / "answer.json").write_text(answer[1])
            (folder / "errors.txt").write_text(answer[2])
    read_answer(case, *answer)
    return case


def facts_file(folder: Path, name: str) -> Path:
    """Return the file of a case's facts."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve() / f"{name.replace('/', '-')}.pickle"


@contextlib.contextmanager
def work_folder(name: str, keep: Path | None) -> Iterator[Path]:
    """Yield an empty folder for a case."""
    if keep:
        folder = keep.resolve() / name.replace("/", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="verify-") as temporary:
            yield Path(temporary)


def write(args: argparse.Namespace, facts: dict[str, Any], cases: list[Case]) -> None:
    """Write the results; called after each case, so that a failure loses only the last one."""
    args.json.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "benchmark": "battery",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": facts,
        "settings": {
            key: str(value)
            for key, value in vars(args).items()
            if key not in ("json", "keep", "facts")
        },
        "figures": figures(cases),
        "cases": [
            {
                **asdict(case),
                "named": case.named,
                "placed": case.placed,
                "is_wrong": case.is_wrong,
                "accusations": case.accusations,
                "questions": case.questions,
            }
            for case in cases
        ],
    }
    part = args.json.with_suffix(".part")
    part.write_text(json.dumps(whole, indent=1) + "\n")
    part.replace(args.json)


def resumed(path: Path) -> dict[str, Case]:
    """Return the cases in a file that had an answer, by name."""
    told = json.loads(path.read_text())["cases"] if path.exists() else []
    fields = Case.__dataclass_fields__
    cases = [Case(**{key: one[key] for key in fields if key in one}) for one in told]
    return {case.name: case for case in cases if case.ended}


def selected(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Planted | str]:
    """Return the cases that the options ask for."""
    cases = chosen(args.half, args.seed)
    if args.kinds:
        kinds = args.kinds.split(",")
        cases = [one for one in cases if (RIGHT if isinstance(one, str) else one.kind) in kinds]
    if args.only:
        names = args.only.split(",")
        if unknown := set(names) - {name_of(one) for one in cases}:
            parser.error(f"--only {', '.join(unknown)}: no such case. HINT: --list prints them")
        cases = [one for one in cases if name_of(one) in names]
    if not cases:
        parser.error(f"--kinds {args.kinds}: no such case. HINT: --list prints the cases")
    return cases[: args.cases]


def report(args: argparse.Namespace, cases: list[Case]) -> None:
    found = figures(cases)
    headings = ("", "measured", "of", "95 % interval", "target")
    table = new_table(*headings, title=f"{len(cases)} cases, {args.half} half, seed {args.seed}")
    rows = (
        ("right script with exit code 1", "exit_right", "0"),
        ("wrong script with exit code 1", "exit_wrong", f">= {100 * MEASURED:.0f} %"),
        ("exit code 1 and named", "exit_named", ""),
        ("exit code 1 and named, its line first", "exit_placed", ""),
        ("no verdict (exit code 2)", "no_verdict", ""),
        ("mistake named", "named", f">= {100 * NAMED:.0f} %"),
        ("named, its line first", "placed", f">= {100 * NAMED:.0f} %"),
        ("named, its line anywhere", "placed_below", ""),
        ("further accusation of a wrong script", "accused_wrongly", "0"),
        ("right script accused", "accused_right", "0"),
        ("right script asked about", "asked_right", ""),
        ("ended with an answer", "ended", "100 %"),
    )
    for text, key, target in rows:
        add(table, text, found[key], target)
    for kind, one in found["kinds"].items():
        add(table, f"  named, its line first: {kind}", one["placed"], "")
    console.print(table)
    console.print(
        f"Seconds of a verification: median {found['seconds_median']}, at most "
        f"{found['seconds_most']}.\nJSON: {args.json}"
    )
    if found["right_with_exit_1"]:
        console.print(f"Right scripts with exit code 1: {', '.join(found['right_with_exit_1'])}")


def add(table: Table, text: str, one: dict[str, Any], target: str) -> None:
    share = f"{100 * one['hits'] / one['of']:.0f} %" if one["of"] else ""
    low, high = 100 * one["low"], 100 * one["high"]
    table.add_row(text, share, f"{one['hits']}/{one['of']}", f"{low:.0f} to {high:.0f} %", target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--half", choices=[*HALVES, ALL], default="open")
    parser.add_argument("--cases", type=int, help="at most; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the cases")
    parser.add_argument("--kinds", help=f"only these, with commas; {RIGHT}: right scripts")
    parser.add_argument("--only", help="only the cases of these names, with commas")
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    parser.add_argument("--resume", action="store_true", help="keep the answers that --json holds")
    parser.add_argument("--keep", type=Path, help="keep each case's script and answer in it")
    parser.add_argument("--facts", type=Path, help="keep the facts of each case in it")
    parser.add_argument("--again", action="store_true", help="judge the facts in --facts, if any")
    parser.add_argument("--json", type=Path, help="default: benchmarks/out/battery-HALF.json")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once, each on its own cores")
    parser.add_argument("--minutes", type=float, default=5.0, help="of each verification")
    parser.add_argument("--until-minutes", type=float, default=math.inf, help="end all cases then")
    parser.add_argument("--options", default="", help="further options of paceline verify")
    args = parser.parse_args()
    args.json = args.json or BENCHMARKS / "out" / f"battery-{args.half}.json"
    todo = selected(args, parser)
    if args.list:
        print("\n".join(name_of(one) for one in todo))
        return
    known = resumed(args.json) if args.resume else {}
    facts = machine()
    cases = [known[name_of(one)] for one in todo if name_of(one) in known]
    rest = [one for one in todo if name_of(one) not in known]
    if args.jobs > 1:
        rest = longest_first(rest)
    commands = Commands(args.until_minutes)
    for case in results(lambda one: examine(one, args, commands), rest, args.jobs, commands):
        cases.append(case)
        console.print(
            f"{len(cases):3}/{len(todo)} {line_of(case)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        write(args, facts, cases)
    report(args, cases)
    if len(cases) < len(todo):
        left = len(todo) - len(cases)
        console.print(f"{left} of {len(todo)} cases did not run. HINT: --resume runs them")


if __name__ == "__main__":
    run(main)
