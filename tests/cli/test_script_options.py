"""Options of Paceline that stand after the script: refused, warned of, or passed to the script."""

import contextlib
import io

import pytest
import ranks
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.common.script_options import Mention, find_mention
from paceline.launch.script_source import read_source

PLAIN = "import torch\nprint('trains')"
ARGPARSE = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs")
    given = parser.parse_args()
    """
OTHERS = "import sys\nprint(sys.argv)"


def paceline(folder, *words, text=PLAIN):
    """Run a command in this process; return its exit code and its output."""
    ranks.write(folder, text, "ddp.py")
    out = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stderr(out),
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit) as end,
    ):
        app(list(words))
    return int(end.value.code or 0), out.getvalue()


PBS = ["submit", "--scheduler", "pbs", "--dry-run"]


@pytest.mark.parametrize("text", [PLAIN, ARGPARSE])
def test_submit_option_after_script_is_refused_before_anything_is_submitted(tmp_path, text):
    tool = ranks.write(tmp_path, "#!/bin/sh\ntouch submitted\necho 1\n", "sbatch")
    tool.chmod(0o755)
    words = ["submit", "--scheduler", "slurm", "--hosts", "2", "ddp.py", "--epochs", "3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/bin")
        code, said = paceline(tmp_path, *words, "--dry-run", text=text)
    assert code == 2
    assert not (tmp_path / "submitted").exists()
    assert "--dry-run is after ddp.py and would be passed to it" in said
    here = "paceline submit --scheduler slurm --hosts 2"
    assert f"`{here} --dry-run ddp.py --epochs 3`" in said
    assert f"`{here} -- ddp.py --epochs 3 --dry-run`" in said


def test_value_of_option_moves_with_it(tmp_path):
    said = paceline(tmp_path, *PBS, "ddp.py", "x", "--time", "2h", "y")[1]
    assert "`paceline submit --scheduler pbs --dry-run --time 2h ddp.py x y`" in said
    said = paceline(tmp_path, *PBS, "ddp.py", "--time=2h", "y")[1]
    assert "`paceline submit --scheduler pbs --dry-run --time=2h ddp.py y`" in said


@pytest.mark.parametrize(
    "words",
    [
        ["run", "ddp.py", "--ranks", "4"],
        ["run", "ddp.py", "-n", "4"],
        ["run", "ddp.py", "--nproc-per-node", "4"],
        ["run", "ddp.py", "--show"],
        ["run", "ddp.py", "--no-smt"],
        ["diagnose", "ddp.py", "--minutes=3"],
        ["record", "out", "ddp.py", "--count-flops"],
    ],
)
def test_all_commands_with_script_refuse_their_options_after_it(tmp_path, words):
    code, said = paceline(tmp_path, *words)
    assert code == 2
    name = next(word for word in words if word.startswith("-")).partition("=")[0]
    assert f"{name} is after ddp.py" in said
    assert not list(tmp_path.glob("out*"))


def test_value_joined_to_a_short_option_is_seen(tmp_path):
    code, said = paceline(tmp_path, "run", "ddp.py", "x", "-n2", "y")
    assert code == 2
    assert "-n is after ddp.py" in said
    assert "`paceline run -n2 ddp.py x y`" in said
    code, said = paceline(tmp_path, *PBS, "ddp.py", "-name", "-t2")
    assert code == 0, said


def test_options_after_two_dashes_are_the_scripts(tmp_path):
    code, said = paceline(tmp_path, *PBS, "--", "ddp.py", "--dry-run", "--time", "2h")
    assert code == 0
    assert said.rstrip().endswith("run -- ddp.py --dry-run --time 2h")


def test_options_of_other_commands_are_the_scripts(tmp_path):
    code, said = paceline(tmp_path, *PBS, "ddp.py", "--bind", "core", "--help")
    assert code == 0, said


def test_script_that_may_read_the_option_is_refused_by_submit_and_warned_of_by_run(tmp_path):
    code, said = paceline(tmp_path, *PBS, "ddp.py", "--time", "2h", text=OTHERS)
    assert code == 2
    assert "It may be an option of the script or of paceline submit. HINT: for" in said
    result = ranks.run(ranks.write(tmp_path, OTHERS), "--port", "5", ranks=1)
    assert "'--port', '5'" in result.stdout
    assert "warning: --port is after" in result.stderr
    hint = "or of paceline run. HINT: for paceline run write `paceline run -n 1 --port 5 "
    assert hint in result.stderr


MENTIONS = {
    "argparse": 'parser.add_argument("--output")',
    "abbreviated": 'parser.add_argument("--output-dir")',
    "click": "@click.option('-o', '--output', default=1)\ndef f(**options): pass",
    "typer": "def main(output: str = ''): pass",
    "dataclass": "class Options:\n    output: str = ''",
    "absl": "flags.DEFINE_string('output', '', 'folder')",
    "docopt": '"""Usage: x [--output=FILE]"""',
    "read": "args = parse()\nprint(args.output)",
    "built": "for name in ('epochs', 'output'): parser.add_argument('--' + name)",
}


@pytest.mark.parametrize("kind", MENTIONS)
def test_scripts_that_define_the_option_get_it(tmp_path, kind):
    code, said = paceline(tmp_path, *PBS, "ddp.py", "--output", "x", text=MENTIONS[kind])
    assert code == 0, said
    assert "ddp.py --output x" in said
    # The same in a module that the script imports.
    ranks.write(tmp_path, MENTIONS[kind], "options.py")
    code, said = paceline(tmp_path, *PBS, "ddp.py", "--output", "x", text="import options")
    assert code == 0, said


def mention(folder, text, option):
    return find_mention(read_source(str(ranks.write(folder, text)), False), option)


@pytest.mark.parametrize(
    ("text", "option", "found"),
    [
        ("import time\nprint(time.time())", "--time", Mention.ABSENT),
        ("model.eval()", "--time", Mention.ABSENT),
        ("event.record()", "--record", Mention.ABSENT),
        ("'''paceline run -n 4 --record x train.py'''", "--record", Mention.ABSENT),
        ("parser.add_argument('-n')", "-n", Mention.FOUND),
        ("parser.add_argument('-name')", "-n", Mention.ABSENT),
        ("import click, torch.nn, numpy", "--time", Mention.ABSENT),
        ("parser.parse_known_args()", "--time", Mention.POSSIBLE),
        ("f(nargs=argparse.REMAINDER)", "--time", Mention.POSSIBLE),
        ("from sys import argv", "--time", Mention.POSSIBLE),
        ("exec(text)", "--time", Mention.POSSIBLE),
        ("from nothing_installed import main", "--time", Mention.POSSIBLE),
        ("from pytest import main", "--time", Mention.POSSIBLE),
    ],
)
def test_mentions_in_source(tmp_path, text, option, found):
    assert mention(tmp_path, text, option) is found


def test_installed_packages_are_searched(tmp_path, monkeypatch):
    package = tmp_path / "site" / "trainer"
    package.mkdir(parents=True)
    ranks.write(package, "class Arguments:\n    output: str = ''\n", "arguments.py")
    ranks.write(package, "parse('--account')", "__init__.py")
    monkeypatch.syspath_prepend(str(package.parent))
    text = "from trainer.arguments import Arguments"
    assert mention(tmp_path, text, "--output") is Mention.FOUND
    assert mention(tmp_path, text, "--account") is Mention.FOUND
    assert mention(tmp_path, text, "--queue") is Mention.POSSIBLE


def test_module_in_package_is_read(tmp_path, monkeypatch):
    package = tmp_path / "site" / "study"
    package.mkdir(parents=True)
    ranks.write(package, "from .options import parse", "main.py")
    ranks.write(package, "def parse(queue=''): pass", "options.py")
    ranks.write(package, "", "__init__.py")
    monkeypatch.syspath_prepend(str(package.parent))
    assert find_mention(read_source("study.main", True), "--queue") is Mention.FOUND
    assert find_mention(read_source("study.main", True), "--account") is Mention.ABSENT


def test_help_says_where_options_stand():
    said = " ".join(CliRunner().invoke(app, ["submit", "--help"]).output.replace("│", "").split())
    assert "Options of this command come before the script" in said
