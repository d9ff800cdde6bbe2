"""Detect the scheduler, write the batch script, and submit it."""

import os
import re
import shlex
import sys
from pathlib import Path

from ...security.outputs import write_output
from ...security.processes import find_program, python_command, run_program
from ...security.removal import TemporaryFolder
from ..job import Job
from ..job import check as check_script
from ..recovery.shrink import check_min_hosts
from .batch_options import Batch, one_line
from .schedulers import SCHEDULERS, Scheduler

QUERY_TIMEOUT_S = 30.0
# What schedulers print of jobs that they have forgotten.
UNKNOWN_JOB = r"invalid job id|is not found|unknown job"
_CHOICE = "--scheduler slurm, lsf, pbs or torque"


def scheduler(given: str | None) -> Scheduler:
    """Return the scheduler that the user named, or the one whose command is on PATH.

    Raises:
        ValueError: The name is unknown, or the commands of no scheduler, or of several, are found.
    """
    if given is None:
        return SCHEDULERS[_found()]
    if given not in SCHEDULERS:
        raise ValueError(f"--scheduler {given} is not known. HINT: {_CHOICE}")
    return SCHEDULERS[given]


def _found() -> str:
    found = [name for name, tool in (("slurm", "sbatch"), ("lsf", "bsub")) if find_program(tool)]
    if find_program("qsub"):
        kind = _qsub()
        if kind is not None:
            found.append(kind)
        elif not found:  # next to sbatch, qsub is Slurm's wrapper
            raise ValueError(
                "qsub --version names neither PBS nor Torque. "
                "HINT: --scheduler pbs or torque, or --dry-run with one of them to see the script"
            )
    if len(found) == 1:
        return found[0]
    what = f"the commands of {' and '.join(found)} are" if found else "no sbatch, bsub or qsub is"
    where = "" if found else "; on the login nodes of the cluster, Paceline finds it automatically"
    raise ValueError(f"{what} on PATH. HINT: {_CHOICE}{where}")


def _qsub() -> str | None:
    """Return "pbs" or "torque" according to ``qsub --version``, or None.

    PBS Pro prints "pbs_version = 22.05", Torque "Version: 6.1".
    """
    try:
        done = run_program("qsub", "--version", seconds=10.0)
    except OSError:
        return None
    words = done.stdout + done.stderr
    if "pbs_version" in words:
        return "pbs"
    return "torque" if re.search(r"^(version|commit):", words, re.I | re.M) else None


def _check(batch: Batch, setup: list[str], makes_folder: bool) -> None:
    """Raise ValueError for invalid options, before anything is written."""
    given = {"--queue": batch.queue, "--account": batch.account, "--output": batch.output}
    lines = [(option, value) for option, value in given.items() if value is not None]
    lines += [("--setup", line) for line in setup]
    lines += [("--option", line) for line in batch.options]
    for option, value in lines:
        if not one_line(option, value).strip():
            raise ValueError(f"{option} is empty. HINT: leave it out")
    limit = batch.want.seconds
    if batch.warn < 0 or (limit is not None and batch.warn >= limit):
        raise ValueError(
            f"--warn must be between 0 and the seconds of --time; this is {batch.warn}. HINT: "
            "--warn 120"
        )
    folder = Path(batch.output or ".").parent
    if not makes_folder and "%" not in str(folder) and not folder.is_dir():
        raise ValueError(
            f"--output {batch.output}: there is no folder {folder}, and the scheduler does not "
            "create it. "
            f"HINT: mkdir -p {shlex.quote(str(folder))}"
        )


def batch_script(
    kind: Scheduler,
    batch: Batch,
    setup: list[str],
    job: Job,
    record: Path | None,
    more: list[str],
) -> str:
    """Return the batch script.

    Args:
        kind: The scheduler.
        batch: The job's options.
        setup: Shell commands that run before ``paceline run``.
        job: The script to run.
        record: Folder for the record, or None.
        more: Further options of ``paceline run``.

    Raises:
        ValueError: An option is invalid, or not supported by the scheduler.
    """
    check_script(job)
    check_min_hosts(job.min_hosts, batch.want.hosts)
    return command_script(kind, batch, setup, f"run {_run_words(batch, job, record, more)}")


def command_script(
    kind: Scheduler, batch: Batch, setup: list[str], command: str, *, makes_folder: bool = False
) -> str:
    """Return a batch script that ends with a command of Paceline.

    Args:
        kind: The scheduler.
        batch: The job's options.
        setup: Shell commands that run before the command.
        command: The command and its arguments, shell-quoted.
        makes_folder: Whether the folder of the output is created before the job is submitted.

    Raises:
        ValueError: An option is invalid, or not supported by the scheduler.
    """
    _check(batch, setup, makes_folder)
    lines = ["#!/bin/bash"]
    lines += [f"{kind.mark} {option}" for option in [*kind.options(batch), *batch.options]]
    if batch.warn and kind.no_warning:
        lines.append(f"# No warning signal: {kind.no_warning}.")
    lines += [f"cd {shlex.quote(one_line('the folder', _here()))} || exit 1", _environment()]
    lines += setup
    if batch.array is not None:
        lines.append(f'export PACELINE_TRIAL="{kind.trial}"')
    if kind.can_ask and batch.requeue:
        lines.append("export PACELINE_REQUEUE=1")
    if not kind.can_ask and batch.want.seconds is not None:
        lines.append(f'export PACELINE_END_TIME="$(($(date +%s) + {batch.want.seconds}))"')
    # exec: the launcher replaces the shell, and so gets the signals sent to the batch script.
    lines.append(f"exec {_paceline()} {command}")
    return "\n".join(lines) + "\n"


def _here() -> str:
    """Return the working directory, by the path in PWD if that is the same directory.

    The logical path (through symbolic links) is more likely to exist on all nodes.
    """
    name = os.environ.get("PWD", "")
    return name if name and os.path.realpath(name) == os.getcwd() else os.getcwd()


def _paceline() -> str:
    """Return the shell command for ``paceline``: the installed script if it exists."""
    tool = Path(sys.executable).with_name("paceline")
    if os.access(tool, os.X_OK):
        return shlex.quote(str(tool))
    return shlex.join(python_command("-m", "paceline"))


def _environment() -> str:
    """Return the line that activates this command's Python environment in the job."""
    tools = Path(sys.executable).parent
    if sys.prefix != sys.base_prefix and (tools / "activate").exists():
        return f". {shlex.quote(one_line('the environment', str(tools / 'activate')))}"
    return f'export PATH={shlex.quote(one_line("the environment", str(tools)))}:"$PATH"'


def _run_words(batch: Batch, job: Job, record: Path | None, more: list[str]) -> str:
    """Return the arguments of ``paceline run``, shell-quoted."""
    words: list[str] = []
    if batch.want.total is not None:
        words += ["-n", str(batch.want.total)]
    if job.max_restarts:
        words += ["--max-restarts", str(job.max_restarts)]
    if job.min_hosts is not None:
        words += ["--min-hosts", str(job.min_hosts)]
    line = [shlex.join(one_line("--run-option", word) for word in [*words, *more])]
    if record is not None:
        if batch.requeue:
            raise ValueError(
                f"--record {record} can't be used with --requeue: the second start would find "
                "the record of the first. HINT: leave out one of them"
            )
        own = '/"$PACELINE_TRIAL"' if batch.array is not None else ""
        line.append(f"--record {shlex.quote(one_line('--record', str(record)))}{own}")
    line += ["-m"] if job.module else []
    if any(word.startswith("-") for word in job.args):  # meant for the script: already checked
        line.append("--")
    script = [job.name, *job.args]
    line += [shlex.quote(one_line("an argument of the script", word)) for word in script]
    return " ".join(part for part in line if part)


def submit_script(kind: Scheduler, batch: Batch, script: str) -> str:
    """Submit the script and return the job number.

    Raises:
        ValueError: The command failed, or reported no job number; the message quotes its output.
    """
    command = kind.command(batch)
    with TemporaryFolder("paceline-submit-") as folder:
        if kind.by_file:
            path = folder / batch.name
            write_output(path, script)
            command.append(str(path))
        try:
            done = run_program(*command, text="" if kind.by_file else script)
        except FileNotFoundError:
            raise ValueError(
                f"there is no {command[0]} on PATH. HINT: submit on a login node of the cluster, "
                "or print the script with --dry-run"
            ) from None
    words = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise ValueError(
            f"{command[0]} did not accept the job (exit code {done.returncode}):\n{words}\n"
            "HINT: --dry-run prints the script, --option adds options that your site requires"
        )
    number = re.search(kind.identity, done.stdout, re.M)
    if number is None:
        raise ValueError(
            f"{command[0]} printed no job number: {words!r}. HINT: --dry-run prints the script"
        )
    if done.stderr.strip():  # messages of the site to its users
        sys.stderr.write(done.stderr)
    return number[1]


def is_active(kind: Scheduler, number: str) -> bool:
    """Return whether a job waits or runs.

    Raises:
        ValueError: The scheduler does not answer.
    """
    command = kind.query(number)
    try:
        done = run_program(*command, seconds=QUERY_TIMEOUT_S)
    except OSError as error:
        raise ValueError(f"the state of job {number} is not known: {command[0]}: {error}") from None
    found = re.search(kind.state, done.stdout, re.M)
    if found is not None:
        return found[1] not in kind.ended
    words = (done.stdout + done.stderr).strip()
    if done.returncode and not re.search(UNKNOWN_JOB, words, re.I):
        raise ValueError(
            f"the state of job {number} is not known: {command[0]} ended with exit code "
            f"{done.returncode}: {words}. HINT: try again on a login node of the cluster"
        )
    return False
