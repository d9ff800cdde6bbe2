"""Draw docs/pictures: report pages of real runs with one known slowdown each, shown by Chromium.

Each picture has a light variant (NAME.png) and a dark one (dark/NAME-dark.png). The script checks
that the largest loss of each page is the one that the picture is named after. It needs Chromium
(make test-packages), and root for the throttled link. Arguments: the runs to draw; all by default.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, FloatRect, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[3]
PICTURES = ROOT / "docs" / "pictures"
PACELINE = Path(sys.executable).parent / "paceline"
SCRIPT = "tests/record/zoo/plain_loop.py"
WIDTH = 1100
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
# A network namespace whose loopback device has a bandwidth of 400 Mbit/s.
THROTTLED = (
    "ip link set lo up && tc qdisc add dev lo root tbf rate 400mbit burst 256kb latency 1s && "
    'exec "$@"'
)
# Name, ranks, arguments that cause the slowdown, prefix of the command, start of the largest loss.
# Four ranks share two cores: only a large factor makes the slow rank the largest loss.
RUNS: tuple[tuple[str, int, list[str], list[str], str], ...] = (
    ("slow-rank", 4, ["--slow-rank", "2", "--factor", "6"], [], "Waiting for rank 2, which comp"),
    ("slow-loader", 2, ["--input-sleep", "0.04", "--input-rank", "0"], [], "Waiting for the next"),
    (
        "validation-on-one-rank",
        2,
        ["--validate-rank0", "0.3"],
        [],
        "Evaluating; most on rank 0",
    ),
    (
        *("throttled-link", 2, []),
        *(["unshare", "--net", "sh", "-c", THROTTLED, "throttled"], "All-reduce itself"),
    ),
)
# Further pictures: sections of a run's page.
SECTIONS = (
    ("validation-on-one-rank", "validation-on-one-rank-steps", ["steps", "waiting"]),
    ("slow-rank", "slow-rank-whom", ["states", "whom"]),
    ("slow-rank", "slow-rank-timeline", ["moments"]),
)


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("this needs chromium. HINT: make test-packages")
    (PICTURES / "dark").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for run, ranks, slowdown, prefix, largest in RUNS:
            if len(sys.argv) > 1 and run not in sys.argv[1:]:
                continue
            record, page = Path(name) / run, Path(name) / f"{run}.html"
            command = [*prefix, str(PACELINE), "run", "-n", str(ranks), "--threads", "1"]
            command += ["--record", str(record), SCRIPT, "--steps", "80", *slowdown]
            call(command)
            call([str(PACELINE), "report", str(record), "--html", str(page)])
            for theme in THEMES:
                draw_summary(browser, page, run, theme, largest)
                for of, name_of_picture, ids in SECTIONS:
                    if of == run:
                        draw_sections(browser, page, name_of_picture, theme, ids)
        browser.close()


def call(command: list[str], folder: Path = ROOT, code: int = 0) -> str:
    """Run a command that ends with this exit code; return what it writes to stderr."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"{done.stderr}\nexit code {done.returncode} of: {' '.join(command)}")
    return done.stderr


def open_page(browser: Browser, page: Path, theme: Literal["light", "dark"]) -> Page:
    opened = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=theme)
    opened.goto(f"file://{page}")
    opened.wait_for_selector("html[data-ready]")
    return opened


def picture(name: str, theme: Literal["light", "dark"]) -> Path:
    return PICTURES / (f"{name}.png" if theme == "light" else f"dark/{name}-dark.png")


def draw_summary(
    browser: Browser, page: Path, name: str, theme: Literal["light", "dark"], largest: str
) -> None:
    """Draw the page from its top to the end of the losses, or findings; ``largest``: start of the
    first one.
    """
    opened = open_page(browser, page, theme)
    first = opened.locator(".losses .what").first.inner_text()
    if not first.startswith(largest):
        sys.exit(
            f"{name}: the largest loss or mistake is {first!r}, not {largest!r}. HINT: repeat it"
        )
    box = opened.locator("#summary").bounding_box()
    assert box is not None
    clip: FloatRect = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 12}
    opened.screenshot(path=picture(name, theme), clip=clip, full_page=True)
    opened.close()


def draw_sections(
    browser: Browser, page: Path, name: str, theme: Literal["light", "dark"], ids: list[str]
) -> None:
    """Draw some sections of the page."""
    opened = open_page(browser, page, theme)
    opened.add_style_tag(content="header, nav, footer { display: none !important }")
    hide = "ids => document.querySelectorAll('section')"
    hide += ".forEach(section => { section.hidden = !ids.includes(section.id) })"
    opened.evaluate(hide, ids)
    for section in ids:
        for chart in opened.locator(f"#{section} [data-chart]").all():
            chart.scroll_into_view_if_needed()
            chart.locator(".main-svg").first.wait_for()
    height = opened.evaluate("document.querySelector('main').getBoundingClientRect().bottom")
    clip: FloatRect = {"x": 0, "y": 0, "width": WIDTH, "height": height + 12}
    opened.screenshot(path=picture(name, theme), clip=clip, full_page=True)
    opened.close()


if __name__ == "__main__":
    main()
