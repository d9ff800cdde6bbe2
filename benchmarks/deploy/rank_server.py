"""Question: is a process that batches the calls of all ranks of a node faster than a model in each
rank?

Ranks call at the same time, one thread each. The server is one more process; requests lie in shared
memory, and those that arrive together are one batch without a copy.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import console, finish, options, ratio, rounds, run, spread
from native_programs import build_program, export, run_json
from rich.table import Table

MODELS = ["mlp", "unet", "transformer"]
MODES = ["alone", "server"]


def main() -> None:
    parser = options("rank_server", __doc__ or "", repeats=7)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a measurement, about")
    args = parser.parse_args()
    cases = [
        (name, int(ranks), int(batch))
        for name in MODELS
        for ranks in args.ranks.split(",")
        for batch in args.batches.split(",")
    ]
    found: dict[Any, dict[str, list[float]]] = {
        case: {mode: [] for mode in MODES} for case in cases
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        program, calls = build_program("broker", folder), build_program("calls", folder)
        for name in MODELS:
            result = export(name, "float32", folder, "builtin")
            assert not isinstance(result, str), result
        files = {name: folder / f"{name}-float32-builtin.paceline" for name in MODELS}
        numbers = {
            case: run_json(calls, "time", files[case[0]], 0.02, case[2])["per_call_s"][0]
            for case in cases
        }
        for modes in rounds(MODES, args.repeats):
            for case in cases:
                number = max(20, int(args.seconds / numbers[case]))
                for mode in modes:
                    with console.status(f"{case}, {mode}"):
                        one = run_json(program, mode, files[case[0]], *case[1:], number)
                    found[case][mode].append(one["per_call_s"])
    report(args, found)


def report(args: Any, found: dict[Any, dict[str, list[float]]]) -> None:
    table = Table("model", "ranks", "batch of a rank", *MODES, "ratio", title="us of a call")
    named = {
        f"{name}, {ranks} ranks, batch {batch}": of for (name, ranks, batch), of in found.items()
    }
    ratios = {key: ratio(of["server"], of["alone"]) for key, of in named.items()}
    for (name, ranks, batch), of in found.items():
        times = [f"{1e6 * spread(of[mode])['median']:.1f}" for mode in MODES]
        ours = ratios[f"{name}, {ranks} ranks, batch {batch}"]["median"]
        table.add_row(name, str(ranks), str(batch), *times, f"{ours:.2f}")
    console.print(table)
    finish(
        args,
        {"per_call_s": named},
        {key: {mode: spread(times) for mode, times in of.items()} for key, of in named.items()},
        ratios,
        [],
    )


if __name__ == "__main__":
    run(main)
