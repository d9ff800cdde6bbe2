"""select_quick.py: the choice of quick tests for a CI run."""

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


def test_changes_since_the_last_commit_that_passed(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / ".git" / "cache"))
    monkeypatch.delenv("PACELINE_CI_BASE", raising=False)
    monkeypatch.setattr(select_slow, "ROOT", folder)

    def commit(name):
        (folder / name).write_text("# changed\n")
        for words in (["add", "."], ["commit", "-qm", name]):
            who = ["-c", "user.name=a", "-c", "user.email=a@b"]
            subprocess.run(["git", *who, *words], cwd=folder, check=True)

    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    commit("README.md")
    assert select_quick.changed_files() is None
    select_quick.main("passed")
    assert select_quick.changed_files() == []
    commit("src/paceline/cli/run.py")
    (folder / "src/paceline/new.py").write_text("")
    assert select_quick.changed_files() == ["src/paceline/cli/run.py", "src/paceline/new.py"]
    subprocess.run(["git", "checkout", "-q", "--orphan", "other"], cwd=folder, check=True)
    commit("a.py")
    assert select_quick.changed_files() is None  # another history


def test_graph_of_this_repository_has_what_a_rank_does():
    graph = Graph(select_slow.ROOT)
    used = graph.used("tests/launch/test_run.py")
    assert {f"src/paceline/{name}.py" for name in ("record/attach", "world/__init__")} <= used
    assert "src/paceline/report/page/write_page.py" not in used
