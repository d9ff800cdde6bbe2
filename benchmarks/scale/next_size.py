"""How well is the next size predicted?

20 studies of laws.py: sizes of 1, 2 and 4 ranks are measured, 8 ranks are predicted, the
predictions are stored in the study, and then 8 ranks are measured. 12 studies run on this machine,
8 on hosts in namespaces, one rank each, whose links are limited with tc. Sleeps stand in for
computing, and the exchange is gloo's (with ``latency`` or ``per_mib``, on an emulated network).

    python benchmarks/scale/next_size.py       as root, after make test-packages
    python benchmarks/scale/next_size.py --only local

A benchmark that was ended goes on where it was (``--folder``, which hosts must share: not in /tmp).
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BENCHMARKS, console, finish, launch, options, run
from emulated_hosts import bed, limit_links, open_hosts, require
from planted_studies import Case, measure, open_study, study_of

from paceline.analyze.scaling.forecast import COST_MODEL, predict_next
from paceline.analyze.scaling.study_folder import store_predictions
from paceline.analyze.scaling.study_model import STRONG, WEAK

FITTED, NEXT = (1, 2, 4), 8
STEPS = 51
MEDIAN, WORST = 0.10, 0.25
CORKING = "net.ipv4.tcp_autocorking"
ON_HOSTS = "hosts"


def cases() -> list[Case]:
    """Return the 20 studies."""
    local = {
        "fixed": {"fixed": 10.0},
        "serial": {"serial": 8.0, "jitter": 3.0},
        "slow": {"slow": 12.0},
        "jitter": {"jitter": 8.0},
        "latency": {"latency": 3.0, "fixed": 4.0},
        "validate": {"validate": 60.0, "slow": 4.0},
    }
    found = [Case(f"local-strong-{name}", STRONG, one) for name, one in local.items()]
    local = {
        "slow": {"slow": 10.0, "latency": 1.0},
        "jitter": {"jitter": 7.0, "save": 40.0},
        "bandwidth": {"per_mib": 6.0, "mib": 3.0},
        "input": {"shared_input": 0.25},
        "crowded": {"crowded": 0.15, "jitter": 2.0},
        "of-all": {"of_all": 4.0, "validate": 30.0},
    }
    found += [Case(f"local-weak-{name}", WEAK, one) for name, one in local.items()]
    for name, kind, loss, mbit in (
        ("large", STRONG, {"mib": 1.0}, 400),
        ("large", WEAK, {"mib": 1.0}, 200),
        ("larger", WEAK, {"mib": 4.0}, 400),
        ("calls", WEAK, {"mib": 0.1, "calls": 5}, 200),
        ("ddp", WEAK, {"mib": 2.0, "ddp": True}, 400),
        ("ddp", STRONG, {"mib": 0.5, "ddp": True}, 200),
        ("slow", STRONG, {"mib": 0.5, "slow": 8.0}, 400),
        ("jitter", WEAK, {"mib": 0.5, "jitter": 6.0}, 200),
    ):
        found.append(Case(f"{ON_HOSTS}-{kind}-{name}", kind, loss, mbit=mbit))
    return found


def predicted(folder: Path, case: Case) -> None:
    """Store the predictions of the next size, unless they are."""
    study = study_of(folder)
    if not study.predictions:
        store_predictions(folder, predict_next(study, case.kind, [NEXT]))


def judge(folder: Path, case: Case) -> dict[str, Any]:
    """Compare the stored predictions with the measurement."""
    study = study_of(folder)
    point = next(one for one in study.of_kind(case.kind) if one.ranks == NEXT)
    measured = point.figures[0].throughput
    models = {
        one.model: {
            "predicted": one.throughput,
            "interval": [one.low, one.high],
            "error": one.throughput / measured - 1,
            "inside": one.low <= measured <= one.high,
            "seconds_before": point.runs[0].started - one.made,
        }
        for one in point.predicted
    }
    assert COST_MODEL in models, "the prediction was stored before the run"
    return {
        "case": case.name,
        "options": case.options,
        "mbit": case.mbit,
        "samples_s": {
            one.ranks: one.figures[0].throughput for one in study.of_kind(case.kind) if one.figures
        },
        "models": models,
    }


def study(folder: Path, case: Case, start: Callable[[list[str]], object]) -> dict[str, Any]:
    """Measure, predict, measure the next size, and compare."""
    open_study(folder, case, [*FITTED, NEXT], STEPS)
    for size in FITTED:
        measure(folder, case, size, start)
    predicted(folder, case)
    measure(folder, case, NEXT, start)
    result = judge(folder, case)
    errors = {name: f"{100 * one['error']:+.1f} %" for name, one in result["models"].items()}
    console.print(f"{case.name:28} {errors}", highlight=False, soft_wrap=True)
    return result


def main() -> None:
    parser = options("next_size", __doc__ or "", 1)
    parser.add_argument("--folder", default=str(BENCHMARKS / "out/scale/next_size"))
    parser.add_argument("--only", default="", help="studies whose name contains this")
    args = parser.parse_args()
    every = [one for one in cases() if args.only in one.name]
    on_hosts = [one for one in every if one.mbit]
    if on_hosts:
        require(bed.missing())
    began = time.monotonic()
    folder = Path(args.folder).absolute()
    results = [study(folder / one.name, one, launch) for one in every if not one.mbit]
    if on_hosts:
        with open_hosts(NEXT) as hosts:

            def start(command: list[str]) -> object:
                return hosts.run("host0", *command, timeout=600)

            for one in on_hosts:
                for name in hosts.names[1:]:
                    # Corking waits for the queue of tc, which can delay 64 KiB by 40 ms.
                    hosts.run(name, "sysctl", "-q", "-w", f"{CORKING}=0", check=False)
                limit_links(hosts, one.mbit)
                results.append(study(folder / one.name, one, start))
    errors = [abs(one["models"][COST_MODEL]["error"]) for one in results]
    inside = sum(one["models"][COST_MODEL]["inside"] for one in results)
    finish(
        args,
        {one["case"]: one for one in results},
        {"error": statistics.median(errors), "worst error": max(errors)},
        {},
        [
            _target("median error of the next size", statistics.median(errors), MEDIAN, errors),
            _target("worst error of the next size", max(errors), WORST, errors),
        ],
        seconds=time.monotonic() - began,
        inside=f"{inside} of {len(results)}",
    )


def _target(claim: str, value: float, limit: float, errors: list[float]) -> dict[str, Any]:
    return {
        "claim": f"{claim}, {len(errors)} studies",
        "limit": limit,
        "value": value,
        "interval": [min(errors), max(errors)],
        "met": value <= limit,
        "decided": True,
    }


if __name__ == "__main__":
    run(main)
