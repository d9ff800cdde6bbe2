"""Configuration of the documentation site: Sphinx with the Furo theme, pages in Markdown (MyST).

`make docs` builds it without network. Sphinx was chosen over MkDocs Material (no longer maintained)
and Zensical (its search from file:// loads a script from another site): it checks every reference,
and its search works from a folder as from a web server.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from generated_reference import glossary

from paceline.version import __version__

project = "Paceline"
author = "The Paceline developers"
project_copyright = "The Paceline developers, BSD-3-Clause"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "command_output",
    "generated_reference",
    "pictures",
]
exclude_patterns = ["benchmarks", "pictures/draw", "outputs", "_ext", "reference/generated"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist", "attrs_block", "substitution"]
myst_substitutions = glossary()  # {{ rank }}: a definition that the report page shows, too
myst_heading_anchors = 4  # links to headings, as GitHub makes them

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

smartquotes = False  # -- is the begin of an option

html_theme = "furo"
html_title = f"Paceline {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_static/scorer.js")
html_copy_source = False
html_show_sourcelink = False
# Summaries in search results are fetched, which browsers forbid for file://.
html_show_search_summary = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True


def read_all_pages(app, env, added, changed, removed):
    """Read every page again if one has changed.

    After an incremental build, the search index lacks the index entries of unchanged pages.
    """
    return env.found_docs if added or changed or removed else []


def setup(app):
    """Connect the functions of this file to the events of Sphinx."""
    app.connect("env-get-outdated", read_all_pages)
