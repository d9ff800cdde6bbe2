"""Are the named reason and the fitted parameters of a scaling study right?

40 studies of laws.py with planted losses, on 1, 2 and 4 ranks. In each, the main reason from 1 to 4
ranks is compared with the planted one, and the planted parameters with the fitted 95 % intervals.
A benchmark that was ended goes on where it was (``--folder``).
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BENCHMARKS, console, finish, options, run
from planted_studies import (
    GLOBAL_BATCH,
    RANK_BATCH,
    Case,
    measure,
    open_study,
    share_target,
    study_of,
)

from paceline.analyze.scaling.forecast import KindAnalysis, analyse_kind
from paceline.analyze.scaling.study_model import STRONG, WEAK

SIZES = (1, 2, 4)
STEPS = 51  # the first is not measured, and validations after each fifth are
MIB = 1 << 20
EVERY = 5  # steps between validations and checkpoints, laws.py's default
SECOND = {"sample": 1.0}


def cases() -> list[Case]:
    """Return 22 cases of strong and 18 of weak scaling.

    Half of them have a second, smaller loss.
    """
    found = []
    for level, other in ((1.0, {}), (1.6, {"serial": 2.0})):
        for name, loss, causes, truth in _strong(level, other.get("serial", 0.0)):
            found.append(
                Case(f"strong-{name}-{level:g}", STRONG, SECOND | other | loss, causes, truth)
            )
    for level, other in ((1.0, {}), (1.6, {"slow": 4.0})):
        for name, loss, causes, truth in _weak(level):
            second = {"jitter": 3.0} if "slow" in loss and other else other
            found.append(
                Case(f"weak-{name}-{level:g}", WEAK, SECOND | second | loss, causes, truth)
            )
    return found


Planted = tuple[str, dict[str, float], tuple[str, ...], dict[str, float]]


def _strong(level: float, serial: float) -> list[Planted]:
    """Return the losses of strong scaling. serial: ms of other work that each rank also does."""
    ms = 1e-3 * level
    return [
        ("fixed", {"fixed": 16 * level}, ("fixed-cost",), {"compute: a step": 16 * ms}),
        ("serial", {"serial": 14 * level}, ("script",), {"script: a step": 14 * ms}),
        (
            "first-rank",
            {"first_rank": 14 * level},
            ("slow-rank",),
            {"script: a step": 14 * ms + 1e-3 * serial},
        ),
        ("slow", {"slow": 14 * level}, ("slow-rank",), {"slow-rank: one late rank": 14 * ms}),
        ("jitter", {"jitter": 9 * level}, ("jitter",), {"jitter: lateness": 9 * ms}),
        (
            "validate-one",
            {"validate": 70 * level},
            ("validation-on-one-rank",),
            {"validation: a step": 70 * ms / EVERY},
        ),
        (
            "validate-all",
            {"validate": 70 * level, "on_all": True},
            ("validation",),
            {"validation: a step": 70 * ms / EVERY},
        ),
        (
            "save",
            {"save": 70 * level},
            ("checkpoint-on-one-rank",),
            {"checkpoint: a step": 70 * ms / EVERY},
        ),
        *_exchange(level),
        (
            "input",
            {"shared_input": 0.5 * level},
            ("input",),
            {"input: a step": 0.5 * ms * GLOBAL_BATCH},
        ),
    ]


def _exchange(level: float) -> list[Planted]:
    ms = 1e-3 * level
    return [
        (
            "latency",
            {"latency": 8 * level},
            ("exchange-latency",),
            {"exchange: latency": 8 * ms},
        ),
        (
            "bandwidth",
            {"per_mib": 8 * level, "mib": 4},
            ("exchange-bandwidth",),
            {"exchange: bytes": 8 * ms / MIB},
        ),
    ]


def _weak(level: float) -> list[Planted]:
    ms = 1e-3 * level
    return [
        ("slow", {"slow": 14 * level}, ("slow-rank",), {"slow-rank: one late rank": 14 * ms}),
        ("jitter", {"jitter": 9 * level}, ("jitter",), {"jitter: lateness": 9 * ms}),
        *_exchange(level),
        (
            "two-calls",
            {"latency": 5 * level, "calls": 2},
            ("exchange-latency",),
            {"exchange: latency": 5 * ms},
        ),
        (
            "input",
            {"shared_input": 0.3 * level},
            ("input",),
            {"input: a sample of all ranks": 0.3 * ms},
        ),
        (
            "crowded",
            {"crowded": 0.3 * level},
            ("shared-machine",),
            {"compute: a sample and rank of the node": 0.3 * ms},
        ),
        ("of-all", {"of_all": 5 * level}, ("slow-rank",), {"script: a rank": 5 * ms}),
        (
            "validate-rank",
            {"validate_rank": 25 * level},
            ("validation-on-one-rank",),
            {"validation: a sample of all ranks": 25 * ms / EVERY / RANK_BATCH},
        ),
    ]


def judge(case: Case, found: KindAnalysis) -> dict[str, object]:
    """Compare the reason and the parameters with the planted ones."""
    whole = found.whole
    main = whole.main if whole is not None else None
    fitted = {one.name: one for one in found.model.parameters()}
    parameters = []
    for name, true in case.truth.items():
        one = fitted.get(name)
        inside = one is not None and one.low <= true <= one.high
        values = None if one is None else [one.value, one.low, one.high]
        parameters.append({"name": name, "planted": true, "fitted": values, "inside": inside})
    return {
        "case": case.name,
        "options": case.options,
        "efficiency": whole.after if whole is not None else None,
        "planted": case.causes,
        "named": main.cause if main is not None else None,
        "share": main.share if main is not None else None,
        "sentence": main.sentence if main is not None else None,
        "reason_right": main is not None and main.cause in case.causes,
        "parameters": parameters,
        "all_fitted": {one.name: [one.value, one.low, one.high] for one in fitted.values()},
    }


def main() -> None:
    parser = options("planted_laws", __doc__ or "", 1)
    parser.add_argument("--folder", default=str(BENCHMARKS / "out/scale/planted_laws"))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    results, started = [], time.monotonic()
    every = [one for one in cases() if args.only in one.name]
    for case in every:
        folder = Path(args.folder) / case.name
        open_study(folder, case, SIZES, STEPS)
        for size in SIZES:
            measure(folder, case, size)
        found = analyse_kind(study_of(folder), case.kind)
        assert found is not None
        result = judge(case, found)
        results.append(result)
        inside = [one["inside"] for one in result["parameters"]]
        console.print(
            f"{case.name:26} {'right' if result['reason_right'] else 'WRONG':6}"
            f"{result['named']!s:24} parameters within: {inside}",
            highlight=False,
            soft_wrap=True,
        )
    right = sum(bool(one["reason_right"]) for one in results)
    parameters = [one for result in results for one in result["parameters"]]
    inside = sum(bool(one["inside"]) for one in parameters)
    wrong, outside = len(results) - right, len(parameters) - inside
    finish(
        args,
        {one["case"]: one for one in results},
        {},
        {},
        [
            share_target("the named reason is not the planted one", wrong, len(results), 0.05),
            share_target(
                "a planted parameter is outside its interval", outside, len(parameters), 0.1
            ),
        ],
        seconds=time.monotonic() - started,
    )


if __name__ == "__main__":
    run(main)
