"""Claims: solvers in Fortran and C++ with a learned closure conserve heat and water to rounding
over 10,000 steps, and stay within 1 % of the solution with the exact closure.

It trains and exports the closures of ``examples/export``, builds the solvers, and runs them on two
MPI ranks. --pictures FOLDER draws the drift.
"""

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, console, finish, options, run, target

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "export"
# Name: the closure's file, and the size of the solution to which a difference is compared.
SOLVERS = {
    "heat": ("conductivity.paceline", 30.0, "heat in moist soil (Fortran)"),
    "transport": ("water_flux.paceline", 0.44, "water displaces oil (C++)"),
}
CONSERVED, DRIFT = 1e-12, 0.01
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def main() -> None:
    parser = options("solvers", __doc__ or "", repeats=1)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with console.status("training, building"):
            trained = build_all(folder)
        found = {
            name: run_solver(folder / name, folder / file, args.ranks, args.steps)
            for name, (file, _, _) in SOLVERS.items()
        }
    if args.pictures is not None:
        draw(args.pictures, found)
    report(args, found, trained)


def build_all(folder: Path) -> list[str]:
    """Train the closures on two ranks and compile the solvers. Return what the training printed."""
    words = [BIN / "paceline", "run", "-n", "2", EXAMPLES / "closures.py", "--out", folder]
    trained = execute(*words)
    execute(
        *("make", "-C", EXAMPLES, f"OUT={folder}", f"PACELINE={BIN / 'paceline'}"),
        *("MPIFC=mpifort.openmpi", "MPICXX=mpicxx.openmpi"),
    )
    lines = [line for line in trained.splitlines() if "root mean square error" in line]
    return [line.replace(f"{folder}{os.sep}", "") for line in lines]


def run_solver(program: Path, model: Path, ranks: int, steps: int) -> dict[str, list[float]]:
    """Return the columns of what a solver prints, and the time of a step with both closures."""
    with console.status(f"{program.name}: {steps:,} steps"):
        words = ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "-n", ranks]
        words += ["--mca", "mpi_yield_when_idle", "1"]
        said = execute(*words, program, model, steps).splitlines()
    rows = csv.DictReader(line for line in said if not line.startswith("#"))
    columns: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(float(value))
    last = next(line for line in said if line.startswith("#"))
    columns["step_us"] = [float(word) for word in last.split(":")[1].split()[:2]]
    return columns


def execute(*words: object) -> str:
    command = [str(one) for one in words]
    env = {**os.environ, **AS_ROOT, "PACELINE_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nexit code {done.returncode} of: {' '.join(command)}")
    return done.stdout


def split(columns: dict[str, list[float]]) -> tuple[str, str, str]:
    """Return the names of the columns: what is conserved (learned, exact), and the difference."""
    learned, exact, difference = [name for name in columns if name not in ("step", "step_us")]
    return learned, exact, difference


def report(args: Any, found: dict[str, dict[str, list[float]]], trained: list[str]) -> None:
    args.pictures = None
    targets = []
    for name, columns in found.items():
        learned, exact, difference = split(columns)
        size = SOLVERS[name][1]
        for what in (learned, exact):
            lost = max(map(abs, columns[what]))
            claim = f"{name}: largest relative change of {what}"
            targets.append(target(claim, CONSERVED, [lost], counted=True))
        drift = max(columns[difference]) / size
        claim = f"{name}: largest difference to the exact closure, of {size:g}"
        targets.append(target(claim, DRIFT, [drift], counted=True))
        both = " and ".join(f"{us:.1f}" for us in columns["step_us"])
        console.print(f"{name}: a step takes {both} us, with the learned and the exact closure")
    finish(args, {"trained": trained, **found}, {}, {}, targets)


def draw(folder: Path, found: dict[str, dict[str, list[float]]]) -> None:
    """Draw what is lost, and the difference to the exact closure, of both solvers."""
    from figures import COLORS, draw_figures
    from plotly.subplots import make_subplots

    titles = [SOLVERS[name][2] for name in found]
    figure = make_subplots(1, len(found), subplot_titles=titles, horizontal_spacing=0.1)
    for column, (name, columns) in enumerate(found.items(), 1):
        learned, _, difference = split(columns)
        size = SOLVERS[name][1]
        curves = {
            "difference to the exact closure": [x / size for x in columns[difference]],
            "change of what is conserved": [abs(x) + 1e-18 for x in columns[learned]],
        }
        for (title, values), color in zip(curves.items(), COLORS, strict=False):
            figure.add_scatter(
                x=columns["step"], y=values, name=title, line={"color": color},
                showlegend=column == 1, row=1, col=column,
            )  # fmt: skip
    figure.update_layout(
        width=900,
        height=380,
        margin={"l": 80, "r": 20, "t": 70, "b": 60},
        legend={"orientation": "h", "y": 1.12, "yanchor": "bottom"},
    )
    figure.update_xaxes(title="step")
    figure.update_yaxes(type="log", exponentformat="power", range=[-18, 0])
    figure.update_yaxes(title="relative", col=1)
    draw_figures(folder, {"solver-drift": figure})


if __name__ == "__main__":
    run(main)
