"""How often is `paceline diagnose` right on scripts and faults that it has never seen?

Scripts by different hands (scripts/, and some of tests/record/zoo) times faults that are injected
into them from outside, in several ways each. What a fault takes is measured with and without it,
in alternation. One half of the ways is kept out while rules are made (kept_out/README.md).

    python benchmarks/scorecard/unseen.py --cases 40 --minutes 0.5
    python benchmarks/scorecard/unseen.py --list                      the cases, and no run
    python benchmarks/scorecard/unseen.py --kinds barriers,lock --cases 4
    python benchmarks/scorecard/unseen.py --resume                    go on where it was stopped
    python benchmarks/scorecard/unseen.py --half kept-out             once, to publish the figures
"""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

import peer
from build import SCRIPTS
from injectors import Injector, load_half
from judge import COUNTS, Case, ForeignCores, figures, read_answer
from rich.console import Console
from rich.table import Table
from scorecard import write
from truth import PACELINE, Bench, CaseError, measure

HERE = Path(__file__).parent
WANTED = (0.12, 0.2, 0.3)  # shares of a step that faults are calibrated to
HEALTHY_EVERY = 5  # one case of so many is healthy
FASTER_EXCHANGE = ("--exchange", "paceline")
MAX_OVERTIME = 10  # a diagnosis that takes so many times --minutes is ended, and counts as none
FIRST, NAMED, FALSE, MEDIAN, WORST = 0.95, 0.98, 1 / 40, 4.0, 12.0  # targets


def chosen(args: argparse.Namespace, injectors: list[Injector]) -> list[Case]:
    """Return the cases of the seed: each kind once before any kind is there again."""
    draw = random.Random(args.seed)
    sources = {name: path.read_text() for name, path in SCRIPTS.items()}
    wanted = args.scripts.split(",") if args.scripts else list(SCRIPTS)
    by_kind: dict[str, list[Injector]] = {}
    for one in injectors:
        if not args.kinds or one.kind in args.kinds.split(","):
            by_kind.setdefault(one.kind, []).append(one)
    if not by_kind:
        sys.exit(f"--kinds {args.kinds}: no such kind. HINT: the names in kinds.py, with commas")
    cases: list[Case] = []
    round_of: list[str] = []
    healthy = draw.sample(wanted, len(wanted))
    while len(cases) < args.cases:
        if not args.kinds and len(cases) % HEALTHY_EVERY == HEALTHY_EVERY - 1:
            cases.append(Case(healthy[len(cases) // HEALTHY_EVERY % len(healthy)]))
            continue
        round_of = round_of or draw.sample(sorted(by_kind), len(by_kind))
        injector = draw.choice(by_kind[round_of.pop()])
        fitting = [name for name in wanted if injector.fits(sources[name])]
        if fitting:
            share = min(draw.choice(WANTED), injector.most_share)
            cases.append(Case(draw.choice(fitting), injector.name, share))
        elif args.kinds and not any(
            one.fits(sources[name]) for ones in by_kind.values() for one in ones for name in wanted
        ):
            sys.exit(f"--kinds {args.kinds} fit none of the scripts. HINT: without --scripts")
    return cases


def examine(
    case: Case,
    injector: Injector | None,
    args: argparse.Namespace,
    exchange_gains: dict[str, float],
) -> None:
    """Measure the fault of a case, and let diagnose find it.

    ``exchange_gains``: what a faster exchange gains in scripts without a fault, if known.
    """
    with tempfile.TemporaryDirectory(prefix="unseen-") as folder:
        bench = Bench(Path(folder), case.script, injector)
        amount = None
        try:
            if injector is None:
                case.base_s = bench.step_time(None)
            else:
                amount, truth = measure(bench, case.wanted, args.trials, args.rounds)
                case.amount, case.base_s, case.share = amount, truth.base_s, truth.share
                case.range, case.lines = (truth.low, truth.high), truth.lines
        except CaseError as failed:
            case.error = str(failed)
            return
        built = bench.build(amount)
        script = [str(built.script), *built.arguments]
        words = [str(PACELINE), "diagnose", *bench.options(amount)]
        words += ["--minutes", f"{args.minutes}", "--json", "--", *script]
        start = time.monotonic()
        with ForeignCores() as foreign:
            answer = bench.run(words, amount, MAX_OVERTIME * 60 * args.minutes)
        case.seconds, case.foreign = time.monotonic() - start, round(foreign.cores, 2)
        read_answer(case, *answer)
        if case.names_exchange:
            with contextlib.suppress(CaseError):  # not every script can change its exchange
                if case.script not in exchange_gains:
                    exchange_gains[case.script] = bench.gain_of(FASTER_EXCHANGE, args.rounds)
                case.exchange_gain = exchange_gains[case.script]
        if args.peer:
            case.peer = peer.examine(bench, amount, case.kind, args.peer_python)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--half", choices=["open", "kept-out"], default="open")
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1.0, help="of each diagnosis")
    parser.add_argument("--trials", type=int, default=3, help="to calibrate a fault, at most")
    parser.add_argument("--rounds", type=int, default=3, help="with and without the fault")
    parser.add_argument("--kinds", help="only these, with commas; without healthy runs")
    parser.add_argument("--scripts", help="only these, with commas")
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    parser.add_argument("--resume", action="store_true", help="keep the cases that --json holds")
    parser.add_argument("--json", type=Path, help="default: benchmarks/out/unseen-HALF.json")
    parser.add_argument("--peer", choices=["traceml"], help="also run this tool on each case")
    parser.add_argument(
        "--peer-python", type=Path, help="Python of a virtual environment with the peer and torch"
    )
    args = parser.parse_args()
    args.json = args.json or HERE.parent / "out" / f"unseen-{args.half}.json"
    if args.peer and not args.peer_python:
        parser.error("--peer needs --peer-python. HINT: peer.py says how to create one")
    injectors = load_half(args.half)
    cases, by_name = chosen(args, injectors), {one.name: one for one in injectors}
    if args.list:
        for number, case in enumerate(cases, 1):
            print(f"{number:3} {case.name}" + (f", {100 * case.wanted:.0f} %" * bool(case.wanted)))
        return
    console = Console()
    done = resumed(args.json, cases) if args.resume else 0
    gains = {case.script: case.exchange_gain for case in cases[:done]}
    exchange_gains = {name: gain for name, gain in gains.items() if gain is not None}
    for number, case in enumerate(cases, 1):
        if number <= done:
            continue
        examine(case, by_name.get(case.injector), args, exchange_gains)
        console.print(
            f"{number:3}/{len(cases)} {line_of(case)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        known = cases[:number]
        write(args, "unseen", figures(known), known)
    report(console, args, cases)


def resumed(path: Path, cases: list[Case]) -> int:
    """Fill in the first cases with the results in the file; return their number."""
    import json

    before = json.loads(path.read_text())["cases"] if path.exists() else []
    for at, (case, told) in enumerate(zip(cases, before, strict=False)):
        if case.name != Case(told["script"], told["injector"]).name:
            sys.exit(f"{path} has other cases. HINT: the same --seed, --kinds, --half, or --json")
        cases[at] = Case(**told)
    return min(len(before), len(cases))


def line_of(case: Case) -> str:
    """Return the result of a case in one line."""
    if case.error:
        return f"--  {case.name}: not measured: {case.error[-200:]}"
    if not case.ended:
        return f"no  {case.name}: no diagnosis: {case.output[-200:]}"
    found = ", ".join(
        f"{name} {100 * share:.0f} %" + (f" ({Path(place[0]).name}:{place[1]})" if place else "")
        for name, share, place in case.found
    )
    if not case.injector:
        sign, true = "no" if case.false_alarm else "ok", "nothing"
    else:
        sign = "ok" if case.first else "2nd" if case.named else "no"
        sign = sign if case.counts else f"({sign})"
        true = f"{100 * case.share:.0f} %"
    if case.exchange_gain is not None:
        true += f", a faster exchange gains {100 * case.exchange_gain:.0f} %"
    times = f"step {1e3 * case.base_s:.0f} ms, {case.seconds:.0f} s, {case.foreign:.1f} cores else"
    peers = f"; peer: {case.peer.get('said') or case.peer.get('error')}" if case.peer else ""
    return f"{sign:4} {case.name}: true {true}, found {found or 'nothing'} [{times}]{peers}"


def report(console: Console, args: argparse.Namespace, cases: list[Case]) -> None:
    found = figures(cases)
    table = Table(title=f"{len(cases)} cases, {args.half} half, seed {args.seed}")
    for heading in ("", "measured", "of", "95 % interval", "target"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = (
        (f"first, of faults of {100 * COUNTS:.0f} % and more", "first", f">= {100 * FIRST:.0f} %"),
        ("named", "named", f">= {100 * NAMED:.0f} %"),
        ("named with the right line", "placed", ""),
        ("false alarms", "false_alarms", f"<= {100 * FALSE:.1f} %"),
        ("ended with a diagnosis", "ended", "100 %"),
        ("peer: right", "peer_first", ""),
    )
    for text, key, target in rows:
        if key in found:
            add(table, text, found[key], target)
    for kind, one in found["kinds"].items():
        add(table, f"  first: {kind}", one["first"], "")
    console.print(table)
    if found["off_median"] is not None:
        median, worst = found["off_median"], found["off_worst"]
        console.print(
            f"Shares are off by {median:.1f} points (median; target {MEDIAN:.0f}) and "
            f"{worst:.1f} at most (target {WORST:.0f})."
        )
    if found["weak"] or found["not_measured"]:
        console.print(
            f"Not counted: {found['weak']} weaker than {100 * COUNTS:.0f} % of a step, "
            f"{found['not_measured']} could not be measured."
        )
    console.print(f"JSON: {args.json}")


def add(table: Table, text: str, one: dict, target: str) -> None:
    share = f"{100 * one['hits'] / one['of']:.0f} %" if one["of"] else ""
    low, high = 100 * one["low"], 100 * one["high"]
    table.add_row(text, share, f"{one['hits']}/{one['of']}", f"{low:.0f} to {high:.0f} %", target)


if __name__ == "__main__":
    main()
