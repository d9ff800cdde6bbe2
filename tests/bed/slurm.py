"""Slurm on the test cluster: the controller and login on host0, a node on each other host.

Each node has 2 CPUs, bound by task/affinity, and 2 GPUs that a job gets only on request.
"""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

from .hosts import HERE, Hosts

_WELL = ("idle", "allocated", "mixed", "completing")
_GOING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED")


class Slurm:
    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.nodes = hosts.names[1:]
        self.folder = hosts.root / "slurm"
        self.variables = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._script("start", str(len(self.nodes)))
        hosts.settle()
        hosts.guests.append(self)

    def run(
        self,
        *command: object,
        host: str = "host0",
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with Slurm's environment variables. options: those of ``hosts.run``."""
        return self.hosts.run(host, *command, env=self.variables | (env or {}), **options)

    def start(
        self,
        *command: object,
        host: str = "host0",
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        return self.hosts.start(host, *command, env=self.variables | (env or {}), **options)

    def batch(self, text: str, *options: object, **more: Any) -> str:
        """Submit a script with ``options`` of sbatch; return the job ID.

        The output is in slurm-ID.out in ``cwd``, by default the shared folder.
        """
        return self.run("sbatch", "--parsable", *options, input=text, **more).stdout.strip()

    def state(self, job: str) -> str:
        said = self.run("scontrol", "show", "job", job).stdout
        return re.findall(r"JobState=(\w+)", said)[-1]

    def wait(self, job: str, seconds: float = 60) -> str:
        """Wait for a job; return its final state: COMPLETED, FAILED, CANCELLED, TIMEOUT ..."""
        return self.wait_while(job, _GOING, seconds)

    def wait_while(self, job: str, states: tuple[str, ...], seconds: float = 60) -> str:
        """Wait while a job is in one of these states; return the next state.

        With ("PENDING",), wait for the job's start.
        """
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) in states:
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} is {state} after {seconds} s\n{self._told(job)}")
            time.sleep(0.1)
        return state

    def _told(self, job: str) -> str:
        """Return Slurm's information, the output and the processes, to debug a job that hangs."""
        told = self.run("scontrol", "show", "job", job).stdout
        file = re.search(r"StdOut=(.+)", told)
        if file and Path(file[1]).exists():
            told += Path(file[1]).read_text(errors="replace")[-6000:]
        for host in self.nodes:
            runs = self.hosts.run(host, "ps", "-eo", "pid,ppid,stat,etimes,args").stdout
            told += f"\n{host}:\n{runs}"
        return told

    def cancel(self, job: str, *options: object) -> None:
        self.run("scancel", *options, job)

    def pbs(self, on: bool = True) -> None:
        """Set whether jobs also get PBS variables, as sites with slurm-wlm-torque may configure.

        qsub and qstat work without these variables, too.
        """
        (self.folder / "plugstack.conf").write_text("optional spank_pbs.so\n" if on else "")

    def left_over(self, seconds: float = 2.0) -> list[str]:
        """Return the unfinished jobs, and ``hosts.left_over``.

        salloc ends before all nodes have reported to Slurm that they are done; therefore the check
        waits for jobs that are COMPLETING.
        """
        left = self.hosts.left_over(seconds)
        deadline = time.monotonic() + 10
        while (jobs := self._jobs()) and set(jobs.values()) == {"COMPLETING"}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return [f"job {job}" for job in jobs] + left

    def leave(self) -> None:
        if not self.hosts.up("host0") or not (jobs := self._jobs()):
            return
        self.run("scancel", *jobs, check=False)
        deadline = time.monotonic() + 5  # Hosts.restore kills the processes of remaining jobs
        while self._jobs() and time.monotonic() < deadline:
            time.sleep(0.1)

    def heal(self) -> None:
        """Restart daemons and resume nodes after hosts crashed or were disconnected."""
        self.pbs(False)
        asleep = {name for name in self.nodes if not self._has_daemon(name)}
        for name in asleep:
            self._script("slurmd", name)
        if asleep:
            self.hosts.settle(*asleep)
        deadline = time.monotonic() + 30
        while ill := self._ill():
            for name in ill:
                self.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
            if time.monotonic() > deadline:
                raise AssertionError(f"Slurm's nodes did not come back: {ill}")
            time.sleep(0.2)

    def _jobs(self) -> dict[str, str]:
        """Return the state of each unfinished job."""
        lines = self.run("squeue", "-h", "-o", "%i %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def _ill(self) -> list[str]:
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        return sorted({line.split()[0] for line in lines if line.split()[1] not in _WELL})

    def _has_daemon(self, name: str) -> bool:
        first = self.hosts.first(name)
        pid = self.folder / "run" / f"slurmd.{name}.pid"  # PID in the host's namespace
        if not pid.exists():
            return False
        comm = Path(f"/proc/{first}/root/proc/{pid.read_text().strip()}/comm")
        return comm.exists() and comm.read_text().strip() == "slurmd"

    def _script(self, command: str, last: str) -> None:
        done = subprocess.run(
            [HERE / "slurm.sh", command, self.hosts.root, last],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            logs = "".join(p.read_text()[-3000:] for p in (self.folder / "log").glob("*.log"))
            raise RuntimeError(f"slurm.sh {command} failed\n{done.stdout}{done.stderr}{logs}")
