"""Command lines of horovodrun and ddlrun, translated into ``paceline run`` and started."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import ranks
from typer.testing import CliRunner

from paceline.cli import app, horovodrun
from paceline.cli.horovodrun import _link
from paceline.cluster.horovod_import import SHIM
from paceline.compat.horovod.launcher.option_table import DDLRUN, HOROVODRUN
from paceline.compat.horovod.launcher.translate import translate


def run_words(line, tool="horovodrun"):
    return shlex.join(translate(tool, shlex.split(line)).words)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-np 8 -H a:4,b:4 python train.py --epochs 3", "-n 8 -H a:4,b:4 -- train.py --epochs 3"),
        ("--num-proc=2 python3 -u train.py -np 9", "-n 2 -- train.py -np 9"),
        ("-np 2 train.py", "-n 2 -- train.py"),
        ("-np 2 python -m pkg.train -H x", "-n 2 -m -- pkg.train -H x"),
        ("-np 2 python -O -W ignore t.py",
         "-n 2 --env PYTHONOPTIMIZE=1 --env PYTHONWARNINGS=ignore -- t.py"),
        ("-np 2 --cycle-time-ms 2.5 --fusion-threshold-mb 32 python t.py",
         "-n 2 --env HOROVOD_CYCLE_TIME=2.5 --env HOROVOD_FUSION_THRESHOLD=33554432 -- t.py"),
        ("-np 2 --cycle 2 python t.py", "-n 2 --env HOROVOD_CYCLE_TIME=2 -- t.py"),
        ("-np 2 --timeline-filename t.json --timeline-mark-cycles python t.py",
         "-n 2 --env HOROVOD_TIMELINE=t.json --env HOROVOD_TIMELINE_MARK_CYCLES=1 -- t.py"),
        ("-np 2 --no-stall-check --stall-check python t.py",
         "-n 2 --env HOROVOD_STALL_CHECK_DISABLE=0 -- t.py"),
        ("-np 2 --tcp --network-interfaces eth0,eth1 python t.py",
         "-n 2 --env NCCL_IB_DISABLE=1 --env GLOO_SOCKET_IFNAME=eth0 "
         "--env NCCL_SOCKET_IFNAME=eth0,eth1 -- t.py"),
        ("-np 4 --jsrun python t.py", "--launcher jsrun -n 4 -- t.py"),
        ("-np 4 --min-np 2 -H a:2,b:2,c:4 python t.py",
         "-n 8 -H a:2,b:2,c:4 --max-restarts 10 --min-hosts 1 -- t.py"),
        ("-np 4 --min-np 5 --max-np 6 --reset-limit 3 -H a:2,b:2,c:4 python t.py",
         "-n 6 -H a:2,b:2,c:4 --max-restarts 3 --min-hosts 3 -- t.py"),
    ],
)  # fmt: skip
def test_command_of_paceline_run(line, expected):
    assert run_words(line) == expected


def test_ddlrun_starts_a_rank_for_each_gpu(tmp_path, monkeypatch):
    assert run_words("-H h1,h2 python t.py", "ddlrun") == "-H h1,h2 -- t.py"
    line = "--H h1,h2 --accelerators 4 --mpiarg -pami_noib -m p python t.py -c 1"
    assert run_words(line, "ddlrun") == "-H h1:4,h2:4 -- t.py -c 1"
    assert run_words("-accelerators 3 python t.py", "ddlrun") == "-n 3 -- t.py"
    (tmp_path / "hosts").write_text("h1\nh2 slots=2\n")
    line = f"-hostfile {tmp_path / 'hosts'} -accelerators 4 python t.py"
    assert run_words(line, "ddlrun") == "-H h1:4,h2:2 -- t.py"
    monkeypatch.setenv("PBS_JOBID", "1")  # two nodes of an allocation
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    (tmp_path / "nodes").write_text("h1\nh2\n")
    assert run_words("-accelerators 3 python t.py", "ddlrun") == "-n 6 -- t.py"
    with pytest.raises(ValueError, match=r"reads no rank files\. HINT: -H"):
        run_words("-rf ranks.txt python t.py", "ddlrun")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "-np 2 --fuson 3 python t.py",
            "no option --fuson. HINT: horovodrun --fusion-threshold-mb",
        ),
        ("-np 2 --xyz python t.py", "no option --xyz. HINT: paceline horovodrun --help"),
        ("-np 2", "needs a program. HINT: paceline horovodrun -np 4 python train.py"),
        ("-np", "-np needs 1 value. HINT: horovodrun -np VALUE"),
        ("-np two python t.py", "-np two must be a number, 1 or more"),
        ("-np 2 --verbose=3 python t.py", "--verbose needs no value"),
        ("-np 2 bash t.sh", "starts bash, which is not Python"),
        ("-np 2 python", "python needs a script"),
        ("-np 2 python -c 'print()'", "does not pass the option -c to Python"),
        ("-np 2 --fusion-threshold-mb many python t.py", "--fusion-threshold-mb many is not a"),
        ("-np 9 --min-np 9 -H a:2,b:2 python t.py", "--min-np 9: the hosts have 4 slots"),
        ("-np 2 --config-file none.yaml python t.py", "none.yaml can't be read"),
        ("--host-discovery-script /bin/none python t.py", "/bin/none can't be started"),
        ("--host-discovery-script /bin/false python t.py", "ended with exit code 1"),
        ("--host-discovery-script /bin/true python t.py", "named no hosts"),
    ],
)
def test_mistakes_have_a_way_out(line, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        run_words(line)
    assert "HINT: " in str(raised.value)


def test_every_option_is_accepted_and_those_without_effect_are_named():
    values = {"--config-file", "--host-discovery-script", "--version", "--check-build"}
    line = []
    for option in HOROVODRUN:
        if not values & set(option.names) and option.role not in ("min", "max", "hostfile"):
            line += [option.names[0], *["1"] * option.values]
    command = translate("horovodrun", [*line, "python", "t.py"])
    named = {name for names in command.unused.values() for name in names}
    assert named == {one.names[0] for one in HOROVODRUN if one.unused}
    assert all(line.startswith("horovodrun ") for line in command.lines("horovodrun")[:-1])
    names = [name for table in (HOROVODRUN,) for one in table for name in one.names]
    assert len(names) == len(set(names))
    assert all(bool(one.run) + bool(one.variable) + bool(one.role) + bool(one.unused) <= 1
               for one in (*HOROVODRUN, *DDLRUN))  # fmt: skip


def test_options_of_ssh_reach_the_launcher(monkeypatch):
    from paceline.launch.remote.start_commands import TOOLS

    started = []
    monkeypatch.setenv("PACELINE_SSH_OPTIONS", "-o 'ProxyJump=a b'")
    monkeypatch.setattr(horovodrun, "app", lambda words, **_: started.append(words))
    horovodrun._run("horovodrun", shlex.split("-p 2222 -i 'my key' -H a:1 python t.py"))
    words = TOOLS["ssh"].command(["a"], ["agent"])
    at = words.index("-p")
    assert words[at - 2 : at + 5] == ["-o", "ProxyJump=a b", "-p", "2222", "-i", "my key", "a"]
    assert started == [["run", "-H", "a:1", "--", "t.py"]]


def test_hosts_are_discovered_by_the_script(tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho a:4\necho b\n")
    script.chmod(0o700)
    line = f"--host-discovery-script {script} --slots-per-host 2 --min-np 2 -np 4 python t.py"
    more = f"--host-discovery-script {script} -- t.py"
    assert run_words(line) == f"-H a:4,b:2 --max-restarts 10 --min-hosts 1 {more}"
    assert run_words(f"--max-np 5 {line}").startswith("-n 5 -H a:4,b:2 ")
    script.write_text("#!/bin/sh\necho a:2\n")  # it may be lost, too, once there are others
    line = f"--host-discovery-script {script} -np 2 python t.py"
    assert run_words(line) == f"-H a:2 --max-restarts 10 --min-hosts 1 {more}"
    script.write_text("#!/bin/sh\necho a\n")
    with pytest.raises(ValueError, match=r"printed a without a number of slots\. HINT: --slots"):
        run_words(line)


def test_configuration_file_gives_options(tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    file = tmp_path / "c.yaml"
    file.write_text(
        "controller: gloo\nparams:\n  cycle_time_ms: 3\n  cache_capacity: 9\n"
        "stall_check:\n  enabled: false\n"
    )
    line = f"-np 2 --cache-capacity 7 --config-file {file} python t.py"
    assert run_words(line) == (
        "-n 2 --env HOROVOD_CYCLE_TIME=3 --env HOROVOD_CACHE_CAPACITY=7 "
        "--env HOROVOD_STALL_CHECK_DISABLE=1 -- t.py"
    )
    for text, message in (
        ("parms: {}", "unknown section parms"),
        ("params: {x: 1}", "no x"),
        ("params: {cycle_time_ms: [1, 2]}", "cycle_time_ms is a list, and not a single value"),
        ("controller: {a: 1}", "controller is a dict"),
        ("a: &a [x]\nb: &b [*a, *a]\nparams: {cycle_time_ms: [*b, *b]}", "contains an alias"),
        ("controller: " + "[" * 20_000, "has more than 8 levels"),
        ("params: {cycle_time_ms: 2026-99-99}", "contains an invalid value: "),
        (f"params: {{cycle_time_ms: {'9' * 5000}}}", "contains an invalid value: "),
        ("#" * (65 << 10), "can't be read"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message) as raised:
            run_words(line)
        assert "HINT: " in str(raised.value)
        assert len(str(raised.value)) < 2 * len(str(file)) + 250
    file.write_text("")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ValueError, match="HINT: pip install pyyaml"):
        run_words(line)


def test_other_python_environment_is_refused(tmp_path):
    program = tmp_path / "bin/python"
    with pytest.raises(ValueError, match="not the Python of this environment"):
        run_words(f"-np 2 {program} t.py")
    assert run_words(f"-np 2 {sys.executable} t.py") == "-n 2 -- t.py"


def test_link_runs_the_command_and_replaces_no_program(tmp_path):
    """One job, by a link named horovodrun."""
    link = _link("horovodrun", tmp_path)
    assert _link("horovodrun", tmp_path) == link  # once more
    script = ranks.write(tmp_path, "import os\nprint('size', os.environ['WORLD_SIZE'])\n")
    words = [link, "-np", "2", "--gloo", "--log-level", "INFO", "python", "-u", script]
    done = ranks.run_command(words, tmp_path, ranks.environment())
    assert done.returncode == 0, done.stderr
    assert "size 2" in done.stdout
    assert "horovodrun --gloo: no effect" in done.stderr
    shown = "paceline: paceline run -n 2 --env HOROVOD_LOG_LEVEL=INFO -- "
    assert shown in done.stderr
    Path(link).unlink()
    (tmp_path / "ddlrun").write_text("a program")
    with pytest.raises(ValueError, match=r"exists, and is not a link of Paceline\. HINT: "):
        _link("ddlrun", tmp_path)
    with pytest.raises(ValueError, match="HINT: mkdir"):
        _link("ddlrun", tmp_path / "none")


def test_command_answers_without_a_job():
    def out(*words):
        return CliRunner().invoke(app, list(words)).stdout

    assert out("horovodrun", "--shim").strip() == str(SHIM)
    assert out("horovodrun", "--version").startswith("paceline ")
    assert "[X] PyTorch" in out("horovodrun", "-cb")
    assert "Start PROGRAM like horovodrun" in out("horovodrun")
    assert "--min-num-proc" in out("horovodrun", "--help").replace("\n", " ")
