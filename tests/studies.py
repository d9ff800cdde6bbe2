"""Scaling studies made of chosen figures, without a run."""

import random

from paceline.analyze.scaling.study_folder import (
    FORMAT,
    VERSION,
    PlannedPoint,
    StoredStudy,
    write_run,
    write_study,
)
from paceline.analyze.scaling.study_model import (
    STRONG,
    TEMPLATE,
    WEAK,
    BatchSource,
    EnergyReading,
    HostPlacement,
    Prediction,
    RunFigures,
    ScalingStudy,
    Setup,
    SizePoint,
    Spread,
    StateSeconds,
    StudyRequest,
    StudyRun,
    TargetResult,
)

BASE = 64  # global batch of the smallest size
STEPS = 64


def throughput(ranks, serial=0.05, crosstalk=0.001, rate=1000.0):
    """The universal scalability law, in samples/s."""
    return rate * ranks / (1 + serial * (ranks - 1) + crosstalk * ranks * (ranks - 1))


def run_figures(ranks, batch, step_s, useful_s, noise=0.0, target=None, seed=None, energy=True):
    """Figures of one run; what is not useful is exchange, two thirds of it waiting."""
    lost = step_s - useful_s
    seconds = StateSeconds(useful=useful_s, wait=lost * 2 / 3, transfer=lost / 3)
    busy = useful_s / step_s
    pop = {"load_balance": 0.9 + 0.1 * busy, "communication": busy / (0.9 + 0.1 * busy)}
    pop |= {"parallel": busy, "useful": busy, "serialisation": None, "transfer": None}
    ones = ("checkpoint", "validation", "input", "starved", "other")
    steps = [step_s * (1 + noise * (-1) ** i) for i in range(STEPS)]
    joules = [EnergyReading("package", 0.05 * ranks * STEPS * step_s, True, "RAPL, by cores")]
    return RunFigures(
        first_step=5,
        warm_up=4,
        steady=True,
        step_s=steps,
        samples_per_step=batch,
        usual_samples=batch,
        seconds=seconds,
        pop={**pop, **dict.fromkeys(ones, 1.0)},
        spread=Spread([useful_s] * ranks, [useful_s] * ranks),
        placement=[HostPlacement("node<1>", f"0-{ranks - 1}", "0-7", [0], 1)],
        memory_bytes=[(100 + rank) << 20 for rank in range(ranks)],
        energy=joules if energy else [],
        energy_notes=[] if energy else ["/sys/class/powercap is not readable"],
        seed=seed,
        to_target=target,
        startup_s=1.0,
        wall_s=1.0 + STEPS * step_s,
    )


def make_point(kind, ranks, *, serial=0.05, crosstalk=0.001, rate=1000.0, runs=3, spread=0.01,
               targets=None, energy=True, hosts=1):  # fmt: skip
    """A size whose runs differ by ``spread`` (relative standard deviation)."""
    batch = BASE if kind == STRONG else BASE * ranks
    x = throughput(ranks, serial, crosstalk, rate)
    draw = random.Random(f"{kind}{ranks}")
    found = []
    for repeat in range(runs):
        step_s = batch / x * (1 + spread * draw.gauss(0, 1))
        useful = batch / rate / ranks
        target = targets[repeat] if targets else None
        figures = run_figures(
            ranks, batch, step_s, min(useful, step_s), 0.02, target, repeat, energy
        )
        name = f"runs/n{ranks}-b{batch}-{repeat}"
        found.append(
            StudyRun(name, Setup(ranks, batch), repeat, figures, "", hosts, figures.wall_s, ranks)
        )
    return SizePoint(kind, Setup(ranks, batch), found)


def make_study(sizes=(1, 2, 4, 8), kinds=(STRONG, WEAK), failed=(), until="", notes=(), **point):
    """A study of ``sizes``; ``failed``: sizes whose runs failed, with their words."""
    points = []
    for kind in kinds:
        for ranks in sizes:
            if ranks in failed:
                batch = BASE if kind == STRONG else BASE * ranks
                words = "RuntimeError: <b>no memory</b>"
                points.append(SizePoint(kind, Setup(ranks, batch), [], words, 2))
            else:
                points.append(make_point(kind, ranks, **point))
    runs = [run for one in points for run in one.runs]
    request = StudyRequest(
        "train<1>.py",
        ["--batch-size", "{per_rank}", "--note", "50%_&"],
        "/tmp",
        list(kinds),
        list(sizes),
        until=until,
        seeds=3 if until else 1,
    )
    batch = BatchSource(TEMPLATE, BASE, "{per_rank} in the arguments")
    return ScalingStudy("/tmp/study", request, batch, points, runs, [], list(notes))


def predicted(kind, ranks, x, model="USL"):
    """A prediction with 5 % on either side."""
    batch = BASE if kind == STRONG else BASE * ranks
    return Prediction(kind, ranks, batch, x, 0.95 * x, 1.05 * x, model, [1, 2, 4], 0.0)


def reach(samples, reached=True, best=0.98, steps=100):
    return TargetResult("accuracy>=0.97", reached, best, steps, samples, 1.0)


def store(folder, study):
    """Write a study as the folder of ``paceline scale``."""
    points = [PlannedPoint(point.kind, point.setup) for point in study.points]
    folder.mkdir()
    write_study(folder, StoredStudy(FORMAT, VERSION, study.request, study.batch, points, 20))
    for run in {run.folder: run for run in study.runs}.values():
        (folder / run.folder).mkdir(parents=True)
        write_run(folder, run)
    return folder
