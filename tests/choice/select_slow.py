"""Choose the slow tests (bench, long, soak) of one CI run: those that the change can affect, and
one of sixteen parts of all. Tests in REQUIRED always run if a file that they use has changed.

    select_slow.py choose IDS OUT      choose from the test ids in IDS, one per line
    select_slow.py measure XML ...     write durations.json from JUnit reports
    select_slow.py number              print the number of this CI run
    select_slow.py frameworks          exit code 0: this run includes `make test-frameworks`

The part is ``crc32(salt and test id) % 16 == run number % 16``, so sixteen consecutive run numbers
run every test. The run number is PACELINE_CI_RUN (the run number of the CI service). Without it,
it is a counter in the user's cache directory that every CI run increments and that starts at the
number of commits. Changed files are those since the commit PACELINE_CI_BASE, else of the last day
(at most 20 commits).
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from imports import modules_imported

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "paceline"
DURATIONS = Path(__file__).with_name("durations.json")

SLICES = 16
SALT = 4072  # of the hash, chosen so that the parts take about the same time
BUDGET_S = 900  # test seconds of a CI run: about 8 minutes of two workers
MIN_TOUCHED_S = 180  # of touched tests, even if the part leaves less of the budget
UNMEASURED_S = 20  # assumed duration of a test that is not in durations.json
MAX_COMMITS = 20
FAR = 99  # distance of tests that no import connects to the change: soak tests, examples

# Tests that run whenever one of these files has changed. `make tutorial` is the same walk with
# shorter commands, and belongs to every run.
REQUIRED = {
    "tests/docs/test_pages.py::test_commands_of_the_tutorial_print_what_it_says": (
        "docs/getting-started.md",
        "docs/outputs/getting-started/",
        "docs/run_commands.py",
        "docs/_ext/command_output.py",
        "examples/slow.py",
    ),
}


# `make test-frameworks`, which has an environment of its own, runs in one of sixteen runs, and
# whenever a file that begins with one of these has changed.
FRAMEWORKS = (
    "src/paceline/compat/",
    "src/paceline/record/hooks/keras_training.py",
    "src/paceline/record/hooks/training_loop.py",
    "src/paceline/launch/ranks/framework_variables.py",
    "tests/frameworks/",
    "examples/keras/",
)
FRAMEWORKS_PART = 6


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def given_base() -> str:
    """Return the commit PACELINE_CI_BASE, or ""."""
    base = os.environ.get("PACELINE_CI_BASE", "")
    if base and not git("rev-parse", "--verify", "-q", f"{base}^{{commit}}"):
        sys.exit(f"PACELINE_CI_BASE={base} is not a commit. HINT: fetch more of the history")
    return base


def changed_files() -> list[str]:
    """Return the paths changed since the base commit; none if the history is missing."""
    base = given_base()
    if not base:
        since = f"--since={int(git('log', '-1', '--format=%ct') or 0) - 86400}"
        recent = git("rev-list", "--first-parent", f"-n{MAX_COMMITS}", since, "HEAD").split()
        back = max(1, len(recent))
        while back and not git("rev-parse", "--verify", "-q", f"HEAD~{back}"):
            back -= 1  # a shallow clone
        base = f"HEAD~{back}" if back else "HEAD"
    return git("diff", "--name-only", f"{base}...HEAD").splitlines()


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def run_number() -> int:
    """Return the number of this CI run: one more than the previous run's."""
    if given := os.environ.get("PACELINE_CI_RUN"):
        return int(given)
    counter = cache_folder() / "ci-run"
    try:
        number = int(counter.read_text()) + 1
    except (OSError, ValueError):
        number = int(git("rev-list", "--count", "--first-parent", "HEAD") or 0)
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(f"{number}\n")
    return number


def import_distances(changed: Iterable[str], source: Path) -> dict[str, int]:
    """Return for each folder of the package ("launch", "launch/monitor") the least number of
    imports between one of its modules and a changed file; 0 for the folders of changed files."""
    modules = {p.relative_to(source).with_suffix("").parts: p for p in source.rglob("*.py")}
    importers: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for name, path in modules.items():
        for parts in modules_imported(path, source):
            for target in (parts, parts[:-1], (*parts, "__init__"), (*parts[:-1], "__init__")):
                if target in modules:
                    importers.setdefault(target, set()).add(name)
    inside = [Path(f).relative_to("src/paceline") for f in changed if f.startswith("src/paceline/")]
    distance = {path.with_suffix("").parts: 0 for path in inside}
    edge = set(distance)
    while edge:
        # A file that is not a module (a template, C source) belongs to the modules of its folder.
        beside = {m for name in edge if name not in modules for m in modules if m[:-1] == name[:-1]}
        step = {m for name in edge for m in importers.get(name, ())}
        least = max(distance[name] for name in edge)
        fresh = {m: least for m in beside if m not in distance}
        fresh |= {m: least + 1 for m in step if m not in distance and m not in fresh}
        distance |= fresh
        edge = set(fresh)
    folders: dict[str, int] = {}
    for name, far in distance.items():
        for end in range(1, len(name)):
            folder = "/".join(name[:end])
            folders[folder] = min(far, folders.get(folder, FAR))
    return folders


def required(ids: list[str], changed: list[str]) -> list[str]:
    """Return the tests in REQUIRED that use a changed file."""
    tests = REQUIRED.keys() & set(ids)
    return [test for test in tests if any(f.startswith(REQUIRED[test]) for f in changed)]


def runs_frameworks(number: int, changed: list[str]) -> bool:
    """Return whether a CI run includes the tests of other frameworks."""
    is_touched = any(one.startswith(FRAMEWORKS) for one in changed)
    return is_touched or number % SLICES == FRAMEWORKS_PART


def touched(ids: list[str], changed: list[str], source: Path = SOURCE) -> dict[str, int]:
    """Return the tests that the change can affect, with their distance from it."""
    folders = import_distances(changed, source)
    found: dict[str, int] = {}
    for test in ids:
        path = Path(test.partition("::")[0])
        folder = path.parent.relative_to("tests").as_posix()
        floor = folder.partition("/")[0]
        own_folder = f"{path.parent.name if folder != '.' else path.stem.removeprefix('test_')}/"
        if str(path) in changed or any(f.startswith(own_folder) for f in changed):
            found[test] = 0  # the test itself, an example, or a benchmark
        elif (source / folder).is_dir() and folder != ".":
            if folder in folders:
                found[test] = folders[folder]
        elif floor in folders:
            found[test] = folders[floor]
        elif folders and not (source / floor).is_dir():
            found[test] = FAR
    return found


def choose(
    ids: list[str],
    near: dict[str, int],
    durations: dict[str, float],
    number: int,
    always: Iterable[str] = (),
) -> tuple[list[str], list[str]]:
    """Return the touched tests that fit into the budget, and the tests of this run's part.

    The part and the tests of ``always`` run completely. The touched tests get what they leave of
    BUDGET_S, but at least MIN_TOUCHED_S: nearest first, and among equals in an order that differs
    between runs.
    """
    part = number % SLICES
    rotation = [test for test in ids if crc32(f"{SALT} {test}".encode()) % SLICES == part]
    first = [test for test in always if test not in rotation]
    certain_s = sum(durations.get(test, UNMEASURED_S) for test in [*rotation, *first])
    left = max(BUDGET_S - certain_s, MIN_TOUCHED_S)
    order = sorted(near, key=lambda test: (near[test], crc32(f"{number} {test}".encode())))
    for test in order:
        seconds = durations.get(test, UNMEASURED_S)
        if test not in {*rotation, *first} and seconds <= left:
            first.append(test)
            left -= seconds
    return first, rotation


def measure(reports: list[Path]) -> None:
    durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            path = case.attrib["classname"].replace(".", "/") + ".py"
            if case.find("skipped") is None and (ROOT / path).exists():
                name = f"{path}::{case.attrib['name']}"
                durations[name] = round(float(case.attrib["time"]), 1)
    DURATIONS.write_text(json.dumps(durations, indent=0, sort_keys=True) + "\n")
    print(f"{DURATIONS.relative_to(ROOT)}: {len(durations)} tests")


def main(command: str, *paths: str) -> None:
    if command == "measure":
        measure([Path(path) for path in paths])
        return
    if command == "number":
        print(run_number())
        return
    if command == "frameworks":
        chosen = runs_frameworks(run_number(), changed_files())
        print(f"make test-frameworks: {'chosen' if chosen else 'not in this run'}")
        sys.exit(not chosen)
    ids = [line for line in Path(paths[0]).read_text().splitlines() if "::" in line]
    durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    number, changed = run_number(), changed_files()
    near = touched(ids, changed)
    always = required(ids, changed)
    first, rotation = choose(ids, near, durations, number, always)
    Path(paths[1]).write_text("\n".join([*first, *rotation]) + "\n")

    def minutes(tests: list[str]) -> str:
        return f"{sum(durations.get(t, UNMEASURED_S) for t in tests) / 60:.1f} test minutes"

    print(f"slow tests, CI run {number} (PACELINE_CI_RUN={number} repeats the rotation):")
    print(f"  touched by {len(changed)} changed files: {len(first)}, {minutes(first)}")
    for test in always:
        print(f"  required, because a file that it uses has changed: {test}")
    print(
        f"  rotation, part {number % SLICES + 1} of {SLICES}: {len(rotation)}, {minutes(rotation)}"
    )
    rest = [test for test in ids if test not in {*first, *rotation}]
    print(f"  not run: {len(rest)}, of which {len(near.keys() & set(rest))} are touched")


if __name__ == "__main__":
    main(*sys.argv[1:])
