"""PBS Pro (OpenPBS) and Torque: qsub, and lines of #PBS. They share little more than that."""

from .batch_options import Batch, clock, filled
from .scheduler import Scheduler

# Both send SIGTERM at the limit and SIGKILL some seconds later, and nothing before.
NO_WARNING = (
    "PBS sends nothing before the time limit, only SIGTERM at it; with --time a run with "
    "checkpoints leaves before it by itself"
)


def _pro(batch: Batch) -> list[str]:
    want = batch.want
    if batch.array is not None and ("," in batch.array.indices or "-" not in batch.array.indices):
        raise ValueError(
            f"--array {batch.array}: PBS Pro takes one range only. HINT: 1-7, or 1-7:2 for a step"
        )
    chunk = {
        "{}": want.hosts,
        "ncpus={}": want.slots,
        "mpiprocs={}": want.tasks,
        "ngpus={}": want.gpus,
        "mem={}": want.memory and _size(want.memory),
    }
    table = {
        "-l select={}": ":".join(filled(chunk)),
        "-l place={}": "scatter" if want.hosts > 1 else None,  # or they may share a host
        "-l walltime={}": want.seconds and clock(want.seconds),
        "-J {}": batch.array,
        "-W tolerate_node_failures=all": batch.goes_on or None,
    }
    return [*_common(batch), *filled(table)]


def _torque(batch: Batch) -> list[str]:
    want = batch.want
    if batch.array is not None and ":" in batch.array.indices:
        raise ValueError(f"--array {batch.array}: Torque has no steps. HINT: 1,3,5")
    if batch.goes_on:
        raise ValueError(
            "--min-hosts: Torque ends a job with the first host that it loses. HINT: "
            "--option=-f (its fault tolerance, if your qsub has it) and --run-option=--min-hosts=N"
        )
    nodes = {"{}": want.hosts, "ppn={}": want.slots, "gpus={}": want.gpus}
    needs = {
        "nodes={}": ":".join(filled(nodes)),
        "mem={}": want.memory and _size(want.memory),
        "walltime={}": want.seconds and clock(want.seconds),
    }
    # one -l with commas: of several, Slurm's qsub takes the last
    table = {"-l {}": ",".join(filled(needs)), "-t {}": batch.array}
    return [*_common(batch), *filled(table)]


def _common(batch: Batch) -> list[str]:
    table = {
        "-N {}": batch.name,
        "-j oe": True,  # errors beside the output, not in a file of their own
        "-o {}": batch.output,
        "-q {}": batch.queue,
        "-A {}": batch.account,
        "-r y": batch.requeue or None,
    }
    return filled(table)


def _size(memory: str) -> str:
    return f"{memory.lower()}b"


def _qsub(batch: Batch) -> list[str]:
    """Slurm's qsub decides where the output goes before it has read the script's lines, so that
    is said to it directly as well; for the others the same words twice change nothing."""
    table = {"-N": batch.name, "-j": "oe", "-o": batch.output, "-t": batch.array}
    return ["qsub", *(str(w) for pair in table.items() if pair[1] is not None for w in pair)]


def _output(batch: Batch, job: str) -> str:
    """Without --output: the job's name and number, in the folder it was submitted from."""
    number = job.split(".")[0].split("[")[0]
    return batch.output or f"{batch.name}.o{number}{'*' if batch.array else ''}"


PBS = Scheduler(
    title="PBS Pro",
    mark="#PBS",
    trial="$PBS_ARRAY_INDEX",
    options=_pro,
    command=lambda batch: ["qsub"],
    by_file=True,
    identity=r"^(\d+\S*)$",
    output=_output,
    no_warning=NO_WARNING,
)
TORQUE = Scheduler(
    title="Torque",
    mark="#PBS",
    trial="${PBS_ARRAYID:-$SLURM_ARRAY_TASK_ID}",  # the second: Slurm's qsub
    options=_torque,
    command=_qsub,
    by_file=True,
    identity=r"^(\d+\S*)$",
    output=_output,
    no_warning=NO_WARNING,
)
