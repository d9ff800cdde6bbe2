"""select_slow.py: the choice of slow tests for a CI run."""

import pytest
import select_slow

IDS = [f"tests/{f}/test_a.py::test_{i}" for f in ("launch", "record", "soak") for i in range(20)]


def package(folder):
    """Create a package in which launch imports record."""
    for name, text in {
        "record/ring.py": "SIZE = 1\n",
        "record/layout.html": "",
        "launch/start.py": "from ..record.ring import SIZE\n",
        "cluster/hosts.py": "",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_change_selects_tests_of_its_folder_and_importers(tmp_path):
    near = select_slow.touched(IDS, ["src/paceline/record/ring.py"], package(tmp_path))
    assert {near[test] for test in IDS if "/record/" in test} == {0}
    assert {near[test] for test in IDS if "/launch/" in test} == {1}
    assert {near[test] for test in IDS if "/soak/" in test} == {select_slow.FAR}
    near = select_slow.touched(IDS, ["src/paceline/launch/start.py"], package(tmp_path))
    assert not [test for test in near if "/record/" in test]


def test_template_change_selects_tests_of_modules_in_its_folder(tmp_path):
    near = select_slow.touched(IDS, ["src/paceline/record/layout.html"], package(tmp_path))
    assert {near[test] for test in IDS if "/launch/" in test} == {1}


def test_changed_test_is_selected_and_docs_page_selects_none(tmp_path):
    near = select_slow.touched(IDS, ["tests/launch/test_a.py"], package(tmp_path))
    assert set(near) == {test for test in IDS if "/launch/" in test}
    assert not select_slow.touched(IDS, ["docs/index.md"], package(tmp_path))


def test_ten_consecutive_runs_cover_every_test():
    durations = dict.fromkeys(IDS, 10000.0)
    parts = [select_slow.choose(IDS, {}, durations, number)[1] for number in range(100, 116)]
    assert sorted(test for part in parts for test in part) == sorted(IDS)


def test_selected_tests_fit_budget_nearest_first():
    durations = dict.fromkeys(IDS, 20.0)
    near = {test: 0 if "/record/" in test else 1 for test in IDS}
    first, rotation = select_slow.choose(IDS, near, durations, 1)
    assert not set(first) & set(rotation)
    assert 20 * len([*first, *rotation]) <= select_slow.BUDGET_S
    inside = [test for test in IDS if "/record/" in test]
    assert set(inside) <= {*first, *rotation}


WALK = "tests/docs/test_pages.py::test_commands_of_the_tutorial_print_what_it_says"


def test_walk_through_the_tutorial_is_a_slow_test_of_docs():
    path, _, name = WALK.partition("::")
    text = (select_slow.ROOT / path).read_text()
    assert f"@pytest.mark.long\n@pytest.mark.alone\ndef {name}()" in text


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ("docs/getting-started.md", True),
        ("docs/outputs/getting-started/report.txt", True),
        ("docs/run_commands.py", True),
        ("examples/slow.py", True),
        ("docs/index.md", False),
        ("examples/patches.py", False),
        ("src/paceline/cli/report.py", False),
    ],
)
def test_walk_through_the_tutorial_runs_if_a_file_it_uses_has_changed(changed, runs):
    always = select_slow.required([*IDS, WALK], [changed])
    assert always == ([WALK] if runs else [])
    durations = dict.fromkeys(IDS, 10000.0)
    for number in range(6):
        first, rotation = select_slow.choose([*IDS, WALK], {}, durations, number, always)
        assert not runs or [*first, *rotation].count(WALK) == 1


def test_frameworks_run_in_one_of_ten_runs_or_if_touched():
    assert sum(select_slow.runs_frameworks(number, ["docs/index.md"]) for number in range(16)) == 1
    changed = ["src/paceline/compat/horovod/keras/callbacks.py"]
    assert all(select_slow.runs_frameworks(number, changed) for number in range(16))
    assert all((select_slow.ROOT / one).exists() for one in select_slow.FRAMEWORKS)


def test_run_number_increases(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CI_RUN", raising=False)
    first = select_slow.run_number()
    assert [select_slow.run_number() for _ in range(3)] == [first + 1, first + 2, first + 3]
    monkeypatch.setenv("PACELINE_CI_RUN", "7")
    assert select_slow.run_number() == 7


def test_durations_are_read_from_reports(tmp_path, monkeypatch):
    report = tmp_path / "report.xml"
    module = "tests.choice.test_select_slow"
    report.write_text(
        f'<testsuite><testcase classname="{module}" name="test_x[a b]" time="1.26"/>'
        f'<testcase classname="{module}" name="test_y" time="2"><skipped/></testcase></testsuite>'
    )
    written = []
    monkeypatch.setattr(type(report), "write_text", lambda _, text: written.append(text))
    select_slow.measure([report])
    assert '"tests/choice/test_select_slow.py::test_x[a b]": 1.3' in written[0]
    assert "test_y" not in written[0]
