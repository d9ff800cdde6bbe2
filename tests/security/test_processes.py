"""Modules and programs in a folder to which other users can add files are not executed.

Every start of Python in the source has to use ``python_command``, and every start of another
program ``program_command``.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from imports import texts

import paceline
from paceline.security import processes

SOURCE = Path(paceline.__file__).parent
BIN = Path(sys.executable).parent
# Uses of the interpreter's path that start no process.
NO_STARTS = {
    "observe/user_lines.py": {"os.path.dirname(sys.executable)"},
    "study/environment/find_environment.py": {"sys.executable"},  # in an error message
    "launch/submit/submit.py": {
        "Path(sys.executable).with_name('paceline')",
        "Path(sys.executable).parent",
    },
    "report/terminal/check.py": {"/bin/python -P -m paceline run ..."},  # is printed
    "launch/target.py": {"sys.executable"},  # in the output of --show
    "launch/monitor/rank_stacks.py": {"os.path.dirname(sys.executable)"},
    "launch/remote/start_agents.py": {
        "template.replace('{python}', re.escape(sys.executable))",
        "shlex.quote(sys.executable)",
    },
    # execv takes the path of the program in addition to the command.
    "launch/ranks/rank_process.py": {
        "os.execv(sys.executable, python_command('-u', '-X', 'faulthandler', '-c', code))"
    },
}
# What starts Python without naming the interpreter.
HIDDEN = re.compile(r"\bpython[\d.]*['\"]? -\w*[cm] \w|^(spawn|forkserver)$|^ -m paceline")
PYTHON = re.compile(r"(.*/)?python[\d.]*")  # first word of a command
PYTHON_WORDS = re.compile("executable|python|spawn|forkserver|-m paceline")  # of all these


def starts(tree: ast.AST) -> list[str]:
    """Return the expressions that may start Python in another way than by ``python_command``."""
    found = []
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    parents = {id(below): node for node in ast.walk(tree) for below in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("executable", "_base_executable"):
            whole = node
            while isinstance(parents.get(id(whole)), ast.Call | ast.Attribute):
                whole = parents[id(whole)]
            found.append(ast.unparse(whole))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            whole = parents.get(id(node))
            first = isinstance(whole, ast.List) and whole.elts[0] is node
            if "HINT" in node.value:  # for the user to type
                continue
            if (first and PYTHON.fullmatch(node.value)) or (
                id(node) not in docstrings and HIDDEN.search(node.value)
            ):
                found.append(node.value)
    return found


def test_python_is_started_only_by_python_command():
    for name, text in texts(SOURCE):
        if name == "security/processes.py" or not PYTHON_WORDS.search(text):
            continue
        others = set(starts(ast.parse(text))) - NO_STARTS.get(name, set())
        assert not others, f"{name}: {others}. HINT: paceline.security.processes.python_command"


def test_search_for_starts_finds_known_cases():
    tree = ast.parse(
        "run([sys.executable, '-m', 'paceline'])\n"
        "run(['python3', 'x.py'])\nf'{tool} {quote(path)} -m paceline'\n"
        "system('python -m paceline')\nget_context('spawn')"
    )
    assert len(starts(tree)) == 5


@pytest.fixture
def shared():
    """Create a folder like /tmp, in which another user has put a module of every known name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name) / "shared"
        folder.mkdir()
        folder.chmod(0o1777)
        (folder / "torch.py").write_text(
            f"open({str(folder)!r} + '/executed', 'a').write(__name__)"
        )
        for module in {*sys.stdlib_module_names, "numpy", "msgspec", "typer", "paceline"}:
            os.link(folder / "torch.py", folder / f"{module}.py")
        yield folder


def started(shared, *words):
    done = subprocess.run(
        [str(word) for word in words], cwd=shared, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not (shared / "executed").exists(), (shared / "executed").read_text()
    return done.stdout


def test_fresh_ranks_import_nothing_from_working_directory(shared):
    script = shared.parent / "train.py"
    script.write_text("import numpy, json, sys, wave; print(sys.path[0])")
    said = started(shared, BIN / "paceline", "run", "-n", "1", "--fresh", script)
    assert said == f"{shared.parent}\n"


def test_module_in_shared_folder_imports_installed_modules(shared):
    (shared / "my_training.py").write_text("import numpy, json, wave, my_part; print(__name__)")
    (shared / "my_part.py").write_text("")
    said = started(shared, BIN / "paceline", "run", "-n", "1", "--fresh", "-m", "my_training")
    assert said == "__main__\n"


def test_pack_on_ranks_imports_nothing_from_working_directory(shared):
    np.save(shared.parent / "x.npy", np.zeros((8, 4), np.float32))
    started(shared, BIN / "paceline", "pack", "-n", "2", shared.parent / "x.npy", "packed")
    assert (shared / "packed" / "paceline.json").exists()


def test_function_in_shared_folder_does_not_bring_other_modules(shared):
    (shared / "my_part.py").write_text("import wave\ndef change(sample):\n    return sample")
    code = "from paceline.data.sources.open_source import import_function as f; f('my_part:change')"
    started(shared, *processes.python_command("-c", code))


def test_paceline_as_module_drops_working_directory(tmp_path):
    (tmp_path / "msgspec.py").write_text("raise SystemExit('executed')")
    words = [sys.executable, "-m", "paceline", "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("paceline"), done.stderr


@pytest.mark.parametrize(("mode", "first"), [(0o755, True), (0o1777, False), (0o777, False)])
def test_folder_of_script_is_last_if_others_can_add_files(tmp_path, mode, first):
    tmp_path.chmod(mode)
    folders = processes.import_folders(str(tmp_path))
    assert folders.index(str(tmp_path)) == (0 if first else len(sys.path))


def test_working_directory_on_the_path_of_imports_is_reported(tmp_path):
    tmp_path.chmod(0o1777)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE.parent}:"}  # the empty entry
    words = [BIN / "paceline", "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert "HINT: use another working directory" in done.stderr


# Programs

STARTERS = {"run", "Popen", "call", "check_call", "check_output"}
SEARCHERS = {
    *("os.system", "os.popen", "os.execvp", "os.execlp", "os.posix_spawnp", "shutil.which"),
}
PROGRAM_WORDS = re.compile("subprocess|" + "|".join(name.rpartition(".")[2] for name in SEARCHERS))
NAMED = ("program_command(", "python_command(")
# Other first arguments of a start, by module.
RIGHT_PROGRAMS = {
    "data/staging/staged_sets.py": {"words"},  # of python_command
    "launch/monitor/rank_stacks.py": {
        "shutil.which",  # in the environment's folder
        "[tool, 'dump', '--nonblocking', '--json', '--pid', str(pid)]",  # of find_program
    },
    "launch/requeue.py": {"words"},  # of program_command
    "study/measuring_jobs.py": {"command"},  # of find_program
    "study/environment/check_packed.py": {"words"},  # of program_command
    "study/input_rate.py": {"feed.words()"},  # of python_command
    "study/probe/measure/import_time.py": {"words"},  # of find_program and python_command
    "study/script_runs/run_process.py": {"words"},  # of python_command
}


def program_starts(tree: ast.AST) -> list[str]:
    """Return what starts a program that ``security.processes`` did not find."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in SEARCHERS:
                found.append(name)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in STARTERS and ast.unparse(node.func.value) == "subprocess":
            found.append(ast.unparse(node.args[0]))
    return [one for one in found if not one.startswith(NAMED)]


def test_programs_are_started_only_by_program_command():
    for name, text in texts(SOURCE):
        if name == "security/processes.py" or not PROGRAM_WORDS.search(text):
            continue
        others = set(program_starts(ast.parse(text))) - RIGHT_PROGRAMS.get(name, set())
        assert not others, f"{name}: {others}. HINT: paceline.security.processes.program_command"


def test_search_for_program_starts_finds_known_cases():
    tree = ast.parse("subprocess.run(['srun'])\nos.system('srun')\nshutil.which('srun')")
    assert program_starts(tree) == ["['srun']", "os.system", "shutil.which"]


@pytest.mark.parametrize("entry", ["", ".", "tools"])
def test_program_is_not_found_in_working_directory(tmp_path, monkeypatch, entry):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([entry, "/usr/bin", "/bin"]))
    for folder in (tmp_path, tmp_path / "tools"):
        folder.mkdir(exist_ok=True)
        for name in ("env", "sbatch-of-another-user"):
            (folder / name).write_text("#!/bin/sh\necho executed\n")
            (folder / name).chmod(0o755)
    assert processes.find_program("env") in ("/usr/bin/env", "/bin/env")
    assert processes.find_program("./env") == "./env"  # named by the user
    with pytest.raises(FileNotFoundError, match="sbatch-of-another-user"):
        processes.program_command("sbatch-of-another-user")


def test_submit_does_not_execute_program_of_working_directory(tmp_path):
    for name in ("sbatch", "qsub", "bsub"):
        (tmp_path / name).write_text("#!/bin/sh\ntouch executed\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text("")
    environment = {**os.environ, "PATH": f":{os.environ['PATH']}"}
    words = [BIN / "paceline", "submit", "train.py"]
    subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert not (tmp_path / "executed").exists()
