"""LSF: ``bsub`` and ``#BSUB`` directives. Times are whole minutes; array indices begin at 1."""

from ..requeue import STOPPED_EARLY_EXIT_CODE
from .batch_options import Batch, filled
from .scheduler import Scheduler


def _options(batch: Batch) -> list[str]:
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
                "time. HINT: "
                f"--switches {batch.switches.count}"
            )
        units = f" cu[maxcus={batch.switches.count}]"
    table = {
        "-J {}": batch.name if batch.array is None else _name(batch),
        "-n {}": want.hosts * want.slots,
        "-R {}": f"span[ptile={want.slots}]{memory}{units}",
        "-gpu {}": want.gpus and f"num={want.gpus}/host",
        "-W {}": want.seconds and _minutes(want.seconds),
        "-q {}": batch.queue,
        "-P {}": batch.account,
        "-o {}": _pattern(batch),
        "-wa USR1": batch.warn or None,
        "-wt {}": (batch.warn and -(-batch.warn // 60)) or None,
        "-r": batch.requeue or None,
        "-Q {}": STOPPED_EARLY_EXIT_CODE
        if batch.requeue
        else None,  # a job that stopped early is requeued
    }
    return filled(table)


def _name(batch: Batch) -> str:
    assert batch.array is not None
    most = f"%{batch.array.at_once}" if batch.array.at_once else ""
    return f"{batch.name}[{batch.array.indices}]{most}"


def _minutes(total: int) -> str:
    minutes = -(-total // 60)
    return f"{minutes // 60}:{minutes % 60:02}"


def _pattern(batch: Batch) -> str:
    return batch.output or f"{batch.name}-{'%J_%I' if batch.array else '%J'}.out"


LSF = Scheduler(
    title="LSF",
    mark="#BSUB",
    trial="$LSB_JOBINDEX",
    options=_options,
    command=lambda batch: ["bsub"],
    by_file=False,
    identity=r"Job <(\d+)>",
    query=lambda job: ["bjobs", "-noheader", "-o", "stat", job],
    state=r"^([A-Z]+)",
    ended=("DONE", "EXIT", "ZOMBI"),
    output=lambda batch, job: _pattern(batch).replace("%J", job).replace("%I", "*"),
)
