"""Pictures of the docs: plotly's figures as Chromium shows them, for light and dark themes."""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

# Okabe and Ito: distinguishable with all kinds of colour vision, and on both backgrounds.
COLORS = (
    *("#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c8c8c", "#b8a800"),
    "#8a5a2b",
)
THEMES = {"light": ("plotly_white", "#ffffff"), "dark": ("plotly_dark", "#14171b")}


def draw_figures(folder: Path, figures: dict[str, Any]) -> None:
    """Write folder/NAME.png and folder/dark/NAME-dark.png of each figure, which has a size."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("pictures need Chromium. HINT: make test-packages, or no --pictures")
    (folder / "dark").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for what, figure in figures.items():
            for theme, (template, background) in THEMES.items():
                figure.update_layout(
                    template=template, paper_bgcolor=background, plot_bgcolor=background
                )
                page = Path(name) / "figure.html"
                figure.write_html(page, include_plotlyjs=True)
                size = {"width": figure.layout.width, "height": figure.layout.height}
                opened = browser.new_page(viewport=size)
                opened.goto(f"file://{page}")
                opened.add_style_tag(content=f"body {{ margin: 0; background: {background} }}")
                opened.locator(".main-svg").first.wait_for()
                file = f"{what}.png" if theme == "light" else f"dark/{what}-dark.png"
                opened.locator(".plotly-graph-div").screenshot(path=folder / file)
                opened.close()
        browser.close()


def bars(runs: list[list[float]]) -> dict[str, Any]:
    """Return medians over the runs of each point, with error bars from the least to the largest."""
    columns = [sorted(column) for column in zip(*runs, strict=True)]
    middle = [column[len(column) // 2] for column in columns]
    return {
        "y": middle,
        "error_y": {
            "array": [column[-1] - m for column, m in zip(columns, middle, strict=True)],
            "arrayminus": [m - column[0] for column, m in zip(columns, middle, strict=True)],
        },
    }
