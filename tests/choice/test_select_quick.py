"""select_quick.py: the choice of quick tests for a CI run."""

import os
import subprocess

import pytest
import select_quick
import select_slow
from select_quick import Graph, affected, choose

FILES = {
    "src/paceline/__init__.py": "def __getattr__(name):\n    from . import world\n",
    "src/paceline/cli/__init__.py": "from . import report, run\n",
    "src/paceline/cli/run.py": "def run():\n    from ..launch import start\n",
    "src/paceline/cli/report.py": "def report():\n    from ..report.page import write\n",
    "src/paceline/launch/__init__.py": "",
    "src/paceline/launch/start.py": "from ..record.ring import SIZE\n",
    "src/paceline/record/__init__.py": "",
    "src/paceline/record/ring.py": "SIZE = 1\n",
    "src/paceline/report/__init__.py": "",
    "src/paceline/report/page.py": "write = 1\n",
    "src/paceline/report/page.html": "",
    "src/paceline/world/__init__.py": "from ..data.sources import read\n",
    "src/paceline/data/__init__.py": "",
    "src/paceline/data/sources/__init__.py": "import_module(f'.{kind}', __name__)\n",
    "src/paceline/data/sources/arrays.py": "",
    "src/paceline/unused.py": "",
    "examples/slow.py": "import torch\n",
    "tests/conftest.py": "",
    "tests/support/ranks.py": 'command = ["paceline", "run"]\n',
    "tests/trainings.py": "LOOP = 'import paceline; paceline.init()'\n",
    "tests/launch/test_run.py": "import ranks\n",
    "tests/launch/envs/slurm.json": "{}",
    "tests/record/test_ring.py": "from paceline.record.ring import SIZE\n",
    "tests/report/test_page.py": "from paceline.report import page\n",
    "tests/world/test_world.py": "import trainings\n",
    "tests/test_examples.py": "EXAMPLES = 'examples'\n",
    "tests/test_house.py": "files = folder.rglob('*.py')\n",
}
TESTS = {file for file in FILES if "/test_" in file}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ("src/paceline/record/ring.py", {"record/test_ring.py", "launch/test_run.py"}),
        ("src/paceline/cli/run.py", {"launch/test_run.py"}),
        ("src/paceline/report/page.py", {"report/test_page.py"}),  # paceline run writes no page
        ("src/paceline/report/page.html", {"report/test_page.py"}),
        ("src/paceline/data/sources/arrays.py", {"world/test_world.py"}),
        ("tests/trainings.py", {"world/test_world.py"}),
        ("tests/record/test_ring.py", {"record/test_ring.py"}),
        ("tests/launch/envs/slurm.json", {"launch/test_run.py"}),
        ("examples/slow.py", {"test_examples.py"}),
        ("CHANGELOG.md", set()),
    ],
)
def test_change_chooses_the_tests_that_use_the_file(folder, changed, chosen):
    found, why_all = affected([changed], Graph(folder))
    assert found == {"tests/test_house.py", *(f"tests/{name}" for name in chosen)}
    assert not why_all


@pytest.mark.parametrize(
    "changed",
    [
        *("tests/conftest.py", "tests/support/ranks.py", "pyproject.toml", "Makefile", ".ci/run"),
        *(
            "src/paceline/comm/kernel.c",
            "src/paceline/unused.py",
            "src/paceline/__init__.py",
        ),
    ],
)
def test_all_tests_run_if_the_effect_of_a_change_is_not_known(folder, changed):
    found, why_all = affected(["CHANGELOG.md", changed], Graph(folder))
    assert found == TESTS
    assert changed in why_all


def test_every_fifth_run_is_complete(folder):
    graph = Graph(folder)
    complete = [choose(number, [], graph)[0] == TESTS for number in range(100, 110)]
    assert complete == [number % 5 == 0 for number in range(100, 110)]
    assert choose(101, None, graph)[0] == TESTS


@pytest.fixture
def repository(folder, monkeypatch):
    """A repository with one commit; the return value commits a change of a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / ".git" / "cache"))
    monkeypatch.delenv("PACELINE_CI_BASE", raising=False)
    monkeypatch.setattr(select_slow, "ROOT", folder)

    def commit(name, text="# changed\n"):
        (folder / name).write_text(text)
        for words in (["add", "."], ["commit", "-qm", name]):
            who = ["-c", "user.name=a", "-c", "user.email=a@b"]
            subprocess.run(["git", *who, *words], cwd=folder, check=True)

    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    commit(".gitignore", "run/\n")
    return commit


def pass_run():
    select_quick.note_start()
    select_quick.main("passed")


def test_changes_since_the_last_commit_that_passed(folder, repository):
    assert select_quick.changed_files() is None
    pass_run()
    assert select_quick.changed_files() == []
    repository("src/paceline/cli/run.py")
    (folder / "src/paceline/new.py").write_text("")
    assert select_quick.changed_files() == ["src/paceline/cli/run.py", "src/paceline/new.py"]
    subprocess.run(["git", "checkout", "-q", "--orphan", "other"], cwd=folder, check=True)
    repository("a.py")
    assert select_quick.changed_files() is None  # another history


def test_changes_that_are_not_committed_have_their_whole_names(folder, repository):
    pass_run()
    (folder / "src/paceline/cli/run.py").write_text("# changed\n")  # " M": the first line of git
    (folder / "tests/m\u00fc ller.py").write_text("")
    subprocess.run(["git", "mv", "examples/slow.py", "examples/fast.py"], cwd=folder, check=True)
    assert select_quick.changed_files() == [
        *("examples/fast.py", "examples/slow.py", "src/paceline/cli/run.py"),
        "tests/m\u00fc ller.py",
    ]


def test_commit_passes_only_if_it_was_checked_out_during_the_whole_run(folder, repository, capsys):
    pass_run()
    passed = select_quick.passed_file().read_text()
    repository("examples/slow.py")
    select_quick.note_start()
    repository("src/paceline/cli/run.py")
    select_quick.main("passed")  # another commit than at the start
    (folder / "src/paceline/cli/run.py").write_text("")
    select_quick.note_start()
    subprocess.run(["git", "checkout", "-q", "."], cwd=folder, check=True)
    select_quick.main("passed")  # there were other changes at the start
    select_quick.note_start()
    (folder / "src/paceline/cli/run.py").write_text("")
    select_quick.main("passed")  # there are other changes now
    assert select_quick.passed_file().read_text() == passed
    assert capsys.readouterr().out.count("no commit is noted as passed") == 3
    assert select_quick.changed_files() == ["examples/slow.py", "src/paceline/cli/run.py"]


@pytest.mark.parametrize("text", [b"", b"HEAD\n", b"\0" * 40, b"\xff", b"0" * 40, b"--all"])
def test_all_tests_run_if_the_noted_commit_is_none(repository, text):
    pass_run()
    select_quick.passed_file().write_bytes(text)
    assert select_quick.changed_files() is None


def test_all_tests_run_if_git_fails(folder, repository):
    pass_run()
    (folder / ".git/HEAD").write_text("damaged")
    assert select_quick.changed_files() is None


def test_make_passes_all_files_on(tmp_path):
    """Make runs its commands here with replacements that note their arguments."""
    makefile = (select_slow.ROOT / "Makefile").read_text()
    for name in ("a/test_one", "b/test_two", "c/test_three"):
        (tmp_path / f"tests/{name}.py").parent.mkdir(parents=True)
        (tmp_path / f"tests/{name}.py").write_text("mark.alone\n" if "two" in name else "")
    for name in ("pyproject.toml", "constraints.txt", "hatch_build.py"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "Makefile").write_text(makefile)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for at, name in enumerate(("installed", "frameworks"), start=1):
        (tmp_path / ".venv" / name).touch()
        os.utime(tmp_path / ".venv" / name, (at, at))
    files = "tests/a/test_one.py tests/b/test_two.py"
    for name, does in (
        ("pytest", 'for last; do :; done; echo "$#:$last" >> calls; echo "$@" >> words'),
        ("python", f'printf "%s\\n" {files} > "$3"'),
    ):
        (tmp_path / ".venv/bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    env = {
        k: v for k, v in os.environ.items() if k != "FILES" and not k.startswith(("MAKE", "MFL"))
    }
    for words in (["test", f"FILES={files}"], ["test-chosen"]):
        subprocess.run(["make", "-s", *words], cwd=tmp_path, env=env, check=True)
    all_files, alone = (tmp_path / "words").read_text().splitlines()[:2]
    assert all_files.endswith(f"not alone {files}")
    assert alone.endswith("and alone tests/b/test_two.py")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].endswith(":tests/b/test_two.py")
    assert calls[2:] == calls[:2]  # the same from the list, which has one file a line


def test_graph_of_this_repository_has_what_a_rank_does():
    graph = Graph(select_slow.ROOT)
    used = graph.used("tests/launch/test_run.py")
    assert {f"src/paceline/{name}.py" for name in ("observe/attach", "world/__init__")} <= used
    assert "src/paceline/report/page/write_page.py" not in used
