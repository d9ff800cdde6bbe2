"""PBS Pro (OpenPBS) and Torque: ``qsub`` and ``#PBS`` directives. Most options differ."""

from .batch_options import Batch, clock, filled
from .scheduler import Scheduler

# Both send SIGTERM at the time limit and SIGKILL some seconds later, but no earlier signal.
NO_WARNING = (
    "PBS sends no signal before the time limit, only SIGTERM at the limit; with --time, a job "
    "with checkpoints stops automatically before the limit"
)


def _pro(batch: Batch) -> list[str]:
    want = batch.want
    if batch.array is not None and ("," in batch.array.indices or "-" not in batch.array.indices):
        raise ValueError(
            f"--array {batch.array}: PBS Pro accepts one range only. HINT: 1-7, or 1-7:2 for a step"
        )
    chunk = {
        "{}": want.hosts,
        "ncpus={}": want.slots,
        "mpiprocs={}": want.tasks,
        "ngpus={}": want.gpus,
        "mem={}": want.memory and _size(want.memory),
    }
    together = ""
    if batch.switches is not None:
        if batch.switches.count > 1 or batch.switches.wait is not None:
            raise ValueError(
                f"--switches {batch.switches}: PBS Pro supports one switch only, without a time. "
                "HINT: --switches 1, or leave it out"
            )
        together = ":group=switch"  # all nodes have one value of this resource
    table = {
        "-l select={}": ":".join(filled(chunk)),
        # Without scatter, chunks may share a node.
        "-l place={}": f"scatter{together}" if want.hosts > 1 else None,
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
            "--min-hosts: Torque ends a job that loses a node. HINT: "
            "--option=-f (its fault tolerance, if your qsub has it) and --run-option=--min-hosts=N"
        )
    if batch.switches is not None:
        raise ValueError(
            f"--switches {batch.switches}: Torque can't limit the number of switches. HINT: use "
            "a node property of your site: --option '-l nodes=2:ppn=4:PROPERTY'"
        )
    nodes = {"{}": want.hosts, "ppn={}": want.slots, "gpus={}": want.gpus}
    needs = {
        "nodes={}": ":".join(filled(nodes)),
        "mem={}": want.memory and _size(want.memory),
        "walltime={}": want.seconds and clock(want.seconds),
    }
    # One -l option with commas: Slurm's qsub uses only the last of several -l options.
    table = {"-l {}": ",".join(filled(needs)), "-t {}": batch.array}
    return [*_common(batch), *filled(table)]


def _common(batch: Batch) -> list[str]:
    table = {
        "-N {}": batch.name,
        "-j oe": True,  # stderr in the same file as stdout
        "-o {}": batch.output,
        "-q {}": batch.queue,
        "-A {}": batch.account,
        "-r y": batch.requeue or None,
    }
    return filled(table)


def _size(memory: str) -> str:
    return f"{memory.lower()}b"


def _qsub(batch: Batch) -> list[str]:
    """Return the ``qsub`` command, with the options for the output on the command line too.

    Slurm's qsub chooses the output file before it reads the script's directives. For other
    implementations the repeated options have no effect.
    """
    table = {"-N": batch.name, "-j": "oe", "-o": batch.output, "-t": batch.array}
    return ["qsub", *(str(w) for pair in table.items() if pair[1] is not None for w in pair)]


def _output(batch: Batch, job: str) -> str:
    """Return the job's output file. Default: the job's name and number, in the working directory of
    the submission.
    """
    number = job.split(".")[0].split("[")[0]
    return batch.output or f"{batch.name}.o{number}{'*' if batch.array else ''}"


_STATE = r"job_state = (\w)"
PBS = Scheduler(
    title="PBS Pro",
    mark="#PBS",
    trial="$PBS_ARRAY_INDEX",
    options=_pro,
    command=lambda batch: ["qsub"],
    by_file=True,
    identity=r"^(\d+\S*)$",
    query=lambda job: ["qstat", "-x", "-f", job],
    state=_STATE,
    ended=("F", "X"),
    output=_output,
    no_warning=NO_WARNING,
)
TORQUE = Scheduler(
    title="Torque",
    mark="#PBS",
    trial="${PBS_ARRAYID:-$SLURM_ARRAY_TASK_ID}",  # the second variable is set by Slurm's qsub
    options=_torque,
    command=_qsub,
    by_file=True,
    identity=r"^(\d+\S*)$",
    query=lambda job: ["qstat", "-f", job],
    state=_STATE,
    ended=("C",),
    output=_output,
    no_warning=NO_WARNING,
)
