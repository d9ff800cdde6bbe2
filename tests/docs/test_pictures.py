"""Pictures of the docs have a variant for each theme and a link to their full size."""

import re
from pathlib import Path

import paceline

DOCS = Path(paceline.__file__).parents[2] / "docs"
WITHOUT_VARIANT = {"compression", "perfetto"}  # not of a page of Paceline


PICTURES = DOCS / "pictures"


def pictures():
    """Return the pictures of pages, without their dark variants."""
    files = (path for path in PICTURES.rglob("*") if path.suffix in (".png", ".svg"))
    return [path for path in files if path.parent.name != "dark"]


def test_every_picture_of_a_page_has_both_variants():
    wanted = {
        path.parent / "dark" / f"{path.stem}-dark{path.suffix}"
        for path in pictures()
        if path.stem not in WITHOUT_VARIANT
    }
    assert wanted == {path for path in PICTURES.rglob("dark/*") if path.is_file()}


def test_every_picture_is_used():
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    used = set(re.findall(r"pictures/([\w/-]+\.(?:png|svg))", pages))
    assert used == {str(path.relative_to(PICTURES)) for path in pictures()}
