"""Pictures of the docs have a variant for each theme and a link to their full size."""

import re
from pathlib import Path

import paceline

DOCS = Path(paceline.__file__).parents[2] / "docs"
WITHOUT_VARIANT = {"compression", "perfetto"}  # not of a page of Paceline


def pictures():
    return [path for path in (DOCS / "pictures").iterdir() if path.suffix in (".png", ".svg")]


def test_every_picture_of_a_page_has_both_variants():
    light = {path.stem: path.suffix for path in pictures()}
    dark = {path.stem: path.suffix for path in (DOCS / "pictures" / "dark").iterdir()}
    with_variant = {name: end for name, end in light.items() if name not in WITHOUT_VARIANT}
    assert {f"{name}-dark": end for name, end in with_variant.items()} == dark


def test_every_picture_is_used():
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    used = set(re.findall(r"pictures/([\w-]+\.(?:png|svg))", pages))
    assert used == {path.name for path in pictures()}
