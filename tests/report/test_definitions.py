"""Every term of the page has its definition on hover and keyboard focus, shared with the docs."""

import ast
import itertools
import re
from pathlib import Path

import pytest
from pages import watched
from records import made, report_text

import paceline
from paceline.analyze.diagnosis.table import INDICATORS
from paceline.analyze.figures.losses import collective_name
from paceline.analyze.records.state_timeline import STATES
from paceline.record.ring.states import Op
from paceline.report.definitions import DEFINITIONS, GLOSSARY
from paceline.report.diagnosis.causes import VERDICTS
from paceline.report.figure_names import NAMES as FIGURES
from paceline.report.figure_names import named_figure
from paceline.report.page.write_page import ASSETS

DOCS = Path(paceline.__file__).parents[2] / "docs"
UNEXPLAINED = """words => [...document.querySelectorAll("th, dt, h2, .legend .key")]
  .filter((one) => !one.querySelector(".term"))
  .map((one) => one.textContent.trim().toLowerCase()).filter((text) => words.includes(text))"""
TERMS = """() => [...document.querySelectorAll(".term")].map((one) => [
  one.tabIndex, document.getElementById(one.getAttribute("aria-describedby")).textContent])"""


def keys_of_texts(source):
    """Yield the keys in texts of documents: "[label|key]", or "[key]" where the key is defined.

    Headings of columns are "heading|key".
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if heading := re.fullmatch(r"[^][|]+\|([a-zA-Z][a-zA-Z_/ -]*)", node.value):
                yield heading[1]
            for label, key in re.findall(r"\[([^][|]+)(\|[a-z][a-zA-Z -]+)?\]", node.value):
                if key or label in DEFINITIONS:
                    yield key[1:] or label


def used_keys():
    """Return the keys of the definitions that templates and tables of the page refer to."""
    text = "".join(path.read_text() for path in ASSETS.rglob("*.html"))
    keys = set(re.findall(r'term\("([^"~]+)"(?: ?,|\))', text))
    for path in ASSETS.parents[1].rglob("*.py"):
        keys |= set(re.findall(r'\bterm="([^"]+)"', path.read_text()))
        keys |= set(keys_of_texts(path.read_text()))
    keys |= {f"held by {name}" for name in INDICATORS} | set(STATES)
    keys |= {named_figure(name).term for name in FIGURES} | set(VERDICTS)
    return keys | {collective_name(op) for op in Op} & set(DEFINITIONS)


def test_every_definition_is_used_and_every_used_one_is_defined():
    assert used_keys() == set(DEFINITIONS)


def test_glossary_of_the_docs_has_the_definitions_of_the_page():
    text = (DOCS / "reference" / "glossary.md").read_text()
    shared = dict(re.findall(r"^(\S.*)\n  \{\{ (\w+) \}\}", text, re.MULTILINE))
    assert set(shared) == set(GLOSSARY)
    assert {re.sub(r"\W+", "_", term).lower() for term in shared} == set(shared.values())
    assert set(GLOSSARY.values()) <= set(DEFINITIONS)
    # A term of the page that the glossary has comes from the common table.
    own = re.findall(r"^(\S.*)\n  (?!\{\{)", text.partition("```{glossary}\n")[2], re.MULTILINE)
    assert not set(own) & set(DEFINITIONS) - {"checkpoint", "record"}  # two meanings each


@pytest.mark.parametrize("count", [1, 2, 3], ids=["run", "comparison", "scaling"])
def test_terms_of_a_page_are_explained_on_hover_and_focus(tmp_path, browser, count):
    sizes = {1: [4], 2: [2, 2], 3: [1, 2, 4]}[count]
    folders = [made(tmp_path / f"run{n}", size=size) for n, size in enumerate(sizes)]
    path = tmp_path / "page.html"
    report_text(folders, html=path)
    with watched(browser) as show:
        page = show(path)
        words = {*GLOSSARY, *itertools.chain(DEFINITIONS, FIGURES.values())}
        words = {word.strip().lower() for word in words}
        assert page.evaluate(UNEXPLAINED, sorted(words | {f"{word}s" for word in words})) == []
        terms = page.evaluate(TERMS)
        assert len(terms) > 20
        assert {index for index, _ in terms} == {0}
        assert {text for _, text in terms} <= set(DEFINITIONS.values())
        for term in page.locator(".term:visible").all():
            tip = term.locator(".tip")
            assert not tip.is_visible()
            term.focus()
            assert tip.is_visible()
            term.blur()
            term.hover()
            assert tip.is_visible()
            page.mouse.move(0, 0)
