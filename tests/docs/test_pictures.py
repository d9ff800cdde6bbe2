"""Pictures of the docs have a variant for each theme and a link to their full size."""

import re
from pathlib import Path

import paceline

DOCS = Path(paceline.__file__).parents[2] / "docs"
WITHOUT_VARIANT = {"compression", "perfetto"}  # not of a page of Paceline


def test_every_picture_of_a_page_has_both_variants():
    light = {path.stem for path in (DOCS / "pictures").glob("*.png")}
    dark = {path.stem for path in (DOCS / "pictures" / "dark").glob("*.png")}
    assert {f"{name}-dark" for name in light - WITHOUT_VARIANT} == dark


def test_every_picture_is_used():
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    used = set(re.findall(r"pictures/([\w-]+)\.png", pages))
    assert used == {p.stem for p in (DOCS / "pictures").glob("*.png")}
