"""``paceline run``: torchrun's environment variables, script arguments, output, user errors."""

import json
import re
import subprocess
import sys

import pytest
import ranks

SHOW = """
    import json, os, sys
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
             "ROLE_RANK", "ROLE_NAME", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR",
             "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS"]
    out = {"env": {n: os.environ[n] for n in names}, "argv": sys.argv[2:], "name": __name__,
           "file": __file__, "path": sys.path[0], "torch": "torch" in sys.modules,
           "port": int(os.environ["MASTER_PORT"]), "stdin": sys.stdin.read(),
           "main": sys.modules["__main__"].__dict__ is globals(), "hello": os.environ.get("HELLO")}
    json.dump(out, open(f"{sys.argv[1]}-{os.environ['RANK']}", "w"))
    """


def shown(folder, *args, number=2, launcher="paceline", **env):
    script = ranks.write(folder, SHOW)
    ranks.run(script, folder / "out", *args, ranks=number, launcher=launcher, **env)
    return [json.loads((folder / f"out-{rank}").read_text()) for rank in range(number)]


@pytest.mark.parametrize("launcher", ["paceline", "paceline --fresh"])
def test_ranks_have_same_environment_as_under_torchrun(tmp_path, launcher):
    args = ["-n", "7", "--json", "x y", "-m", "--", "--help"]
    mine = shown(tmp_path, *args, launcher=launcher, HELLO="there")
    theirs = shown(tmp_path, *args, launcher="torchrun", HELLO="there")
    for ours, other in zip(mine, theirs, strict=True):
        forked = ours.pop("torch")
        assert forked == (launcher == "paceline")
        assert other.pop("torch") is False
        assert ours.pop("port") > 0
        other.pop("port")
        assert ours["env"].pop("MASTER_ADDR") == "127.0.0.1"
        other["env"].pop("MASTER_ADDR")
        assert ours == other


@pytest.mark.long
@pytest.mark.parametrize("name", ["OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY"])
def test_openmp_affinity_variables_disable_forking(tmp_path, name):
    value = {"OMP_PLACES": "cores", "KMP_AFFINITY": "none", "GOMP_CPU_AFFINITY": "0"}[name]
    (rank,) = shown(tmp_path, number=1, **{name: value})
    assert rank["torch"] is False


def test_module_runs_like_python_m(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    ranks.write(package, "import sys\nprint(__name__, __package__, sys.argv[1:])", "job.py")
    command = [ranks.PACELINE, "run", "-n", "2", "-m", "pack.job", "-x", "1"]
    out = ranks.run_command(command, tmp_path, ranks.environment())
    assert ranks.untagged(out.stdout) == {"__main__ pack ['-x', '1']"}


def test_identical_lines_are_merged_and_others_have_rank_prefix(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import os, sys, time
        rank = os.environ["RANK"]
        open(f"up-{rank}", "w")
        while sum(name.startswith("up-") for name in os.listdir()) < 4:
            time.sleep(0.001)
        print("all the same")
        print(f"i am {rank}")
        print("even" if int(rank) % 2 == 0 else "odd")
        print("warned", file=sys.stderr)
        sys.stdout.write("no newline at the end")
        """,
    )
    result = ranks.run(script, ranks=4)
    lines = result.stdout.splitlines()
    assert lines[0] == "all the same"
    assert {f"[{rank}] i am {rank}" for rank in range(4)} <= set(lines)
    assert sum("even" in line for line in lines) >= 1
    assert all(line.startswith("[") for line in lines if line.endswith(("even", "odd")))
    assert ranks.untagged(result.stdout) >= {"no newline at the end"}
    assert ranks.untagged(result.stderr) == {"warned"}


def test_output_of_single_rank_is_unchanged(tmp_path):
    script = ranks.write(tmp_path, "import sys; sys.stdout.write('a\\rb\\x1b[0m no end')")
    result = subprocess.run(ranks.command(script, ranks=1), capture_output=True)
    assert result.stdout == b"a\rb\x1b[0m no end"


@pytest.mark.parametrize("number", [1, 2])
def test_output_that_can_not_be_written_is_reported(tmp_path, number):
    script = ranks.write(tmp_path, "print('output of a rank')")
    with open("/dev/full", "w") as full, open(tmp_path / "err", "w") as err:
        words = ranks.command(script, ranks=number)
        process = ranks.start(words, cwd=tmp_path, stdout=full, stderr=err)
        assert process.wait(60) != 0
    assert (
        (tmp_path / "err")
        .read_text()
        .startswith(
            "paceline: lines are lost: standard output can't be written (No space left on device)\n"
        )
    )


@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_like_dev_null(tmp_path, streams):
    ranks.write(tmp_path, "import sys\nprint(1)\nprint(2, file=sys.stderr)\nsys.stdin.read()")
    command = f"exec {ranks.PACELINE} run --fresh -n 2 script.py {streams}"
    words = ["bash", "-c", command]
    result = subprocess.run(
        words, cwd=tmp_path, env=ranks.environment(), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    assert result.stdout == ""
    assert ranks.untagged(result.stderr) == ({"2"} if streams == ">&-" else set())


def test_large_output_is_complete_and_in_order(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import os
        for i in range(20000):
            print(i, os.environ["RANK"])
        """,
    )
    lines = ranks.run(script).stdout.splitlines()
    for rank in "01":
        own = [line.split()[1] for line in lines if line.endswith(f" {rank}")]
        assert own == [str(i) for i in range(20000)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0", "{script}"], "-n 0: at least one rank is needed. HINT"),
        (
            ["-n", "100000", "{script}"],
            "100,000 ranks take about .* GiB .* free on this node. HINT: -n",
        ),
        (["{folder}/none.py"], "none.py does not exist. HINT: that folder has .*script.py"),
        (["{folder}"], "is a folder. HINT"),
        (["-m", "no.such"], "there is no module no. HINT"),
        (["-m", "json"], "the package json has no __main__. HINT"),
        (
            ["{folder}/syntax.py"],
            r"syntax.py, line 2: .*\n +def f\(:\nNo rank was started. HINT: "
            "correct",
        ),
        (["{folder}/binary.py"], "can't be read as Python"),
        (["--threads", "0", "{script}"], "--threads must be 1 or more; this is 0. HINT"),
        (["--bind", "moon", "{script}"], "--bind moon is not known. HINT"),
        (["-n", "99", "--bind", "core", "{script}"], "99 ranks need a core each, and .* HINT: -n"),
    ],
)
def test_invalid_options_are_reported_before_ranks_start(tmp_path, args, message):
    script = ranks.write(tmp_path, "open('started', 'w')")
    (tmp_path / "syntax.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff\x00")
    args = [a.format(script=script, folder=tmp_path) for a in args]
    result = ranks.run_command([ranks.PACELINE, "run", *args], tmp_path, ranks.environment())
    assert result.returncode == 2
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "started").exists()


def test_port_in_use_is_reported(tmp_path):
    import socket

    script = ranks.write(tmp_path, "open('started', 'w')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = ranks.run(script, launcher=f"paceline --port {port}", check=False)
    assert result.returncode == 2
    assert f"port {port} is in use. HINT" in result.stderr
    assert not (tmp_path / "started").exists()


def test_bind_core_gives_each_rank_separate_cores(tmp_path):
    script = ranks.write(tmp_path, "import os; print(sorted(os.sched_getaffinity(0)))")
    from paceline.cluster.topology.local_resources import allowed_threads

    if len(allowed_threads()) < 2:
        pytest.skip("needs two cores")
    out = ranks.run(script, launcher="paceline --bind core").stdout
    each = len(allowed_threads()) // 2
    assert f"[0] {allowed_threads()[:each]}" in out
    assert f"[1] {allowed_threads()[each : 2 * each]}" in out


@pytest.mark.long
def test_threads_option_overrides_omp_num_threads(tmp_path):
    names = "'OMP_NUM_THREADS', 'TF_NUM_INTRAOP_THREADS'"
    script = ranks.write(
        tmp_path,
        f"""
        import os, torch
        print(*[os.environ[name] for name in ({names})], torch.get_num_threads())
        """,
    )
    assert ranks.run(script, ranks=1, OMP_NUM_THREADS="3").stdout == "3 3 3\n"
    result = ranks.run(script, ranks=1, launcher="paceline --threads 2", OMP_NUM_THREADS="3")
    assert result.stdout == "2 2 2\n"
    given = {"OMP_NUM_THREADS": "2", "TF_NUM_INTRAOP_THREADS": "1"}
    assert ranks.run(script, ranks=1, **given).stdout == "2 1 2\n"


@pytest.mark.long
def test_omp_num_threads_may_list_nested_levels(tmp_path):
    script = ranks.write(
        tmp_path, "import os, torch; print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"
    )
    assert ranks.run(script, ranks=2, OMP_NUM_THREADS="2,1").stdout == "2,1 2\n"
    assert ranks.run(script, launcher="paceline --cpus-per-rank 1", OMP_NUM_THREADS="").stdout == (
        "1 1\n"
    )


def test_large_environment_reaches_ranks(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import os, subprocess, sys
        print(sum(len(v) for n, v in os.environ.items() if n[:3] == "BIG"))
        print(len(sys.argv[2]), subprocess.call(["true"]))
        """,
    )
    large = {f"BIG{number}": "x" * 100_000 for number in range(6)}
    words = ranks.command(
        script, *["y" * 100_000] * 2
    )  # not by a warm start, whose own message has a limit
    found = subprocess.run(
        words, env=ranks.environment(**large), capture_output=True, text=True, timeout=120
    )
    assert (found.stdout, found.returncode) == ("600000\n100000 0\n", 0), found.stderr


def test_child_process_does_not_write_to_launcher_pipe(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import os, subprocess, sys
        fd = int(os.environ["PACELINE_STATUS"].partition(":")[2])
        keep = os.open("precious", os.O_CREAT | os.O_RDWR)
        os.dup2(keep, fd + 50)
        code = "from paceline.record.ring.launcher_messages import notify; notify('from a child')"
        env = {**os.environ, "PACELINE_STATUS": f"{os.getpid()}:{fd + 50}"}
        subprocess.run([sys.executable, "-c", code], env=env, pass_fds=[fd + 50], check=True)
        """,
    )
    result = ranks.run(script, ranks=1)
    assert result.stderr == "from a child"
    assert (tmp_path / "precious").read_text() == ""


def test_forked_ranks_do_not_share_random_state(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import random, numpy, os, torch
        print(random.random(), numpy.random.rand(), torch.rand(1).item(), os.environ["RANK"])
        """,
    )
    first, second = (line.split()[1:4] for line in ranks.run(script).stdout.splitlines())
    for mine, other in zip(first, second, strict=True):
        assert mine != other


def test_forked_ranks_do_not_share_state_of_the_command_line(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import sys, tempfile
        print(sys.excepthook is sys.__excepthook__, tempfile.gettempdir())
        """,
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    out = ranks.run(script, launcher=f"paceline --env TMPDIR={folder}").stdout
    assert ranks.untagged(out) == {f"True {folder}"}


@pytest.mark.parametrize("launcher", ["paceline", "paceline --fresh"])
def test_process_title_names_rank_and_script(tmp_path, launcher):
    script = ranks.write(
        tmp_path,
        """
        from pathlib import Path
        print([Path(f"/proc/self/{name}").read_text() for name in ("cmdline", "comm")])
        """,
    )
    result = subprocess.run(  # without the warm start, which has a command line of its own
        [ranks.PACELINE, "run", "-n", "2", *launcher.split()[1:], script.name, "x"],
        cwd=tmp_path,
        env=ranks.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    for rank in range(2):
        assert f"['rank {rank}: script.py x\\x00" in result.stdout
        assert f"'rank {rank}: script.\\n'" in result.stdout


def test_variables_that_the_interpreter_reads_at_its_start_reach_it(tmp_path):
    script = ranks.write(tmp_path, "import sys; print(sys.flags.hash_randomization, hash('a'))")
    out = ranks.run(script, launcher="paceline --env PYTHONHASHSEED=0").stdout
    (line,) = ranks.untagged(out)
    assert line.startswith("0 ")


def test_atexit_handlers_open_files_and_threads_finish_at_exit(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import atexit, os, threading, time
        rank = os.environ["RANK"]
        atexit.register(lambda: open(f"atexit-{rank}", "w").write("done"))
        left_open = open(f"open-{rank}", "w")
        left_open.write("not closed by the script")
        threading.Thread(target=lambda: (time.sleep(0.3), open(f"thread-{rank}", "w"))).start()
        """,
    )
    ranks.run(script, PACELINE_TESTS_WHOLE_END="1")
    for rank in "01":
        assert (tmp_path / f"atexit-{rank}").read_text() == "done"
        assert (tmp_path / f"open-{rank}").read_text() == "not closed by the script"
        assert (tmp_path / f"thread-{rank}").exists()


def test_help_lists_options_and_examples():
    result = subprocess.run(
        [ranks.PACELINE, "run", "--help"], capture_output=True, text=True, env={"COLUMNS": "100"}
    )
    assert result.returncode == 0
    for word in ("--max-restarts", "--fresh", "torchrun", "Examples", "paceline run -n 4"):
        assert word in result.stdout
    version = subprocess.run([ranks.PACELINE, "--version"], capture_output=True, text=True)
    assert version.stdout.startswith("paceline 0.")
    assert subprocess.run([sys.executable, "-m", "paceline", "--version"]).returncode == 0
