"""Claim: on two hosts a failure is reported within 1 second, and training continues within 10.

One rank on each of two hosts, which are Linux namespaces of this machine (tests/bed: root, sshd and
iproute2 are needed). On host2 the rank is killed, or the host crashes, or its link is cut; the job
goes on with what is left, by `paceline run --max-restarts 1 --min-hosts 1` over ssh from a third
host, and by torchrun --nnodes 1:2 on both (c10d rendezvous on host1). Measured from the fault until
a launcher's first word of it, and until the first step of the second attempt has ended. A cut link
is noticed by the silence: --hang-timeout for Paceline, the collectives' timeout for torchrun, both
--silence seconds. torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, as in fault_times.py; its
rendezvous is left as it is, which after a loss waits half a minute for hosts that may yet come.
"""

import contextlib
import functools
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, Heard, run
from emulated_hosts import bed, open_hosts
from fault_times import PATIENCE, RESTARTS, WORDS, compared, parser, report, script, seconds_of

FAULTS = ("killed", "crashed", "cut off")
HERE, THERE = "host1", "host2"
PORT = 29533


def main() -> None:
    args = parser("host_fault_times", __doc__ or "", FAULTS).parse_args()
    with open_hosts(2) as hosts:
        times = compared(args, functools.partial(measure, hosts, silence=args.silence))
    report(f"{THERE}, or its rank, was", args, times)


def measure(hosts: bed.Hosts, fault: str, launcher: str, silence: float) -> dict[str, float]:
    """Return seconds from the fault; PATIENCE if there was no report, or training ended."""
    with _shared_folder(hosts) as folder:
        launchers = start(hosts, folder, launcher, silence, fault)
        with Heard(launchers, (*WORDS[launcher], f"{THERE} is lost")) as heard:
            if fault != "killed":
                cause_fault(hosts, folder, fault, heard)
            heard.wait(PATIENCE)
        return seconds_of(folder, heard)


@contextlib.contextmanager
def _shared_folder(hosts: bed.Hosts) -> Iterator[Path]:
    """Yield a folder that all hosts see; restore the hosts at the end."""
    folder = hosts.new_folder()
    try:
        yield folder
    finally:
        hosts.restore()
        shutil.rmtree(folder, ignore_errors=True)


def start(
    hosts: bed.Hosts, folder: Path, launcher: str, silence: float, fault: str
) -> list[subprocess.Popen[str]]:
    """The launcher of the whole job, or torchrun on each host."""
    words = {
        "paceline": [
            *("run", "-H", f"{HERE}:1,{THERE}:1", "--max-restarts", "1", "--min-hosts", "1"),
            *("--hang-timeout", str(silence), "--record", str(folder / "record")),
        ],
        "torchrun": [
            *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HERE}:{PORT}", "--rdzv-id", "1"),
        ],
    }[launcher]
    command = [str(BIN / launcher), *words, *script(fault, folder, launcher, silence)]
    return [
        hosts.start(name, *command, cwd=folder, env=RESTARTS, stdout=subprocess.DEVNULL)
        for name in (["host0"] if launcher == "paceline" else [HERE, THERE])
    ]


def cause_fault(hosts: bed.Hosts, folder: Path, fault: str, heard: Heard) -> None:
    """Crash the host or cut its link, once the job trains."""
    reached, deadline = folder / "reached", time.monotonic() + PATIENCE
    while not (reached.exists() and reached.read_text()):
        if heard.wait(0.01) or time.monotonic() > deadline:
            raise SystemExit(f"no rank has come to the fault ({PATIENCE:.0f} s at most)")
    if reached.read_text() != THERE:
        raise SystemExit(f"rank 1 is on {reached.read_text()}, not on {THERE}")
    (folder / "fault").write_text(str(time.monotonic()))
    if fault == "crashed":
        hosts.crash(THERE)
    else:
        hosts.link(THERE, False)


if __name__ == "__main__":
    run(main)
