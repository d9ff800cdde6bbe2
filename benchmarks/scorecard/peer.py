"""TraceML on the cases of unseen.py, judged by its own words.

TraceML is not installed with the project. It needs a virtual environment that sees the same torch:

    python3 -m venv /tmp/traceml-venv
    /tmp/traceml-venv/bin/pip install traceml-ai
    echo "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \\
        > /tmp/traceml-venv/lib/python3.11/site-packages/paceline.pth
    python benchmarks/scorecard/unseen.py --peer traceml --peer-python /tmp/traceml-venv/bin/python

Its users put a context around each step of a loop of their own. So does this file, at the script's
marks; scripts without marks are not examined.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from build import SCRIPTS, build
from injectors import marks_in
from kinds import KINDS
from truth import TIMEOUT_S, WARM_UP, Bench

HERE = Path(__file__).parent
OWN = "Trainer"  # scripts of frameworks whose loops TraceML instruments automatically
STEPS = 300
TOP = """
import traceml_ai as _traceml

_traceml.init(mode="auto")
_current_step = []
"""
BEGIN = """
if not _current_step:
    _current_step.append(_traceml.trace_step($model))
    _current_step[0].__enter__()
"""
END = """
_current_step.pop().__exit__(None, None, None)
"""
HEALTHY = ("compute-bound", "no-clear-performance-bottleneck")


def examine(bench: Bench, amount: float | None, kind: str, python: Path) -> dict[str, Any]:
    """Run TraceML on a case.

    Returns:
        "said": its primary diagnosis; "right": whether it is right for the kind, or for a healthy
        run; "error" instead if it has no diagnosis.
    """
    source = SCRIPTS[bench.script].read_text()
    if not marks_in(source):
        return {"error": "a script without marks"}
    around = ("", "", "") if OWN in source else (TOP, BEGIN, END)
    name = "base" if amount is None else "fault"
    injector = bench.injector if amount is not None else None
    built = build(bench.folder / name, bench.script, injector, amount or 0.0, around)
    with tempfile.TemporaryDirectory() as folder:
        words = [str(python), "-m", "traceml_ai.launcher.cli", "run", str(HERE / "clock.py")]
        words += ["--nproc-per-node", "2", "--logs-dir", folder, "--run-name", "case"]
        words += ["--args", "--peer", "--out", folder, "--steps", f"{WARM_UP + STEPS}"]
        words += [str(built.script), *built.arguments]
        code, out, err = bench.run(words, amount, 2 * TIMEOUT_S)
        written = list(Path(folder).rglob("final_summary.json"))
        if not written:
            return {"error": f"exit code {code}: {(out + err)[-600:]}"}
        summary = json.loads(written[0].read_text())
    primary = summary.get("primary_diagnosis") or {}
    said = str(primary.get("kind") or primary.get("status") or "").lower().replace("_", "-")
    return {"said": said, "right": said in (KINDS[kind].peer if kind else HEALTHY)}
