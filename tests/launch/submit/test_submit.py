"""``paceline submit``: batch scripts for each scheduler, submit commands and user errors."""

import contextlib
import io
import subprocess
import tempfile
from pathlib import Path

import pytest
import ranks

from paceline.cli import app
from paceline.launch.submit.schedulers import SCHEDULERS
from paceline.launch.submit.submit import is_active

WISHES = """
    --hosts 2 --ranks-per-host 4 --cpus-per-rank 7 --gpus-per-host 2 --memory 64G --time 26h
    --queue gpu --account physics --name big --array 1-15%4 --warn 130 --requeue
    """
ALL = WISHES.split()
LESS = ["--hosts", "2", "--max-restarts", "1"]
ONE = ["--min-hosts", "1"]


def fake(folder: Path, name: str, text: str) -> None:
    """Install a shell script with this text as a scheduler's command."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    tool = tools / name
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)


KEEP = 'echo "$@" > called; for last; do :; done; cat -- "${last:--}" > given'


def submit(folder: Path, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, with only the fake schedulers of ``folder`` on PATH."""
    if not (folder / "train.py").exists():
        ranks.write(folder, "print('hello')", "train.py")
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PATH", f"{folder / 'bin'}:{tools(folder)}")
        with pytest.raises(SystemExit) as end:
            app(["submit", *args])
    code = int(end.value.code or 0)
    result = subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())
    if check and result.returncode:
        raise AssertionError(f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


def tools(folder: Path) -> Path:
    """Return a folder with the tools of a shell script, without the machine's sbatch and qsub."""
    place = folder / "tools"
    if not place.exists():
        place.mkdir()
        for name in ("sh", "cat", "bash"):
            (place / name).symlink_to(f"/bin/{name}")
    return place


def directives(folder: Path, kind: str, *args: str) -> list[str]:
    """Return the script's directives for the scheduler: the lines of its first comment block."""
    text = submit(folder, "--dry-run", "--scheduler", kind, *args, "train.py").stdout
    first, *lines = text.splitlines()
    assert first == "#!/bin/bash"
    marks = [line for line in lines if line.startswith(("#SBATCH ", "#BSUB ", "#PBS "))]
    assert lines[: len(marks)] == marks  # schedulers stop reading at the first command
    assert len({line.split()[0] for line in marks}) == 1
    return [line.split(" ", 1)[1] for line in marks]


def test_slurm_directives_for_all_options(tmp_path):
    assert directives(tmp_path, "slurm", *ALL) == [
        "--job-name=big",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=7",
        "--hint=nomultithread",
        "--gpus-per-node=2",
        "--mem=64G",
        "--time=1-02:00:00",
        "--partition=gpu",
        "--account=physics",
        "--output=big-%A_%a.out",
        "--array=1-15%4",
        "--signal=B:USR1@130",
        "--requeue",
        "--open-mode=append",
    ]


def test_lsf_directives_for_all_options(tmp_path):
    assert directives(tmp_path, "lsf", *ALL) == [
        "-J 'big[1-15]%4'",
        "-n 56",
        "-R 'span[ptile=28] rusage[mem=64GB/host]'",
        "-gpu num=2/host",
        "-W 26:00",
        "-q gpu",
        "-P physics",
        "-o big-%J_%I.out",
        "-wa USR1",
        "-wt 3",
        "-r",
        "-Q 75",
    ]


def test_pbs_pro_and_torque_directives_for_all_options(tmp_path):
    common = ["-N big", "-j oe", "-q gpu", "-A physics", "-r y"]
    assert directives(tmp_path, "pbs", *ALL) == [
        *common,
        "-l select=2:ncpus=28:mpiprocs=4:ngpus=2:mem=64gb",
        "-l place=scatter",
        "-l walltime=26:00:00",
        "-J 1-15%4",
    ]
    assert directives(tmp_path, "torque", *ALL) == [
        *common,
        "-l nodes=2:ppn=28:gpus=2,mem=64gb,walltime=26:00:00",
        "-t 1-15%4",
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("slurm", ["--job-name=train", "--nodes=1", "--ntasks-per-node=1"]),
        ("lsf", ["-J train", "-n 1", "-R 'span[ptile=1]'", "-o train-%J.out"]),
        ("pbs", ["-N train", "-j oe", "-l select=1:ncpus=1:mpiprocs=1"]),
        ("torque", ["-N train", "-j oe", "-l nodes=1:ppn=1"]),
    ],
)
def test_default_directives_request_only_minimum(tmp_path, kind, expected):
    if kind == "slurm":
        expected = [*expected, "--output=train-%j.out"]
    assert directives(tmp_path, kind) == expected


@pytest.mark.parametrize(
    ("time", "slurm", "lsf", "pbs"),
    [
        ("2:00:00", "02:00:00", "2:00", "02:00:00"),
        ("90min", "01:30:00", "1:30", "01:30:00"),
        ("2h", "02:00:00", "2:00", "02:00:00"),
        ("1h30m", "01:30:00", "1:30", "01:30:00"),
        ("90s", "00:01:30", "0:02", "00:01:30"),
        ("1-12:00:00", "1-12:00:00", "36:00", "36:00:00"),
    ],
)
def test_time_formats_are_converted_for_each_scheduler(tmp_path, time, slurm, lsf, pbs):
    assert f"--time={slurm}" in directives(tmp_path, "slurm", "--time", time)
    assert f"-W {lsf}" in directives(tmp_path, "lsf", "--time", time)
    assert f"-l walltime={pbs}" in directives(tmp_path, "pbs", "--time", time)


def test_batch_script_runs_launcher_with_quoted_script_arguments(tmp_path):
    folder = tmp_path / "my folder"
    folder.mkdir()
    ranks.write(folder, "pass", "train it.py")
    args = ["--dry-run", "--scheduler", "lsf", "--ranks-per-host", "2", "--hosts", "3"]
    args += ["--max-restarts", "4"]
    args += ["--record", "run/a b", "--array", "1-3", "--run-option=--bind=core"]
    args += ["--setup", "module load cuda", "--setup", "export A='b c'", "--option", "-app x"]
    out = submit(folder, *args, "--", "train it.py", "--time", "3", "it's", "", "$HOME").stdout
    *before, cd, activate, load, export, trial, run = out.splitlines()
    assert before[-1] == "#BSUB -app x"
    assert cd == f"cd '{folder}' || exit 1"
    assert activate == f". {ranks.BIN}/activate"
    assert [load, export] == ["module load cuda", "export A='b c'"]
    assert trial == 'export PACELINE_TRIAL="$LSB_JOBINDEX"'
    assert run == (
        f"exec {ranks.PACELINE} run -n 6 --max-restarts 4 --bind=core "
        "--record 'run/a b'/\"$PACELINE_TRIAL\" -- 'train it.py' --time 3 'it'\"'\"'s' '' '$HOME'"
    )
    assert not (folder / "run").exists()  # a dry run creates nothing


def test_number_of_ranks_follows_gpus_or_is_left_to_run(tmp_path):
    def run(*args):
        out = submit(tmp_path, "--dry-run", "--scheduler", "slurm", *args, "train.py").stdout
        return out.splitlines()[-1].split(" run ")[1]

    assert run("--hosts", "2", "--gpus-per-host", "4") == "-n 8 train.py"
    assert run("--hosts", "2", "--cpus-per-rank", "4") == "-n 2 train.py"
    assert run("--hosts", "2") == "train.py"


@pytest.mark.parametrize(
    ("tool", "version", "says", "number", "where"),
    [
        ("sbatch", "", "4242", "4242", "train-4242.out"),
        ("bsub", "", "Job <17> is submitted to queue <normal>.", "17", "train-17.out"),
        ("qsub", "echo pbs_version = 22.05.11", "9.head", "9.head", "train.o9"),
        ("qsub", "echo Version: 6.1.2 >&2; echo Commit: abc >&2", "8.head", "8.head", "train.o8"),
    ],
)
def test_scheduler_is_detected_from_submit_command_on_path(
    tmp_path, tool, version, says, number, where
):
    version = f'if [ "$1" = --version ]; then {version or ":"}; exit; fi'
    fake(tmp_path, tool, f"{version}\n{KEEP}\necho '{says}'" if tool == "qsub" else "")
    if tool != "qsub":
        fake(tmp_path, tool, f"echo \"$@\" > called; cat > given; echo '{says}'")
    result = submit(tmp_path, "train.py")
    assert result.stdout == number + "\n"
    assert f"job {number}; output: {where}" in result.stderr
    given = (tmp_path / "given").read_text()
    assert given == submit(tmp_path, "--dry-run", "train.py").stdout
    called = (tmp_path / "called").read_text().split()
    if "Version: 6" in version:  # Torque's qsub gets options for the output, too
        assert called[:-1] == ["-N", "train", "-j", "oe"]
    else:
        assert called in ([], ["--parsable"]) or Path(called[0]).name == "train"
    if tool == "qsub":
        assert not Path(called[-1]).exists()


def test_job_id_is_parsed_despite_site_messages(tmp_path):
    fake(tmp_path, "sbatch", "cat > given; echo 'Be nice to the others.' >&2; echo '77;east'")
    result = submit(tmp_path, "--array", "0-3", "train.py")
    assert result.stdout == "77;east\n"
    assert "Be nice to the others." in result.stderr
    assert "output: train-77_*.out" in result.stderr


def test_error_of_failed_submit_command_is_reported(tmp_path):
    fake(tmp_path, "bsub", "echo 'Bad argument for option -gpu. Job not submitted.' >&2; exit 255")
    result = submit(tmp_path, "train.py", check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert (
        "bsub did not accept the job (exit code 255):\nBad argument for option -gpu."
        in result.stderr
    )
    assert "HINT" in result.stderr


def test_missing_or_ambiguous_scheduler_is_reported(tmp_path):
    result = submit(tmp_path, "train.py", check=False)
    assert result.returncode == 2
    assert "no sbatch, bsub or qsub is on PATH. HINT: --scheduler slurm, lsf" in result.stderr
    fake(tmp_path, "qsub", "echo 'Unknown option: version'; exit 2")
    result = submit(tmp_path, "train.py", check=False)
    assert "qsub --version names neither PBS nor Torque. HINT" in result.stderr
    fake(tmp_path, "sbatch", "cat > given; echo 5")
    assert submit(tmp_path, "train.py").stdout == "5\n"  # this qsub is part of Slurm
    fake(tmp_path, "bsub", "exit 0")
    result = submit(tmp_path, "train.py", check=False)
    assert result.returncode == 2
    assert "the commands of slurm and lsf are on PATH. HINT: --scheduler" in result.stderr


def test_warning_signal_is_requested_before_time_limit_by_default(tmp_path):
    args = ["--dry-run", "--scheduler", "slurm", "--time", "2h"]
    ranks.write(tmp_path, "", "train.py")
    assert "#SBATCH --signal=B:USR1@120\n" in submit(tmp_path, *args, "train.py").stdout
    assert "--signal" not in submit(tmp_path, *args, "--warn", "0", "train.py").stdout


def test_end_time_and_requeue_variables_are_exported(tmp_path):
    def exports(kind):
        args = ["--dry-run", "--scheduler", kind, "--time", "2h", "--requeue", "train.py"]
        lines = submit(tmp_path, *args).stdout.splitlines()
        return [line for line in lines if line.startswith("export PACELINE")]

    ends = 'export PACELINE_END_TIME="$(($(date +%s) + 7200))"'
    assert exports("slurm") == ["export PACELINE_REQUEUE=1"]  # Slurm reports the end time
    assert exports("lsf") == exports("pbs") == exports("torque") == [ends]


@pytest.mark.parametrize(
    ("kind", "least", "asked"),
    [
        ("slurm", "1", ["--no-kill"]),
        ("pbs", "1", ["-W tolerate_node_failures=all"]),
        ("slurm", "2", []),
        ("lsf", "2", []),  # no directive, because all hosts are needed
    ],
)
def test_min_hosts_keeps_job_running_after_node_failure(tmp_path, kind, least, asked):
    less = [*LESS, "--min-hosts", least]
    without = directives(tmp_path, kind, *LESS)
    assert directives(tmp_path, kind, *less) == [*without, *asked]
    out = submit(tmp_path, "--dry-run", "--scheduler", kind, *less, "train.py").stdout
    assert out.endswith(f" run --max-restarts 1 --min-hosts {least} train.py\n")


@pytest.mark.parametrize(
    ("kind", "value", "asked"),
    [
        ("slurm", "2", "--switches=2"),
        ("slurm", "1@90min", "--switches=1@01:30:00"),
        ("slurm", "1@26h", "--switches=1@26:00:00"),
        ("lsf", "1", "-R 'span[ptile=1] cu[maxcus=1]'"),
        ("pbs", "1", "-l place=scatter:group=switch"),
    ],
)
def test_limit_on_leaf_switches_is_requested(tmp_path, kind, value, asked):
    assert asked in directives(tmp_path, kind, "--hosts", "2", "--switches", value)


def test_pbs_reports_that_warning_signal_is_not_supported(tmp_path):
    args = ["--dry-run", "--scheduler", "pbs", "--warn", "120", "train.py"]
    result = submit(tmp_path, *args)
    assert "# No warning signal: PBS sends no signal before the time limit" in result.stdout
    assert "paceline: --warn 120: PBS sends no signal before" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--time", "soon", "x.py"], "--time 'soon' can't be read as a time.*HINT: 2:00:00, 90min"),
        (["--time", "90", "x.py"], "--time '90' has no unit.*HINT"),
        (["--time", "2:00", "x.py"], "--time '2:00' can't be read.*differ in what.*HINT"),
        (["--time", "0h", "x.py"], "--time must be more than 0; this is '0h'. HINT"),
        (["--hosts", "0", "x.py"], "--nodes 0: at least one is needed. HINT"),
        (["--ranks-per-host", "-1", "x.py"], "--ranks-per-node -1: at least one.*HINT"),
        (
            ["--memory", "64", "x.py"],
            "--memory '64' has no unit. HINT: --memory 64G, for each node",
        ),
        (["--memory", "1.5T", "x.py"], "--memory '1.5T' can't be read as whole.*HINT"),
        (["--array", "a-b", "x.py"], "--array 'a-b' can't be read. HINT: 0-15, 0-15%4"),
        (["--array", "9-3", "x.py"], "--array '9-3': 3 is before 9. HINT: 3-9"),
        (["--scheduler", "sge", "x.py"], "--scheduler sge is not known. HINT: --scheduler slurm"),
        (["gone.py"], "gone.py does not exist. HINT: that folder has train.py, x.py"),
        (["-m", "gone"], "there is no module gone. HINT"),
        (
            ["--name", "a\n#SBATCH --uid=0", "x.py"],
            r"--name must be .*; this is 'a\\n#SBATCH --uid=0'. HINT",
        ),
        (
            ["--queue", "a\n#SBATCH -x", "x.py"],
            r"--queue 'a\\n#SBATCH -x' contains a line end.*HINT",
        ),
        (["--account", "a\rb", "x.py"], r"--account 'a\\rb' contains a line end.*HINT"),
        (["--output", "a\nb", "x.py"], r"--output 'a\\nb' contains a line end.*HINT"),
        (["--option", "a\nb", "x.py"], r"--option 'a\\nb' contains a line end.*HINT"),
        (["--setup", "a\nb", "x.py"], r"--setup 'a\\nb' contains a line end.*HINT"),
        (
            ["x.py", "a\n#SBATCH b"],
            r"an argument of the script 'a\\n#SBATCH b' contains a line end.*HINT",
        ),
        (["--queue", "", "x.py"], "--queue is empty. HINT: leave it out"),
        (["--output", "logs/%j", "x.py"], "there is no folder logs.*HINT: mkdir -p logs"),
        (["--warn", "120", "--time", "2min", "x.py"], "--warn must be .*; this is 120. HINT"),
        (["--record", "r", "--requeue", "x.py"], "--record r can't be used with --requeue: .*HINT"),
        (["--scheduler", "lsf", "--array", "0-3", "x.py"], "the indices of LSF begin at 1. HINT"),
        (["--scheduler", "pbs", "--array", "1,3", "x.py"], "PBS Pro accepts one range only. HINT"),
        (["--scheduler", "torque", "--array", "1-9:2", "x.py"], "Torque has no steps. HINT"),
        (
            [*LESS, "--min-hosts", "3", "x.py"],
            "--min-hosts 3: the job has 2 nodes. HINT: --min-hosts 2 or fewer",
        ),
        (
            ["--min-hosts", "1", "x.py"],
            "--min-hosts 1 needs restarts: .* HINT: add --max-restarts 3",
        ),
        ([*LESS, *ONE, "--scheduler", "lsf", "x.py"], "profile has DJOB_COMMFAIL.*HINT.*-app NAME"),
        (
            [*LESS, *ONE, "--scheduler", "torque", "x.py"],
            "Torque ends a job that loses .*HINT: --option",
        ),
        (
            ["--switches", "0", "x.py"],
            "--switches must be a number of leaf switches.*; this is '0'. HINT",
        ),
        (["--switches", "1@5", "x.py"], "--switches '1@5': '5' has no unit.*HINT"),
        (["--scheduler", "lsf", "--switches", "2@1h", "x.py"], "LSF can't start .*switches 2"),
        (["--scheduler", "pbs", "--switches", "2", "x.py"], "PBS Pro supports one.*HINT"),
        (["--scheduler", "torque", "--switches", "1", "x.py"], "Torque can't limit .*HINT"),
        (["--scheduler", "pbs", "x.py"], "there is no qsub on PATH. HINT"),
    ],
)
def test_invalid_options_are_reported_before_submission(tmp_path, args, message):
    fake(tmp_path, "sbatch", "echo > called; echo 1")
    ranks.write(tmp_path, "pass", "x.py")
    result = submit(tmp_path, *args, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    with pytest.raises(ValueError, match=f"(?s)^paceline: .*{message}"):
        raise ValueError(result.stderr)
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "called").exists()


WHO = """
    import os, sys
    launcher = open(f"/proc/{os.environ['SHELL_OF_JOB']}/cmdline").read().split("\\0")
    print(os.environ.get("PACELINE_TRIAL"), sys.argv[1:], launcher[1:3])
    """


@pytest.mark.long
def test_slurm_runs_jobs_submitted_with_sbatch_and_qsub(slurm):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared:  # /tmp is separate on each host
        script = ranks.write(Path(shared), WHO)
        words = ["--time", "5min", "--run-option=--fresh"]
        words += ["--setup", "export SHELL_OF_JOB=$$", "--output"]
        array = [*words, f"{shared}/%a.out", "--array", "0-1", "--warn", "60"]  # finds sbatch
        array += ["--cpus-per-rank", "1", "--switches", "1@5min"]
        alone = [*words, f"{shared}/qsub.out", "--scheduler", "torque"]
        jobs = [
            slurm.run(ranks.PACELINE, "submit", *options, script, "a b").stdout.strip()
            for options in (array, alone)
        ]
        for job in (f"{jobs[0]}_0", f"{jobs[0]}_1", jobs[1]):
            slurm.wait(job, 60)
        for name, trial in (("0", "0"), ("1", "1"), ("qsub", "None")):
            said = (Path(shared) / f"{name}.out").read_text()
            # The shell has replaced itself by the launcher, so that Slurm signals the launcher.
            assert f"{trial} ['a b'] ['{ranks.PACELINE}', 'run']" in said


GOES_ON = """
    import os, time
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    open(f"up-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}-{attempt}", "w")
    time.sleep(0 if attempt == "1" else 300)
    """


@pytest.mark.long
def test_slurm_job_continues_after_node_failure(slurm, shared_folder):
    script = ranks.write(shared_folder, GOES_ON)
    words = [*LESS, *ONE, "--run-option=--fresh", "--time", "5min", "--cpus-per-rank", "1"]
    words += ["--output", f"{shared_folder}/said"]
    told = slurm.run(ranks.PACELINE, "submit", *words, script, cwd=shared_folder)
    job = told.stdout.strip()
    ranks.wait_until(lambda: len(list(shared_folder.glob("up-*-of-2-0"))) == 2, 40)
    slurm.hosts.crash("host2")
    slurm.run("scontrol", "update", "NodeName=host2", "State=DOWN", "Reason=crashed")
    state, said = slurm.wait(job), (shared_folder / "said").read_text()
    assert state == "COMPLETED", said
    assert "host2 is lost; the job continues on 1 of 2 nodes, with 1 of 2 ranks" in said
    assert (shared_folder / "up-0-of-1-1").exists()


def test_state_of_a_job_on_another_cluster_is_queried_there(tmp_path, monkeypatch):
    """sbatch --clusters prints the number and the cluster; squeue may print the cluster first."""
    text = 'echo "$@" > called\n[ $# = 4 ] && echo CLUSTER: big && echo RUNNING\nexit 0'
    fake(tmp_path, "squeue", text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{tools(tmp_path)}")
    monkeypatch.chdir(tmp_path)
    assert is_active(SCHEDULERS["slurm"], "12;big")
    words = (tmp_path / "called").read_text().split()
    assert words == ["--clusters=big", "--noheader", "--format=%T", "--jobs=12"]
    assert not is_active(SCHEDULERS["slurm"], "12")
