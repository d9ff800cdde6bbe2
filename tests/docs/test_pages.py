"""The pages of the documentation: what they name exists, and their samples are valid."""

import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
import typer
from typer.core import TyperArgument, TyperGroup

import paceline
from paceline.analyze.diagnosis import rules
from paceline.analyze.diagnosis.table import CAUSES
from paceline.cli import app
from paceline.knobs.registry import COMPUTING, KNOBS

SOURCE = Path(paceline.__file__).parent
ROOT = SOURCE.parents[1]
PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if "generated" not in path.parts
)
BLOCK = re.compile(r"^ *```(\S*).*?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = ("console", "sh", "bash", "{command}")
INLINE = re.compile(r"`([^`]+)`")  # code within a sentence or table


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shell_lines(page: Path) -> list[str]:
    """Return the command lines of a page: in blocks, after ``$`` in outputs, in sentences."""
    text = page.read_text()
    found = []
    for language, block in BLOCK.findall(text):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        found += [x.strip() for x in lines if language in SHELL or x.startswith("$ ")]
    inline = INLINE.findall(BLOCK.sub("", text))
    return found + [re.sub(r"\s+", " ", code) for code in inline if " " in code]


def command_lines(page: Path, program: str) -> list[list[str]]:
    """Return the words after ``program`` of each command line of the page that contains it."""
    found = []
    for line in shell_lines(page):
        if not re.search(rf"(^|\s){program}\s", line):
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        words = [word.strip(";()") for word in words]
        if program in words:
            found.append(words[words.index(program) + 1 :])
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_on_pages_have_known_options(page):
    group = typer.main.get_command(app)
    for words in command_lines(page, "paceline"):
        command = group
        while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
            assert words[0] in command.commands, words
            command = command.commands[words.pop(0)]
        options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        options |= getattr(command, "foreign", {}).get(command.name, set())
        positional = [one for one in command.params if isinstance(one, TyperArgument)]
        takes_script = any(one.name == "script" for one in positional)
        seen = 0
        for word in words:
            if word in ("|", ">", "2>", "&&", ";", "done", "--", "python") or (
                takes_script and seen
            ):
                break
            if word.startswith("-") and word != "-m":
                assert word.partition("=")[0] in {*options, "--help", "-h"}, (words, word)
            elif word.endswith(".py"):
                seen += 1


def test_make_targets_on_pages_exist():
    lines = [line for page in PAGES for line in shell_lines(page) if re.match(r"(\$ )?make ", line)]
    assert lines
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)[1:]
        folder = ROOT
        if words[:1] == ["-C"]:
            folder, words = ROOT / words[1], words[2:]
        text = (folder / "Makefile").read_text()
        targets = set(re.findall(r"^([\w-]+):", text, re.MULTILINE))
        assert {word for word in words if "=" not in word} <= targets, line


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_samples_on_pages_compile(page):
    """Samples that can run do so in test_samples.py."""
    for language, sample in BLOCK.findall(page.read_text()):
        if language == "python":
            compile(textwrap.dedent(sample), page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_named_on_pages_exist(page):
    """Paths in prose and commands start at the repository's root, those of links at the page."""
    pattern = r"(?<![\w/.-])((?:src|tests|examples|benchmarks|docs|tools)/[\w/.-]+\.\w+)"
    named = re.findall(pattern, page.read_text())
    gone = [path for path in named if not any((top / path).exists() for top in (ROOT, page.parent))]
    assert not [path for path in gone if "NAME" not in path]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_on_pages_lead_to_files(page):
    """The site checks links between pages and their anchors; this is for readers of the files."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    gone = [one for one in links if "://" not in one and not (page.parent / one).exists()]
    assert not gone


def test_environment_variables_are_documented():
    page = (ROOT / "docs/reference/environment-variables.md").read_text()
    used = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"\bPACELINE_[A-Z_]+\b", path.read_text())
    }
    assert used == set(re.findall(r"\bPACELINE_[A-Z_]+\b", page))


def test_causes_are_described_documented_and_answered():
    page = (ROOT / "docs/reference/causes.md").read_text()
    included = re.findall(r"generated/causes_(\w+)\.md", page)
    assert set(included) == {one.group for one in CAUSES.values()}
    rule_files = [path.read_text() for path in Path(rules.__file__).parent.glob("*.py")]
    answered = {cause for knob in KNOBS.values() for cause in knob.answers} - {COMPUTING}
    named = {
        name
        for text in rule_files
        for name in re.findall(r'(?:return \(?\s*|name = )"([a-z-]+)",', text)
    }
    assert named
    assert named <= set(CAUSES)
    assert answered == set(CAUSES)


def test_every_page_is_in_a_table_of_contents():
    listed = {
        (page.parent / f"{name}.md").resolve()
        for page in PAGES
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL)
        for name in re.findall(r"^([a-z/-]+)$", block, re.MULTILINE)
    }
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert pages - listed == {ROOT / "docs/index.md"}


def test_readme_fits_one_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


@pytest.mark.parametrize(
    "page", ["getting-started", "explanation/diagnose", "how-to/improve/scaling-study"]
)
def test_stored_outputs_belong_to_the_commands_of_a_page(page):
    path = ROOT / f"docs/{page}.md"
    names = re.findall(r"^```\{command\} (\S+)", path.read_text(), re.M)
    stored = {path.stem for path in (ROOT / "docs/outputs" / path.stem).glob("*.txt")}
    assert stored == set(names)


@pytest.mark.long
def test_example_of_how_diagnose_works_names_its_line():
    page = "docs/explanation/diagnose.md"
    command = [ROOT / ".venv/bin/python", "docs/run_commands.py", page, "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.alone
def test_commands_of_the_tutorial_print_what_it_says():
    """Walk the ten minutes of "Getting started" in an empty folder."""
    command = [ROOT / ".venv/bin/python", "docs/run_commands.py", "docs/getting-started.md"]
    for _ in range(2):  # other load on the machine can hide the gain that the page measures
        done = subprocess.run([*command, "--check"], cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("path", sorted((ROOT / "docs/benchmarks").rglob("*.json")), ids=page_id)
def test_a_stored_measurement_has_no_local_path(path):
    assert not re.findall(r"/(?:tmp|home|root|work|mnt)/[^\"]*", path.read_text())
