"""The batch schedulers of ``paceline submit``: commands, options and directives of each."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..requeue import STOPPED_EARLY_EXIT_CODE
from .batch_options import Batch, clock, filled


@dataclass(frozen=True)
class Scheduler:
    """A batch scheduler.

    Attributes:
        title: Name of the scheduler in messages.
        mark: Prefix of the scheduler's directives in a script.
        trial: Shell expression for the index of a job in an array.
        options: Return the scheduler's options for a job. Raises ValueError for a request that
            the scheduler does not support.
        command: Return the command that submits a job.
        by_file: Whether the command takes the script's file name as an argument. Otherwise it
            reads the script from standard input.
        identity: Regular expression that matches the job number in the command's output.
        query: Return the command that prints the state of a job, given its number.
        state: Regular expression that matches the state in that command's output.
        ended: States of jobs that neither wait nor run.
        output: Return the file that receives a job's output, given the job and its number.
        no_warning: Reason why the scheduler sends no signal before the time limit; None if it
            sends one.
        can_ask: Whether a job can query its end time from the scheduler, and can requeue itself
            (see ``launch.requeue``).
    """

    title: str
    mark: str
    trial: str
    options: Callable[[Batch], list[str]]
    command: Callable[[Batch], list[str]]
    by_file: bool
    identity: str
    query: Callable[[str], list[str]]
    state: str
    ended: tuple[str, ...]
    output: Callable[[Batch, str], str]
    no_warning: str | None = None
    can_ask: bool = False


# Slurm: ``sbatch`` and ``#SBATCH`` directives.


def _slurm_options(batch: Batch) -> list[str]:
    want = batch.want
    table = {
        "--job-name={}": batch.name,
        "--nodes={}": want.hosts,
        "--ntasks-per-node={}": want.tasks,
        "--cpus-per-task={}": want.cpus,
        "--hint={}": want.cpus and "nomultithread",  # CPUs are cores, not hardware threads
        "--gpus-per-node={}": want.gpus,
        "--mem={}": want.memory,
        "--time={}": want.seconds and _days(want.seconds),
        "--partition={}": batch.queue,
        "--account={}": batch.account,
        "--output={}": _slurm_pattern(batch),
        "--array={}": batch.array,
        "--switches={}": batch.switches,
        "--signal=B:USR1@{}": batch.warn or None,  # B: only to the script, i.e. the launcher
        "--requeue": batch.requeue or None,
        "--open-mode=append": batch.requeue or None,
        "--no-kill": batch.goes_on or None,
    }
    return filled(table)


def _days(total: int) -> str:
    days, rest = divmod(total, 24 * 3600)
    return f"{days}-{clock(rest)}" if days else clock(rest)


def _slurm_pattern(batch: Batch) -> str:
    return batch.output or f"{batch.name}-{'%A_%a' if batch.array else '%j'}.out"


def _slurm_output(batch: Batch, job: str) -> str:
    number = job.split(";")[0]  # in a federation: 12;cluster
    name = _slurm_pattern(batch).replace("%x", batch.name).replace("%A", number)
    return name.replace("%a", "*") if batch.array else name.replace("%j", number)


def _slurm_query(job: str) -> list[str]:
    """Return the command that prints the state of a job, which may be of another cluster."""
    number, _, cluster = job.partition(";")
    named = [f"--clusters={cluster}"] if cluster else []
    return ["squeue", *named, "--noheader", "--format=%T", f"--jobs={number}"]


SLURM = Scheduler(
    title="Slurm",
    mark="#SBATCH",
    trial="$SLURM_ARRAY_TASK_ID",
    options=_slurm_options,
    command=lambda batch: ["sbatch", "--parsable"],
    by_file=False,
    identity=r"^(\d+(?:;\S+)?)$",
    query=_slurm_query,
    state=r"^([A-Z_]+)$",  # some versions print "CLUSTER: name" before it
    ended=(
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    ),
    output=_slurm_output,
    can_ask=True,
)


# LSF: ``bsub`` and ``#BSUB`` directives. Times are whole minutes; array indices begin at 1.


def _lsf_options(batch: Batch) -> list[str]:
    want = batch.want
    if batch.array is not None and batch.array.first == 0:
        raise ValueError(
            f"--array {batch.array}: the indices of LSF begin at 1. HINT: --array 1-16 for 0-15"
        )
    if batch.goes_on:
        raise ValueError(
            "--min-hosts: LSF ends a job that loses a node, unless its application "
            "profile has DJOB_COMMFAIL_ACTION=KILL_TASKS. HINT: with such a profile, --option "
            "'-app NAME' and --run-option=--min-hosts=N"
        )
    # Sites may configure memory as per task instead of per host; "/host" makes it explicit.
    memory = f" rusage[mem={want.memory}B/host]" if want.memory else ""
    # Compute units are the site's groups of hosts; by convention those at one switch.
    units = ""
    if batch.switches is not None:
        if batch.switches.wait is not None:
            raise ValueError(
                f"--switches {batch.switches}: LSF can't start a job on more switches after a "
                f"time. HINT: --switches {batch.switches.count}"
            )
        units = f" cu[maxcus={batch.switches.count}]"
    name = batch.name
    if batch.array is not None:
        most = f"%{batch.array.at_once}" if batch.array.at_once else ""
        name = f"{name}[{batch.array.indices}]{most}"
    table = {
        "-J {}": name,
        "-n {}": want.hosts * want.slots,
        "-R {}": f"span[ptile={want.slots}]{memory}{units}",
        "-gpu {}": want.gpus and f"num={want.gpus}/host",
        "-W {}": want.seconds and _minutes(want.seconds),
        "-q {}": batch.queue,
        "-P {}": batch.account,
        "-o {}": _lsf_pattern(batch),
        "-wa USR1": batch.warn or None,
        "-wt {}": (batch.warn and -(-batch.warn // 60)) or None,
        "-r": batch.requeue or None,
        # a job that stopped early is requeued
        "-Q {}": STOPPED_EARLY_EXIT_CODE if batch.requeue else None,
    }
    return filled(table)


def _minutes(total: int) -> str:
    minutes = -(-total // 60)
    return f"{minutes // 60}:{minutes % 60:02}"


def _lsf_pattern(batch: Batch) -> str:
    return batch.output or f"{batch.name}-{'%J_%I' if batch.array else '%J'}.out"


LSF = Scheduler(
    title="LSF",
    mark="#BSUB",
    trial="$LSB_JOBINDEX",
    options=_lsf_options,
    command=lambda batch: ["bsub"],
    by_file=False,
    identity=r"Job <(\d+)>",
    query=lambda job: ["bjobs", "-noheader", "-o", "stat", job],
    state=r"^([A-Z]+)",
    ended=("DONE", "EXIT", "ZOMBI"),
    output=lambda batch, job: _lsf_pattern(batch).replace("%J", job).replace("%I", "*"),
)


# PBS Pro (OpenPBS) and Torque: ``qsub`` and ``#PBS`` directives. Most options differ.

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


def _pbs_output(batch: Batch, job: str) -> str:
    """Return the job's output file. Default: the job's name and number, in the working directory of
    the submission.
    """
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
    query=lambda job: ["qstat", "-x", "-f", job],
    state=r"job_state = (\w)",
    ended=("F", "X"),
    output=_pbs_output,
    no_warning=NO_WARNING,
)
TORQUE = replace(
    PBS,
    title="Torque",
    trial="${PBS_ARRAYID:-$SLURM_ARRAY_TASK_ID}",  # the second variable is set by Slurm's qsub
    options=_torque,
    command=_qsub,
    query=lambda job: ["qstat", "-f", job],
    ended=("C",),
)
SCHEDULERS = {"slurm": SLURM, "lsf": LSF, "pbs": PBS, "torque": TORQUE}
