"""Claims: a step with what paceline run --tune-exchange finds takes at most 1.05 times as long as
with the best of an exhaustive sweep over bucket sizes and ways of exchange, after at most a tenth
of its steps, and never longer than the default; on three models and two links.

Two hosts of two ranks, Linux namespaces of this machine (tests/bed), their links narrowed with tc.

    python benchmarks/exchange/tuning.py      as root, after make test-packages
"""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, new_table, options, ratio, run, spread, target
from emulated_hosts import limit_links, link_option, open_hosts

MODELS = ("small layers", "large layers", "convolutions")
NEAR, STEPS, SAME = 1.05, 0.1, 1.03
HOSTS = "host1:2,host2:2"


def main() -> None:
    parser = options("tuning", __doc__ or "", repeats=7)
    parser.add_argument("--mbit", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--each", type=int, default=20, help="steps of a setting of the sweep")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with open_hosts(2) as hosts:
        for mbit in args.mbit:
            limit_links(hosts, mbit)
            for model in args.models:
                console.print(f"{model}, {mbit} Mbit/s", highlight=False)
                found[f"{model}, {mbit} Mbit/s"] = case(hosts, model, mbit, args)
    report(args, found)


def case(hosts: Any, model: str, mbit: int, args: Any) -> dict[str, Any]:
    folder = hosts.new_folder()
    shutil.copy(SCRIPTS / "exchange/tuning.py", folder)
    # A sweep takes longer than a script may that nobody sees from inside.
    start = [BIN / "paceline", "run", "--fresh", "-H", HOSTS, "--hang-timeout", 0]
    start += link_option(mbit)
    script = ["tuning.py", folder / "found.json", model]
    tune = [*start, "--tune-exchange", "tuned.toml", *script, "--steps", 110]
    told = hosts.run("host0", *tune, cwd=folder, timeout=1800).stderr
    sweep = [*start, "--exchange", "paceline", *script, "--sweep", "--tuned", "tuned.toml"]
    sweep += ["--rounds", args.repeats, "--each", args.each]
    hosts.run("host0", *sweep, cwd=folder, timeout=3600)
    found = dict(json.loads((folder / "found.json").read_text()))
    console.print(found["choices"], highlight=False)
    steps = re.search(r"is tuned after ([\d,]+) steps", told)
    assert steps is not None, told
    kept = tomllib.loads((folder / "tuned.toml").read_text())["knobs"]
    return found | {"tuner_steps": int(steps[1].replace(",", "")), "kept": kept}


def report(args: Any, found: dict[str, Any]) -> None:
    headings = ("", "default", "best of the sweep", "tuned", "of the best", "of its steps")
    table = new_table(*headings, title="milliseconds a step")
    medians, ratios, claims = {}, {}, []
    for name, one in found.items():
        seconds = one["seconds"]
        medians[name] = {way: spread(each)["median"] for way, each in seconds.items()}
        of_best = ratio(seconds["tuned"], seconds["best"])
        of_default = ratio(seconds["tuned"], seconds["default"])
        share = one["tuner_steps"] / one["steps"]
        ratios[name] = {"best": of_best, "default": of_default, "steps": share}
        ms = [f"{1e3 * medians[name][way]:.1f}" for way in ("default", "best", "tuned")]
        cells = [f"{of_best['median']:.2f}", f"{100 * share:.0f} %"]
        table.add_row(name, *ms, *cells)
        claims += [
            target(f"{name}: of the best", NEAR, of_best),
            target(f"{name}: of the default", SAME, of_default),
            target(f"{name}: of the sweep's steps", STEPS, ratio([share], [1.0])),
        ]
    console.print(table)
    finish(args, found, medians, ratios, claims)


if __name__ == "__main__":
    run(main)
