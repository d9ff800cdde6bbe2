"""What all commands share: help, spellings of options, --json, completion and --version."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import ranks
import typer
from typer.testing import CliRunner

from paceline import cli
from paceline.cli import app
from paceline.cli.common.command import STDOUT, with_options
from paceline.cli.common.options import HostAndEnvOptions, RankOptions
from paceline.cli.diagnose import DiagnosisOutputs
from paceline.cli.run import RunCommand

GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands
TEST_SHELLS = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"  # of Typer, for its own tests
NAMED_FIRST = 8  # options of paceline run that are shown before the groups


def paceline(*words, cwd=".", **variables):
    environment = ranks.environment(COLUMNS="100", **variables)
    return ranks.run_command([ranks.PACELINE, *words], Path(cwd), environment)


def spelled(*words):
    run = COMMANDS["run"]
    assert isinstance(run, RunCommand)
    return run.present_spelling(list(words))


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_commands_in_groups(option):
    shown = paceline(option).stdout
    for heading in ("Run and submit", "Measure and understand", "Data", "Machine"):
        assert f"─ {heading} ─" in shown
    assert all(re.search(rf"│ {name} ", shown) for name in COMMANDS)


def test_short_help_of_commands_fits_a_line():
    for name, command in COMMANDS.items():
        text = command.short_help or command.help
        assert 10 < len(text) <= 70, name
        assert not text.endswith("."), name


@pytest.mark.parametrize("columns", ["60", "80"])
def test_help_fills_the_lines_of_narrow_terminals(columns):
    shown = ranks.run_command(
        [ranks.PACELINE, "verify", "--help"], Path(), ranks.environment(COLUMNS=columns)
    ).stdout
    paragraph = (
        shown.split("SCRIPT runs", 1)[1].split("\n \n")[0].split("\n" + " " * int(columns))[0]
    )
    lines = [line.rstrip() for line in paragraph.rstrip().splitlines()]
    assert len(lines) > 2
    assert all(len(line) > int(columns) - 20 for line in lines[:-1])


def test_run_help_shows_few_options_before_the_groups():
    panels = [getattr(one, "rich_help_panel", None) for one in COMMANDS["run"].params]
    first = [panel for panel in panels if panel is None]
    assert len(first) - 2 <= NAMED_FIRST  # without the script and its arguments
    assert {"Nodes", "Cores and threads", "Failures and restarts", "Data"} <= set(panels)


def test_examples_in_help_have_known_options():
    for name, command in COMMANDS.items():
        for line in (command.epilog or "").split("\n\n")[1:]:
            words = line.split("  ")[0].split()
            words = words[words.index("paceline") + 2 :]
            options = {one for p in COMMANDS[name].params for one in (*p.opts, *p.secondary_opts)}
            options |= getattr(command, "foreign", {}).get(name, set())
            if "run" in line and name != "run":
                continue
            script = next((i for i, one in enumerate(words) if one.endswith(".py")), len(words))
            for word in words[:script]:
                assert not word.startswith("-") or word.partition("=")[0] in options, line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--json", "t.py"], [f"--json={STDOUT}", "t.py"]),
        (["--json", "out.json", "t.py"], ["--json=out.json", "t.py"]),
        (["--json=out", "t.py"], ["--json=out", "t.py"]),
        (["-n", "2", "--show", "t.py", "--show"], ["-n", "2", "--dry-run", "t.py", "--show"]),
        (["t.py", "--json", "a.json"], ["t.py", "--json", "a.json"]),
        (["--record", "--json", "t.py"], ["--record", "--json", "t.py"]),
        (["--", "--show"], ["--", "--show"]),
        (["--nproc-per-node=4", "t.py"], ["--ranks=4", "t.py"]),
        (["--master_port", "0", "t.py"], ["--port", "0", "t.py"]),
    ],
)
def test_spellings_of_own_options_are_translated(words, expected):
    assert spelled(*words) == expected


@pytest.mark.parametrize("option", ["--nnodes", "--rdzv-endpoint", "--standalone"])
def test_options_of_torchrun_are_answered(option):
    shown = paceline("run", option, "1", "train.py")
    assert shown.returncode == 2
    assert option in shown.stderr
    assert "HINT" in shown.stderr


def test_options_of_torchrun_with_an_equivalent_are_announced(tmp_path):
    script = ranks.write(tmp_path, "pass")
    shown = paceline("run", "--nproc-per-node", "2", "--show", script, cwd=tmp_path)
    assert "--nproc-per-node is --ranks of paceline run" in shown.stderr
    assert shown.returncode == 0
    assert "2 ranks" in shown.stdout


@pytest.mark.parametrize(
    ("words", "suggestion"), [(["repot"], "report"), (["run", "--thread", "2"], "--threads")]
)
def test_typing_errors_get_a_suggestion(words, suggestion):
    shown = paceline(*words)
    assert shown.returncode == 2
    assert suggestion in shown.stderr


def test_options_reach_a_command_as_one_value():
    found = []

    @dataclass(frozen=True)
    class Options(HostAndEnvOptions):
        how: RankOptions = field(default_factory=RankOptions)

    def command(name: Annotated[str, typer.Argument()], options: Options) -> None:
        found.append((name, options))

    app = typer.Typer()
    app.command()(with_options(command))
    words = ["a", "-H", "b:2", "--env", "X", "--env", "Y=1", "--no-smt", "--hang-timeout", "7"]
    assert CliRunner().invoke(app, words).exit_code == 0
    how = RankOptions(smt=False, hang_timeout=7.0)
    assert found == [("a", Options("b:2", env=["X", "Y=1"], how=how))]
    assert found[0][1].how.words() == ["--no-smt", "--hang-timeout", "7.0"]


def test_a_plan_trains_no_reference(tmp_path):
    script = ranks.write(tmp_path, "open('ran', 'w')")
    words = ["run", "--dry-run", "--make-reference", "reference.json", script]
    shown = paceline(*words, cwd=tmp_path)
    assert shown.returncode == 2
    assert "--dry-run trains nothing. HINT: leave out --make-reference" in shown.stderr
    assert not (tmp_path / "ran").exists()


def test_summary_is_printed_as_json(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        """,
    )
    words = ["run", "-n", "1", "--record", "record", "--json", script]
    printed = paceline(*words, cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout)["steps"] == 5  # the script prints nothing
    for words in (["report", "record", "--json"], ["report", "--json=written.json", "record"]):
        shown = paceline(*words, cwd=tmp_path)
        text = shown.stdout or (tmp_path / "written.json").read_text()
        assert json.loads(text)["steps"] == 5


def test_diagnosis_in_a_json_file_replaces_the_report(tmp_path, monkeypatch, capsys):
    """As for paceline report --json=FILE: --html writes the report for people."""
    made = {"format": "paceline-diagnosis", "version": 1, "causes": []}
    monkeypatch.setattr("paceline.report.diagnosis.diagnosis_document.as_json", lambda found: made)
    outputs = DiagnosisOutputs(tmp_path / "found.json", None, None)
    outputs.update(None)
    assert json.loads((tmp_path / "found.json").read_text()) == made
    outputs.finish(None)
    assert capsys.readouterr() == ("", "")


def test_results_are_on_disk_before_they_are_printed(tmp_path, monkeypatch):
    def gone(*_, **__):
        raise BrokenPipeError

    made = "paceline.report.diagnosis.diagnosis_document"
    monkeypatch.setattr("paceline.report.terminal.draw.print_document", gone)
    monkeypatch.setattr(f"{made}.diagnosis_document", lambda found: None)
    monkeypatch.setattr(f"{made}.diagnosis_charts", lambda found: {})
    monkeypatch.setattr("paceline.report.page.write_page.document_page", lambda *_: "page")
    monkeypatch.setattr(
        "paceline.report.page.write_page.save", lambda page, at: at.write_text(page)
    )
    outputs = DiagnosisOutputs(None, tmp_path / "found.html", None)
    for show in (outputs.update, outputs.finish):
        with pytest.raises(BrokenPipeError):
            show(None)
        assert (tmp_path / "found.html").read_text() == "page"
        (tmp_path / "found.html").unlink()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ImportError("many lines\nblas.so: failed to map segment from shared object\n"),
            "blas.so: ",
        ),
        (MemoryError(), "out of memory: "),
        (ImportError("No module named 'numpy'"), None),
    ],
)
def test_limit_of_address_space_is_named_instead_of_a_traceback(monkeypatch, error, reason):
    def fail():
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr("resource.getrlimit", lambda _: (600000 << 10, -1))
    with pytest.raises(SystemExit if reason else ImportError) as ended:
        cli.main()
    if reason:
        assert str(ended.value).startswith(f"paceline: {reason}")
        assert "limited to 600000 KiB (ulimit -v). HINT: ulimit -v unlimited" in str(ended.value)


def test_verbose_version_names_what_a_bug_report_needs():
    shown = paceline("--version", "--verbose").stdout
    for name in ("paceline", "python", "torch", "vector instructions", "backends", "scheduler"):
        assert re.search(rf"^{name}:? ", shown, re.M), name
    assert paceline("--version").stdout.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_installed(tmp_path, shell):
    shown = paceline("--show-completion", shell, **{TEST_SHELLS: "1"})
    assert shown.returncode == 0, shown.stderr
    assert "_PACELINE_COMPLETE" in shown.stdout


def test_completion_offers_commands():
    environment = {
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": "paceline re",
        "COMP_CWORD": "1",
    }
    assert set(paceline(**environment).stdout.split()) == {"record", "report"}


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--tune-exchange"),
        ("submit", "--output"),
        ("export", "--out"),
        ("diagnose", "--save-settings"),
        ("scale", "--csv"),
        ("tune", "--best"),
        ("check", "--packed"),
        ("bench", "comm", "--machine"),
    ],
)
def test_script_is_not_taken_for_a_forgotten_file_to_write(words):
    done = CliRunner().invoke(app, [*words, "train.py", "train.py"])
    assert done.exit_code == 2
    hint = f"needs the name of a file to write, not train.py. HINT: {words[-1]} FILE train.py"
    assert f"paceline: {words[-1]} {hint}\n" in done.stderr
