"""How well does Extra-P predict the next size from the points of next_size.py?

Extra-P (https://github.com/extra-p/extrap) fits sums of p^i log^j(p) to the time of a step. It gets
the same measurements of 1, 2 and 4 ranks that Paceline's cost model was fitted to, and predicts the
step on 8 ranks. It recommends five sizes; three are what the studies have. With ``--all`` it is
fitted to all sizes, the predicted one included, as a check of the fit itself.

It needs numpy 1 and runs in an environment of its own, without Paceline:

    python -m venv /tmp/extrap && /tmp/extrap/bin/pip install extrap
    /tmp/extrap/bin/python benchmarks/scale/extrap_next_size.py docs/benchmarks/scale/next_size.json
"""

import argparse
import json
import statistics
import tempfile
import warnings
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from extrap.entities.callpath import Callpath
from extrap.entities.metric import Metric
from extrap.fileio.file_reader.json_file_reader import JsonFileReader
from extrap.modelers.model_generator import ModelGenerator
from extrap.modelers.single_parameter.basic import SingleParameterModeler

NEXT = 8
GLOBAL_BATCH, RANK_BATCH = 64, 24  # of planted_studies.py


def step_s(name: str, ranks: int, samples_s: float) -> float:
    """Return the duration of a step from its throughput."""
    batch = GLOBAL_BATCH if "strong" in name else RANK_BATCH * ranks
    return batch / samples_s


def predict(points: dict[int, float], strong: bool) -> tuple[float, str]:
    """Return the time of a step on NEXT ranks, and the model."""
    rows = [{"point": [ranks], "values": [seconds]} for ranks, seconds in points.items()]
    tree = {"parameters": ["p"], "measurements": {"step": {"time": rows}}}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(tree))
        file.flush()
        experiment = JsonFileReader().read_experiment(file.name)
    modeler = SingleParameterModeler()
    modeler.allow_negative_exponents = strong
    modeler.hypotheses_building_blocks = modeler.create_default_building_blocks(
        modeler.allow_log_terms, strong
    )
    generator = ModelGenerator(experiment, modeler)
    generator.model_all()
    model = generator.models[Callpath("step"), Metric("time")]
    function = model.hypothesis.function
    return float(function.evaluate(NEXT)), str(function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", type=Path, help="JSON of next_size.py")
    parser.add_argument("--all", action="store_true", help="fit all sizes")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of fewer than five sizes
    measured = json.loads(args.studies.read_text())["measurements"]
    results: dict[str, Any] = {}
    for name, one in measured.items():
        times = {int(n): step_s(name, int(n), x) for n, x in one["samples_s"].items()}
        points = {n: seconds for n, seconds in times.items() if args.all or n < NEXT}
        predicted, function = predict(points, "strong" in name)
        known = predicted > 0
        results[name] = {
            "model": function,
            "predicted_step_s": predicted,
            "measured_step_s": times[NEXT],
            # of the throughput, as in next_size.json; a step of negative length is no prediction
            "error": times[NEXT] / predicted - 1 if known else None,
            "paceline": one["models"]["cost model"]["error"],
        }
        error = f"{100 * results[name]['error']:+.1f} %" if known else "negative step"
        print(f"{name:28} Extra-P {error:>14}, Paceline {100 * results[name]['paceline']:+.1f} %")
    errors = {
        "extrap": [abs(one["error"]) for one in results.values() if one["error"] is not None],
        "paceline": [abs(one["paceline"]) for one in results.values()],
    }
    summary = {
        who: {"studies": len(each), "median": statistics.median(each), "worst": max(each)}
        for who, each in errors.items()
    }
    print(summary)
    if args.json is not None:
        found = {
            "benchmark": "extrap_next_size",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": {"extrap": version("extrap"), "studies": args.studies.name},
            "measurements": results,
            "medians": summary,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
