"""The site is built without a warning, and the generated reference is complete."""

import html
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import paceline
from paceline.cli import app
from paceline.knobs.registry import KNOBS
from paceline.report.definitions import DEFINITIONS, GLOSSARY

ROOT = Path(paceline.__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="sphinx is not installed: make docs"
)


BUILT = ROOT / "run" / "site"  # by make docs


def is_built():
    """Return whether make docs has built the site since the sources changed."""
    if not (BUILT / "objects.inv").exists():
        return False
    sources = [
        path
        for folder in ("docs", "src", "tests/record/zoo")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".png", ".css", ".js", ".json", ".html")
    ]
    return (BUILT / "objects.inv").stat().st_mtime > max(one.stat().st_mtime for one in sources)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site, unless make docs has; a warning is an error."""
    if is_built():
        return BUILT
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", out / "doctrees"]
    done = subprocess.run(
        [*command, ROOT / "docs", out / "html"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


def test_reference_has_every_option_of_every_command(site):
    page = (site / "reference/commands.html").read_text()
    for name, command in typer.main.get_command(app).commands.items():
        assert f'id="paceline-{name}"' in page
        for option in command.params:
            for spelling in option.opts if not getattr(option, "hidden", False) else ():
                assert not spelling.startswith("--") or spelling in page, (name, spelling)


def test_reference_has_the_default_of_every_option(site):
    page = (site / "reference/commands.html").read_text()
    rows = [re.findall(r"<td>(.*?)</td>", row, re.DOTALL) for row in page.split("<tr ")]
    cells = {re.sub("<.*?>", "", row[0]): re.sub("<.*?>", "", row[1]) for row in rows if row}
    assert cells["--max-restarts N"] == "0"
    assert cells["--statistics N"] == "4096"
    assert cells["--out FILE"] == "machine.toml"
    assert cells["--scheduler NAME"] == "the one whose command is in PATH"
    assert cells["--hang-timeout SECONDS"] == "300"
    assert cells["--dry-run"] == cells["--record DIR"] == cells["-m, --module"] == ""


def test_reference_has_every_knob(site):
    page = (site / "reference/knobs.html").read_text()
    assert not [name for name in KNOBS if name not in page]


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("which ports are opened", "explanation/security.html"),
        ("firewall", "explanation/security.html"),
        ("number of ranks", "reference/launchers.html"),
        ("slurm two nodes", "how-to/run/first-cluster-job.html"),
        ("million files", "how-to/improve/pack-and-stage.html"),
        ("model too large", "explanation/layouts.html"),
        ("EMA", "how-to/run/average-weights.html"),
        ("starved", "how-to/improve/read-the-report.html"),
        ("core wait", "reference/glossary.html"),
    ],
)
def test_search_finds_the_page_first(site, browser, query, page):
    tab = browser.new_page()
    tab.goto(f"file://{site}/search.html?q={query.replace(' ', '+')}")
    first = tab.locator("#search-results li a").first
    assert (first.get_attribute("href") or "").partition("#")[0] == page
    tab.close()


def test_code_blocks_fit_the_column(site, browser):
    """Program output that a page quotes may be wider: it is marked as text."""
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    wide = []
    for path in site.rglob("*.html"):
        blocks = re.findall(r"<pre>(.*?)</pre>", path.read_text(), re.DOTALL)
        lines = re.sub("<.*?>", "", "\n".join(blocks)).splitlines()
        if not any(len(line) > 80 for line in lines):
            continue
        tab.goto(f"file://{path}")
        kinds = ("console", "python", "bash", "sh", "toml")
        selector = ", ".join(f"article div.highlight-{kind} pre" for kind in kinds)
        found = tab.locator(selector).evaluate_all(
            "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)"
        )
        wide += [(path.relative_to(site), text) for text in found]
    tab.close()
    assert not wide


def test_pages_load_nothing_from_other_sites(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        for tag in ('<script src="http', '<link rel="stylesheet" href="http', '<img src="http'):
            assert tag not in text, page
    assert not [css for css in site.rglob("*.css") if "@import url(http" in css.read_text()]


def test_glossary_has_the_definitions_of_the_report_page(site):
    text = (site / "reference/glossary.html").read_text()
    assert all(html.escape(DEFINITIONS[key], quote=False) in text for key in GLOSSARY.values())
    assert "{{" not in text.partition("<main")[2]


def test_pictures_suit_the_theme_and_link_to_their_full_size(site):
    folder = site / "how-to/improve"
    page = (folder / "read-the-report.html").read_text()
    for name, theme in (("slow-rank.png", "only-light"), ("slow-rank-dark.png", "only-dark")):
        links = re.findall(r'<a class="([^"]*)" href="([^"]*)"><img [^>]*src="([^"]*)"', page)
        (found,) = [link for link in links if link[1].endswith(f"/{name}")]
        assert theme in found[0]
        assert found[1] == found[2]
        assert (folder / found[1]).is_file()
