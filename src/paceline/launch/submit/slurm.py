"""Slurm: ``sbatch`` and ``#SBATCH`` directives."""

from .batch_options import Batch, clock, filled
from .scheduler import Scheduler


def _options(batch: Batch) -> list[str]:
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
        "--output={}": _pattern(batch),
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


def _pattern(batch: Batch) -> str:
    return batch.output or f"{batch.name}-{'%A_%a' if batch.array else '%j'}.out"


def _output(batch: Batch, job: str) -> str:
    number = job.split(";")[0]  # in a federation: 12;cluster
    name = _pattern(batch).replace("%x", batch.name).replace("%A", number)
    return name.replace("%a", "*") if batch.array else name.replace("%j", number)


def _query(job: str) -> list[str]:
    """Return the command that prints the state of a job, which may be of another cluster."""
    number, _, cluster = job.partition(";")
    named = [f"--clusters={cluster}"] if cluster else []
    return ["squeue", *named, "--noheader", "--format=%T", f"--jobs={number}"]


SLURM = Scheduler(
    title="Slurm",
    mark="#SBATCH",
    trial="$SLURM_ARRAY_TASK_ID",
    options=_options,
    command=lambda batch: ["sbatch", "--parsable"],
    by_file=False,
    identity=r"^(\d+(?:;\S+)?)$",
    query=_query,
    state=r"^([A-Z_]+)$",  # some versions print "CLUSTER: name" before it
    ended=(
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    ),
    output=_output,
    can_ask=True,
)
