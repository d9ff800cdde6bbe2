"""Claims: a trivial trial of one rank takes at most 0.1 s; the runner of a study has at most 80 MiB
with 1,000 trials; a study of 10,000 trials opens in less than 4 s.

A trial is timed from its start to the start of the next one, one at a time; the first ones, which
wait for the import of torch, are left out. Plain Optuna is timed beside it: a fork for each trial,
without a launcher, cores, output and failures. With ``--ray-python`` Ray Tune is timed too, one
trial at a time, with the memory of the driver and of Ray's processes; with ``--propulate-python``
Propulate: evaluations by one worker of MPI ranks that remain, so nothing is started for a trial,
and a crash ends the search.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, options, ratio, run, spread, target
from rich.table import Table

TRIAL_LIMIT_S, MEMORY_LIMIT_MIB, OPEN_LIMIT_S = 0.1, 80.0, 4.0
SKIPPED = 3
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
STUDY = """
[study]
command = "{script} {{x}}"
metric = "score"
goal = "max"
trials = {trials}
search = "random"
side_by_side = 1
[parameters.x]
low = -3.0
high = 3.0
"""
OPEN = """
import sys, time
start = time.monotonic()
from pathlib import Path
from paceline.study.tune.tune import load_spec
from paceline.study.tune.open_study import read_study
from paceline.study.tune.searches.registry import make_search
from paceline.study.tune.study_view import trial_row
opened = read_study(load_spec(Path(sys.argv[1])))
search = make_search(opened.study, opened.spec)
rows = [trial_row(one, search) for one in opened.study.get_trials(deepcopy=False)]
print(len(rows), time.monotonic() - start)
"""
PLAIN = """
import os, sys, time
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
optuna.logging.set_verbosity(optuna.logging.ERROR)
storage = JournalStorage(JournalFileBackend(sys.argv[1]))
study = optuna.create_study(storage=storage, direction="maximize")
starts = []
for number in range(int(sys.argv[2])):
    starts.append(time.monotonic())
    trial = study.ask()
    x = trial.suggest_float("x", -3.0, 3.0)
    out, into = os.pipe()
    if not os.fork():
        os.write(into, str(-(x - 1) ** 2).encode())
        os._exit(0)
    value = float(os.read(out, 100))
    os.wait()
    trial.report(value, 1)
    study.tell(trial, value)
    os.close(out), os.close(into)
print([b - a for a, b in zip(starts, starts[1:])])
"""

RAY = """
import json, logging, os, sys, time
import psutil, ray
from ray import tune
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
def objective(config):
    started = time.time()
    tune.report({"score": -(config["x"] - 1) ** 2, "started": started})
tuner = tune.Tuner(
    objective,
    param_space={"x": tune.uniform(-3, 3)},
    tune_config=tune.TuneConfig(num_samples=int(sys.argv[2]), metric="score", mode="max",
                                max_concurrent_trials=1),
    run_config=tune.RunConfig(storage_path=sys.argv[1], name="ray", verbose=0),
)
found = tuner.fit()
starts = sorted(one.metrics["started"] for one in found)
me = psutil.Process()
every = [me, *me.children(recursive=True)]
memory = sum(one.memory_full_info().pss for one in every) / 2**20
print(json.dumps([[b - a for a, b in zip(starts, starts[1:])], memory]))
"""
PROPULATE = """
import json, logging, random, sys, time
from mpi4py import MPI
from propulate import Islands
from propulate.utils import get_default_propagator
logging.disable(logging.CRITICAL)
starts = []
def objective(individual, comm=None):
    starts.append(time.monotonic())
    total = comm.allreduce(1) if comm is not None else 1
    return (individual["x"] - 1) ** 2 * total
limits, rng = {"x": (-3.0, 3.0)}, random.Random(MPI.COMM_WORLD.rank)
propagator = get_default_propagator(pop_size=4, limits=limits, rng=rng)
Islands(loss_fn=objective, propagator=propagator, rng=rng, generations=int(sys.argv[2]),
        checkpoint_path=sys.argv[1], ranks_per_worker=MPI.COMM_WORLD.size).propulate()
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps([[b - a for a, b in zip(starts, starts[1:])], None]))
"""


def main() -> None:
    parser = options("trial_cost", __doc__ or "", repeats=3)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--memory-trials", type=int, default=1000)
    parser.add_argument("--open-trials", type=int, default=10_000)
    parser.add_argument("--ray-python", help="Python with ray[tune]")
    parser.add_argument("--propulate-python", help="Python with propulate and mpi4py")
    args = parser.parse_args()
    measured: dict[str, list[float]] = {"paceline_s": [], "plain_s": [], "open_s": []}
    memory: list[float] = []
    peers = {
        "ray": [args.ray_python, "-c", RAY] if args.ray_python else [],
        "propulate": [*MPIRUN, args.propulate_python, "-c", PROPULATE]
        if args.propulate_python
        else [],
    }
    with tempfile.TemporaryDirectory(prefix="trial-cost-") as name:
        folder = Path(name)
        for number in range(args.repeats):
            each, peak = run_study(folder / f"{number}", args.trials)
            measured["paceline_s"].append(statistics.median(each[SKIPPED:]))
            measured["plain_s"].append(plain_optuna(folder / f"plain-{number}", args.trials))
            for name_of, words in peers.items():
                if words:
                    each, used = peer(words, folder / f"{name_of}-{number}", args.trials)
                    measured.setdefault(f"{name_of}_s", []).append(each)
                    if used is not None:
                        measured.setdefault(f"{name_of}_mib", []).append(used)
        if args.memory_trials:
            _, peak = run_study(folder / "memory", args.memory_trials)
            memory.append(peak)
        write_trials(folder / "open", args.open_trials)
        measured["open_s"] = [open_study(folder / "open") for _ in range(args.repeats)]
    report(args, measured, memory)


def run_study(folder: Path, trials: int) -> tuple[list[float], float]:
    """Return the seconds between the starts of trials, and the peak memory of the runner (MiB)."""
    folder.mkdir()
    text = STUDY.format(script=SCRIPTS / "tune/trivial.py", trials=trials)
    (folder / "study.toml").write_text(text)
    process = subprocess.Popen(
        [str(BIN / "paceline"), "tune", "study.toml", "--json=out.json"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    peak, lines = 0.0, []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        peak = peak_mib(process.pid) if process.poll() is None else peak
        if f"trial {trials - 1}:" in line:
            break
    rest = process.stderr.read()
    if process.wait():
        raise RuntimeError("".join(lines) + rest)
    study = json.loads((folder / "out.json").read_text())
    starts = [one["started"] for one in study["trials"]]
    assert [one["state"] for one in study["trials"]] == ["complete"] * trials
    return [after - before for before, after in itertools.pairwise(starts)], peak


def peak_mib(pid: int) -> float:
    """Return the largest resident memory of a process until now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM")), 0.0)


def plain_optuna(journal: Path, trials: int) -> float:
    words = [sys.executable, "-c", PLAIN, str(journal), str(trials)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return statistics.median(json.loads(done.stdout)[SKIPPED:])


def peer(words: list[str], folder: Path, trials: int) -> tuple[float, float | None]:
    """Return the seconds of a trial of another program, and its memory (MiB) if it tells it."""
    folder.mkdir()
    done = subprocess.run(
        [*words, str(folder), str(trials)], capture_output=True, text=True, check=True
    )
    each, memory = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(each[SKIPPED:]), memory


def write_trials(folder: Path, count: int) -> None:
    """Write a study of complete trials."""
    import optuna

    from paceline.study.tune.open_study import begin_study
    from paceline.study.tune.tune import load_spec

    folder.mkdir()
    path = folder / "study.toml"
    path.write_text(STUDY.format(script="trivial.py", trials=count))
    spec = load_spec(path)
    opened = begin_study(spec, print)
    distributions = {one.name: one.distribution() for one in spec.parameters}
    before, os.fsync = os.fsync, lambda _: None  # type: ignore[assignment]
    try:
        for number in range(count):
            opened.study.add_trial(
                optuna.trial.create_trial(
                    params={"x": number / count},
                    distributions=distributions,
                    value=float(number),
                    intermediate_values={1: float(number)},
                )
            )
    finally:
        os.fsync = before


def open_study(folder: Path) -> float:
    """Return the seconds until a new process has all rows of a study, with its imports."""
    words = [sys.executable, "-c", OPEN, str(folder / "study.toml")]
    start = time.monotonic()
    subprocess.run(words, check=True, capture_output=True)
    return time.monotonic() - start


def report(args: Any, measured: dict[str, list[float]], memory: list[float]) -> None:
    medians = {name: spread(values) for name, values in measured.items() if values}
    table = Table("figure", "median", "rounds", title=f"Trials, {args.repeats} rounds")
    for name, values in measured.items():
        shown = ", ".join(f"{value:.3f}" for value in values)
        table.add_row(name, f"{statistics.median(values):.3f}", shown)
    if memory:
        table.add_row("memory_mib", f"{memory[0]:.1f}", "")
    console.print(table)
    claims = {
        "paceline_s": ("a trivial trial of one rank takes at most 0.1 s", TRIAL_LIMIT_S),
        "open_s": ("a study of 10,000 trials opens in less than 4 s", OPEN_LIMIT_S),
        "memory_mib": ("the runner has at most 80 MiB with 1,000 trials", MEMORY_LIMIT_MIB),
    }
    every = {**measured, "memory_mib": memory}
    targets = [
        target(claim, limit, every[name]) for name, (claim, limit) in claims.items() if every[name]
    ]
    finish(
        args,
        every,
        medians,
        {"paceline to plain": ratio(measured["paceline_s"], measured["plain_s"])},
        targets,
    )


if __name__ == "__main__":
    run(main)
