"""Make a reference: the losses of a script on one rank, for several seeds.

Each run is a separate ``paceline run --record --metric`` process. In its arguments ``{seed}`` is
the number of the seed. A script without it gets ``PACELINE_SEED_SHIFT``: ``paceline.init`` adds it
to its seed; in other scripts the random number generators are seeded anew where the first epoch
begins, so that the order of samples and random draws differ and the initial parameters do not.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..analyze.reference.reference_file import (
    RECORD_FILE,
    merge_references,
    read_reference,
    write_reference,
)
from ..analyze.reference.run_guard import make_standard
from ..analyze.reference.series import Reference
from ..plurals import counted
from ..security.text import printable
from .script_runs.run_process import last_lines
from .trials import SEED, ScriptRequest, Trials, TrialSpec, seed_options

MAX_FIRST_STEP = 10  # of a run: one that begins later has resumed from a checkpoint
MIN_SEEDS = 2  # below, the difference between seeds is not known


@dataclass(frozen=True)
class ReferenceRequest:
    """What a reference is made of.

    Attributes:
        words: The script and its arguments, as ``paceline run`` takes them.
        metric: Value of ``--metric``; None for the loss of each backward.
        seeds: Number of runs.
        options: Other options of ``paceline run``.
    """

    words: list[str]
    metric: str | None = None
    seeds: int = 3
    options: list[str] = field(default_factory=list)


def train_reference(request: ReferenceRequest, say: Callable[[str], None]) -> Reference:
    """Train the script once for each seed, and return its losses.

    What the script writes goes to a scratch folder where the system allows it.

    Raises:
        ValueError: A run failed, resumed from a checkpoint, or has no loss.
        KeyboardInterrupt: The user interrupted a run.
    """
    found = []
    with Trials(_trials_of(request), say, "paceline-reference-") as trials:
        if trials.overlay is None and request.seeds > 1:
            say(
                "paceline: the runs share the files that the script writes, because this system "
                "can't redirect them. HINT: let each run write to its own folder, with {seed} in "
                "its name"
            )
        for seed in range(request.seeds):
            say(f"paceline: reference run {seed + 1} of {request.seeds}")
            found.append(_run(request, seed, trials))
    reference = merge_references(found)
    runs = [replace(run, name=f"seed {seed}") for seed, run in enumerate(reference.runs)]
    return replace(reference, runs=runs, command=list(request.words))


def make_reference(request: ReferenceRequest, file: Path, say: Callable[[str], None]) -> int:
    """Train and write a reference; return the exit code.

    Raises:
        ValueError: Same as for ``train_reference``, or the values are too few or not finite.
        OSError: The file can't be written.
    """
    reference = train_reference(request, say)
    standard = make_standard(reference)
    write_reference(file, reference)
    distinct, band = len(reference.distinct_runs), standard.band
    if distinct < len(reference.runs):
        say(
            f"paceline: only {distinct} of {len(reference.runs)} runs differ: the script sets its "
            "seeds itself. HINT: pass {seed} to its option for the seed, as in --seed {seed}"
        )
    if distinct < MIN_SEEDS:
        say(
            "paceline: with one run the difference between seeds is not known, and the band is "
            "wide. HINT: --seeds 3"
        )
    say(
        f"paceline: {file}: {counted(distinct, 'run')} of {band.values:,} values, up to "
        f"{band.end:,.0f} {reference.axis}. HINT: paceline run -n 2 --reference {file} "
        f"{' '.join(request.words[:3])}"
    )
    return 0


def _trials_of(request: ReferenceRequest) -> ScriptRequest:
    is_module = request.words[0] == "-m"
    script, *args = request.words[is_module:]
    return ScriptRequest(
        script, args, options=[*request.options, *["-m"] * is_module], ranks=1, minutes=math.inf
    )


def _run(request: ReferenceRequest, seed: int, trials: Trials) -> Reference:
    record, log = trials.folder / f"record-{seed}", trials.folder / f"{seed}.log"
    options = ["--metric", request.metric or "backward", "--env", "PACELINE_PROGRESS=0"]
    options += seed_options(request.words, seed)
    args = [word.replace(SEED, str(seed)) for word in trials.asked.args]
    trial = trials.run_trial(TrialSpec(record, log, options, args=args))
    if trial.code:
        last = "".join(f"\n    {line}" for line in last_lines(log))
        raise ValueError(f"the script on one rank ended with exit code {trial.code}:{last}")
    if not (record / RECORD_FILE).exists():
        lines = [x for x in log.read_text(errors="replace").splitlines() if "guard:" in x]
        raise ValueError(printable(lines[-1]) if lines else "the script on one rank had no loss")
    reference = read_reference(record)
    first = reference.runs[0].steps[0]
    if first > MAX_FIRST_STEP and reference.metric.source == "backward":
        raise ValueError(
            f"the script begins with step {first:.0f}, so it has resumed from a checkpoint. HINT: "
            "give it another checkpoint folder"
        )
    return reference
