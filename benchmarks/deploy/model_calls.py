"""Claims: a call of an empty model takes less than 1 us with the builtin backend, and less than
1 us more than ONNX Runtime or AOTInductor called by hand with theirs; exported models are at least
as fast as the best of both called by hand, and the MLP 3 times as fast as eager PyTorch at batch 1;
a model loads in less than 100 ms and 60 MiB (builtin, onnxruntime); errors are at most 1e-6
(float32) and 1e-13 (float64).

All programs use one thread, whose processor time is measured: it differs less than wall time where
other programs run. Exporting takes minutes: with --models FOLDER the files are kept there, and used
again.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import console, finish, options, ratio, rounds, run, spread, target, with_rounds
from native_programs import (
    build,
    build_aotinductor_program,
    build_program,
    export,
    export_by_hand,
    run_json,
)
from rich.table import Table

from paceline.deploy.export import TOLERANCE
from paceline.deploy.model_file import onnxruntime_library

MODELS = ["empty", "mlp", "unet", "transformer"]
BACKENDS = ["builtin", "onnxruntime", "aotinductor"]
BY_HAND = {"onnxruntime by hand": "onnxruntime", "aotinductor by hand": "aotinductor"}
EAGER = "eager PyTorch"
LOAD_LIMIT_S, LOAD_LIMIT_MIB, OVERHEAD_LIMIT_S, EAGER_LIMIT = 0.1, 60.0, 1e-6, 1 / 3


def main() -> None:
    parser = options("model_calls", __doc__ or "", repeats=7)
    parser.add_argument("--models", type=Path, help="folder of exported models, kept")
    parser.add_argument("--seconds", type=float, default=0.03, help="of a measurement")
    parser.add_argument("--batches", default="1,64,1024")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    backends = args.backends.split(",")
    batches = [int(one) for one in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.models or Path(temporary)
        exports = export_models(folder, backends)
        measured = [
            one_round(folder, exports, order, batches, args.seconds, backends)
            for order in rounds(MODELS, args.repeats)
        ]
    args.models = None
    report(args, exports, measured, batches)


def export_models(folder: Path, backends: list[str]) -> dict[str, Any]:
    """Export the models that the folder lacks. Return errors and reasons of all."""
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / "exports.json"
    exports: dict[str, Any] = json.loads(said.read_text()) if said.exists() else {}
    build_program("calls", folder)
    build_program("onnxruntime_by_hand", folder)
    if "aotinductor" in backends and not (folder / "aotinductor_by_hand").exists():
        build_aotinductor_program(folder)
    for name in MODELS:
        for dtype in TOLERANCE:
            found = exports.setdefault(name, {}).setdefault(dtype, {})
            for backend in [one for one in backends if one not in found]:
                with console.status(f"{name}, {dtype}, {backend}"):
                    result = export(name, dtype, folder, backend)
                    if dtype == "float32":
                        export_by_hand(name, dtype, folder, backend)
                if isinstance(result, str):
                    found[backend] = {"reason": result}
                else:
                    error = result.candidates[0].error
                    found[backend] = {"error": error, "tolerance": result.tolerance}
                said.write_text(json.dumps(exports, indent=1))
    return exports


def one_round(
    folder: Path,
    exports: dict[str, Any],
    order: list[str],
    batches: list[int],
    seconds: float,
    backends: list[str],
) -> dict[str, Any]:
    """Return {model: {alternative: {"per_call_s": [..], ...}}}, of float32."""
    found: dict[str, Any] = {}
    for name in order:
        _, shape = build(name)
        of = found[name] = {}
        alternatives = [one for one in backends if "error" in exports[name]["float32"][one]]
        alternatives += [one for one, backend in BY_HAND.items() if backend in backends]
        alternatives.append(EAGER)
        for one in alternatives if order[0] == MODELS[0] else alternatives[::-1]:
            with console.status(f"{name}, {one}"):
                of[one] = measure(one, name, shape, folder, batches, seconds)
    return found


def measure(
    alternative: str, name: str, shape: Any, folder: Path, batches: list[int], seconds: float
) -> dict[str, Any]:
    if alternative == EAGER:
        return {"per_call_s": [time_eager(name, batch, seconds) for batch in batches]}
    by_hand: list[object] = [seconds, 1, len(shape), *shape]  # 1: float32
    if alternative == "onnxruntime by hand":
        with torch.no_grad():
            result = list(build(name)[0](torch.zeros(2, *shape)).shape[1:])
        program, file = folder / "onnxruntime_by_hand", folder / f"{name}-float32.onnx"
        words = [program, onnxruntime_library(), file, *by_hand, len(result), *result]
        return run_json(*words, "--", *batches)
    if alternative == "aotinductor by hand":
        program = folder / "aotinductor_by_hand"
        return run_json(program, folder / f"{name}-float32.pt2", *by_hand, "--", *batches)
    file = folder / f"{name}-float32-{alternative}.paceline"
    return run_json(folder / "calls", "time", file, seconds, *batches)


def time_eager(name: str, batch: int, seconds: float) -> float:
    model, shape = build(name)
    x = torch.randn(batch, *shape)
    found: list[float] = []
    with torch.inference_mode():
        model(x)
        end = time.thread_time() + seconds
        while time.thread_time() < end or len(found) < 3:
            begin = time.thread_time()
            model(x)
            found.append(time.thread_time() - begin)
    return statistics.median(found)


def report(
    args: Any,
    exports: dict[str, Any],
    measured: list[dict[str, Any]],
    batches: list[int],
) -> None:
    table = Table("model", "batch", *(names := [*BACKENDS, *BY_HAND, EAGER]), title="us")
    times: dict[str, Any] = {}
    for name in MODELS:
        for i, batch in enumerate(batches):
            row = times.setdefault(name, {}).setdefault(str(batch), {})
            for one in names:
                if one in measured[0][name]:
                    row[one] = [round_[name][one]["per_call_s"][i] for round_ in measured]
            medians = {one: 1e6 * spread(found)["median"] for one, found in row.items()}
            cells = [f"{medians[one]:.2f}" if one in medians else "" for one in names]
            table.add_row(name, str(batch), *cells)
    console.print(table)
    loads = {
        backend: {
            key: [round_["mlp"][backend][key] for round_ in measured]
            for key in ("load_s", "load_mib", "time_of_others_s")
        }
        for backend in BACKENDS
        if backend in measured[0]["mlp"]
    }
    ratios, targets = compare(times)
    for backend in [one for one in ("builtin", "onnxruntime") if one in loads]:
        for key, limit in (("load_s", LOAD_LIMIT_S), ("load_mib", LOAD_LIMIT_MIB)):
            found = with_rounds(loads[backend][key])
            targets.append(target(f"{backend}: {key} of the MLP", limit, found))
    targets += error_targets(exports)
    finish(
        args,
        {"per_call_s": times, "load": loads, "exports": exports},
        {
            name: {
                batch: {one: spread(found) for one, found in row.items()}
                for batch, row in of.items()
            }
            for name, of in times.items()
        },
        ratios,
        targets,
    )


def compare(times: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return ratios to the claims, and whether they are met."""
    ratios: dict[str, Any] = {}
    targets = []
    first = next(iter(times["empty"]))
    empty = times["empty"][first]
    ratios["empty, builtin"] = found = ratio(
        empty["builtin"], [OVERHEAD_LIMIT_S] * len(empty["builtin"])
    )
    targets.append(target("builtin: us of a call of the empty model", 1, found))
    for hand, backend in BY_HAND.items():
        if backend in empty and hand in empty:
            above = [a - b for a, b in zip(empty[backend], empty[hand], strict=True)]
            ratios[f"empty, {backend}"] = found = ratio(above, [OVERHEAD_LIMIT_S] * len(above))
            targets.append(target(f"{backend}: us above a call by hand, empty model", 1, found))
    for name in [one for one in MODELS if one != "empty"]:
        for batch, row in times[name].items():
            own = best(row, [one for one in BACKENDS if one in row])
            theirs = best(row, [one for one in BY_HAND if one in row])
            key = f"{name}, batch {batch}: {own} to {theirs}"
            ratios[key] = found = ratio(row[own], row[theirs])
            targets.append(target(key, 1, found))
    row = times["mlp"][first]
    ratios["mlp, to eager"] = found = ratio(row["builtin"], row[EAGER])
    targets.append(target("MLP at batch 1: builtin to eager PyTorch", EAGER_LIMIT, found))
    return ratios, targets


def best(row: dict[str, list[float]], names: list[str]) -> str:
    return min(names, key=lambda one: statistics.median(row[one]))


def error_targets(exports: dict[str, Any]) -> list[dict[str, Any]]:
    targets = []
    for dtype, limit in TOLERANCE.items():
        errors = [
            one["error"] for of in exports.values() for one in of[dtype].values() if "error" in one
        ]
        found = {"rounds": errors, "median": max(errors)}
        claim = f"largest error of {len(errors)} exports in {dtype}"
        targets.append(target(claim, limit, found, counted=True))
    return targets


if __name__ == "__main__":
    run(main)
