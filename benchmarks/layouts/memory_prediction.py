"""Compare the predicted peak memory of a step with the peak of PyTorch's CPU allocator.

One process, data layout. Prints JSON: bytes predicted and measured, and their ratio, by model.
The LSTM and the U-Net are predicted too low: see paceline/parallel/memory/trace.py.
"""

import argparse
import json

from memory_models import DEVELOPED_WITH, KEPT_OUT

from paceline.cost.layout_memory import predict_layout
from paceline.parallel.memory.measure import measure_peak
from paceline.parallel.memory.trace import trace_step


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept-out", action="store_true", help="Measure the kept-out models too.")
    models = DEVELOPED_WITH + (KEPT_OUT if parser.parse_args().kept_out else [])
    rows = []
    for build in models:
        predicted = predict_layout(trace_step(build), "data", 1)
        measured = measure_peak(build)
        rows.append(
            {
                "model": build.__name__,
                "kept_out": build in KEPT_OUT,
                "predicted_bytes": predicted.memory.total,
                "measured_bytes": measured,
                "ratio": round(predicted.memory.total / measured, 4),
                "peak": f"{predicted.phase} {predicted.module}".strip(),
            }
        )
    print(json.dumps({"models": rows}, indent=1))


if __name__ == "__main__":
    main()
