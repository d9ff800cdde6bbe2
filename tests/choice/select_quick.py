"""Choose the quick tests of one CI run: the test files that a change can affect, or all of them.

    python tests/choice/select_quick.py choose OUT    write the chosen test files, one per line
    python tests/choice/select_quick.py passed        note that the commit of the choice has passed

A test file is chosen if a changed file is among those that it uses: what it imports, also through
helpers and inside functions, what its text names ("paceline.data", the imports of scripts), and
the modules of the commands that it starts. All tests run in every fifth run, if a file of
EVERYTHING has changed, if no test is known to use a changed file, and if it is not known which
files have changed.

Changed files are those since the commit PACELINE_CI_BASE, else since the last commit that passed
(noted in the user's cache directory), and those that are not committed. A commit has passed if it
is checked out, without other changes, at the choice and at the end of the run.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import select_slow
from imports import statements
from select_slow import ROOT

FULL_EVERY = 5
EVERYTHING = re.compile(
    r"(.*/)?conftest\.py|tests/(support|bed|choice)/(?!test_).*|tests/durations\.py"
    r"|pyproject\.toml|Makefile|constraints\.txt|hatch_build\.py|\.ci/.*"
    r"|src/.*\.(c|h|sh|cmake)|src/paceline/__init__\.py"
)
NO_TEST = re.compile(r"(CHANGELOG|LICENSE|NOTICE).*|\.gitignore")
PACKAGE = "src/paceline"
ALL_COMMANDS = f"{PACKAGE}/cli/__init__.py"
PRELOADS = "tests/support/warm_start.py"  # imports what a script may need, and calls none of it
API = {"BatchSchedule", "Layout", "World", "from_rank_0", "init", "per_rank", "tune"}
NAMED = re.compile(r"\bpaceline((?:\.\w+)+)")
FROM = re.compile(r"\bfrom paceline((?:\.\w+)*) import ([\w, ]+)")
REFERENCE = re.compile(r"[\"']([a-z_]+(?:\.[a-z_]+)+):\w+[\"']")  # "comm.compress:topk"
ANY_BESIDE = re.compile(r"import_module\(f[\"']\.")
STARTS = re.compile(r"\bPACELINE\b|[\"']paceline[\"']|\bpaceline\.cli\b")
SOURCE_STARTS = re.compile(r"\"-m\", \"paceline\"")
QUOTED = re.compile(r"[\"']([^\"'\n]*)[\"']")
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
READS_SOURCE = re.compile(r"\br?glob\(|\btexts\(|\bgetsource\w*\(")


class Graph:
    """Which files of the repository each test file uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._texts: dict[str, str] = {}
        self.modules = set(self._files(PACKAGE))
        self.helpers: dict[str, set[str]] = {}
        for file in self._files("tests"):
            self.helpers.setdefault(PurePath(file).stem, set()).add(file)
        self.tests = sorted(
            file
            for name, files in self.helpers.items()
            if name.startswith("test_")
            for file in files
        )
        self.commands = {
            PurePath(file).stem: file
            for file in self.modules
            if file.startswith(f"{PACKAGE}/cli/") and "/common/" not in file
        }
        self._found: dict[tuple[str, bool], set[tuple[str, bool]]] = {}
        self._used: dict[str, set[str]] = {}

    def text(self, file: str) -> str:
        if file not in self._texts:
            self._texts[file] = (self.folder / file).read_text()
        return self._texts[file]

    def _files(self, below: str) -> Iterator[str]:
        for path in sorted((self.folder / below).rglob("*.py")):
            yield str(path.relative_to(self.folder))

    def used(self, test: str) -> set[str]:
        """Return the files that a test file uses, itself among them."""
        if test not in self._used:
            self._used[test] = self._closure(test)
        return self._used[test]

    def _closure(self, test: str) -> set[str]:
        seen: set[tuple[str, bool]] = set()
        waiting = {(test, True)}
        while waiting:
            step = waiting.pop()
            seen.add(step)
            if step not in self._found:
                self._found[step] = self._uses(*step)
            waiting |= self._found[step] - seen
        return {file for file, _ in seen}

    def _uses(self, file: str, whole: bool) -> set[tuple[str, bool]]:
        """Return the files that one file uses, each with whether its functions may be called.

        The packages above a module are imported as well, but their functions need not be called:
        without ``whole``, only what a file imports outside of functions counts.
        """
        text = self.text(file)
        names = set(_imports(ast.parse(text), file, whole))
        found: set[tuple[str, bool]] = set()
        own = file.startswith(PACKAGE)
        if whole and file != PRELOADS:
            named = set(_names(text))
            if own:  # its messages and docstrings name what users call: only modules count
                named = {
                    name for name in named if f"src/{name.replace('.', '/')}.py" in self.modules
                }
            names |= named
        if whole and (SOURCE_STARTS if own else STARTS).search(text):
            words = {word for quoted in QUOTED.findall(text) for word in quoted.split()}
            found |= {(self.commands[word], True) for word in words & self.commands.keys()}
        place = PurePath(file).parent
        if whole and ANY_BESIDE.search(text) and "TYPE_CHECKING" not in text:
            found |= {(one, True) for one in self.modules if place in PurePath(one).parents}
        if file.startswith("tests/"):
            fixtures = self.helpers.get("conftest", set()) - {"tests/conftest.py"}
            above = {place, *place.parents}
            found |= {(one, True) for one in fixtures if PurePath(one).parent in above}
        for name in names:
            found |= set(self._files_of(name, whole))
        return found

    def _files_of(self, name: str, whole: bool) -> Iterator[tuple[str, bool]]:
        """Yield the file of a module, or of the module that has an object, and packages above."""
        parts = name.split(".")
        yield from ((file, True) for file in self.helpers.get(parts[0], ()))
        if parts[0] != "paceline":
            return
        folders = ["/".join(["src", *parts[:end]]) for end in range(1, len(parts) + 1)]
        files = [f"{at}{end}" for at in folders for end in (".py", "/__init__.py")]
        known = [file for file in files if file in self.modules]
        # Everything imports the package, and the module of all commands is added by their names.
        called = parts[1:2] and parts[1] in API if len(known) == 1 else known[-1] != ALL_COMMANDS
        yield from ((file, False) for file in known[:-1])
        yield known[-1], whole and bool(called)


def _imports(tree: ast.AST, file: str, whole: bool) -> Iterator[str]:
    """Yield the dotted names that a file imports; those inside functions only with ``whole``."""
    package = PurePath(file).parts[1:-1] if file.startswith("src/") else ()
    for node in statements(tree, called=whole):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _names(text: str) -> Iterator[str]:
    """Yield the modules of paceline, and objects in them, that a text names."""
    yield from (f"paceline{name}" for name in NAMED.findall(text))
    yield from (f"paceline.{name}" for name in REFERENCE.findall(text))
    for module, imported in FROM.findall(text):
        yield from (f"paceline{module}.{name.strip()}" for name in imported.split(","))


def affected(changed: Iterable[str], graph: Graph) -> tuple[set[str], str]:
    """Return the test files that a change can affect, and why these are all of them, or ""."""
    chosen = {test for test in graph.tests if READS_SOURCE.search(graph.text(test))}
    for file in changed:
        if EVERYTHING.fullmatch(file):
            return set(graph.tests), f"{file} has changed"
        if NO_TEST.fullmatch(file):
            continue
        users = tests_of(file, graph)
        if not users and file.startswith(("src/", "examples/")):
            return set(graph.tests), f"{file} has changed, and no test is known to use it"
        chosen |= users
    return chosen, ""


def tests_of(file: str, graph: Graph) -> set[str]:
    """Return the test files that use a file by import, or whose texts name it or its folder."""
    path = PurePath(file)
    if file.startswith(PACKAGE):
        files = {file}
        if file not in graph.modules:  # a template, or a module that is gone: those beside it
            place = path.parent
            while not (files := {m for m in graph.modules if PurePath(m).parent == place}):
                place = place.parent
        return {test for test in graph.tests if graph.used(test) & files}
    names = {path.name} if file.startswith("tests/") else {path.name, path.parts[0]}
    named = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    return {
        test
        for test in graph.tests
        if file in graph.used(test)
        or (file.startswith("tests/") and PurePath(test).parent in path.parents[:-2])
        or any(
            named.search(graph.text(own)) for own in graph.used(test) if own.startswith("tests/")
        )
    }


def passed_file() -> Path:
    return select_slow.cache_folder() / "ci-passed"


def chosen_for_file() -> Path:
    """Return the file with the commit for which ``choose`` has chosen tests."""
    return select_slow.ROOT / "run" / "quick-base"


def _git(*words: str) -> str:
    """Return the output of git. Raises OSError or CalledProcessError if git fails."""
    words = ("git", *words)
    done = subprocess.run(words, cwd=select_slow.ROOT, capture_output=True, check=True)
    return done.stdout.decode(errors="surrogateescape")


def _uncommitted() -> list[str]:
    """Return the paths of files that differ from HEAD, with both names of renamed files."""
    status = _git("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all")
    return [entry[3:] for entry in status.split("\0") if entry]


def _clean_head() -> str:
    """Return the commit HEAD; "" if there are other changes, or git fails."""
    try:
        return "" if _uncommitted() else _git("rev-parse", "--verify", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _read_commit(path: Path) -> str:
    """Return the commit in a file, or "" if there is none."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return ""
    return text if COMMIT.fullmatch(text) else ""


def changed_files() -> list[str] | None:
    """Return the paths changed since the base commit; None if they are not known."""
    base = select_slow.given_base() or _read_commit(passed_file())
    if not base:
        return None
    try:
        _git("merge-base", "--is-ancestor", base, "HEAD")
        committed = _git("diff", "--name-only", "-z", "--no-renames", base, "HEAD").split("\0")
        return sorted({*filter(None, committed), *_uncommitted()})
    except (OSError, subprocess.CalledProcessError):
        return None


def note_start() -> None:
    """Note the commit that the tests of this run are chosen for, if there are no other changes."""
    chosen_for_file().parent.mkdir(parents=True, exist_ok=True)
    chosen_for_file().write_text(_clean_head() + "\n")


def note_passed() -> None:
    """Note that the commit of ``note_start`` has passed, if it is still what is checked out."""
    commit = _read_commit(chosen_for_file())
    if not commit or commit != _clean_head():
        print("no commit is noted as passed: files have changed since the last commit or the start")
        return
    passed_file().parent.mkdir(parents=True, exist_ok=True)
    passed_file().write_text(commit + "\n")


def choose(number: int, changed: list[str] | None, graph: Graph) -> tuple[set[str], str]:
    """Return the test files of a CI run, and why these are all of them, or ""."""
    if number % FULL_EVERY == 0:
        return set(graph.tests), f"every {FULL_EVERY}th run is complete"
    if changed is None:
        return set(graph.tests), "the changes since the last commit that passed are not known"
    return affected(changed, graph)


def main(command: str, *paths: str) -> None:
    if command == "passed":
        note_passed()
        return
    note_start()
    number, changed, graph = select_slow.run_number(), changed_files(), Graph(ROOT)
    chosen, why_all = choose(number, changed, graph)
    Path(paths[0]).write_text("\n".join(sorted(chosen)) + "\n")
    why = f"all, because {why_all}" if why_all else f"for {len(changed or ())} changed files"
    print(f"quick tests, CI run {number}: {len(chosen)} of {len(graph.tests)} test files, {why}")


if __name__ == "__main__":
    main(*sys.argv[1:])
