"""Write predicted and measured peaks of the step of each model as JSON: FILE MODEL ..."""

import json
import sys
from pathlib import Path

from allocator_peak import measure_peak
from memory_models import DEVELOPED_WITH, KEPT_OUT

from paceline.cost.layout import Layout
from paceline.cost.layout_memory import predict_layout
from paceline.parallel.memory.trace import trace_step


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    rows = {}
    for build in DEVELOPED_WITH + KEPT_OUT:
        if names and build.__name__ not in names:
            continue
        predicted = predict_layout(trace_step(build), Layout(), 1)
        rows[build.__name__] = {
            "kept_out": build in KEPT_OUT,
            "predicted_bytes": predicted.memory.total,
            "measured_bytes": measure_peak(build),
            "peak": f"{predicted.phase} {predicted.module}".strip(),
        }
    out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
