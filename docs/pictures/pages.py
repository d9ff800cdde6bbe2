"""Draw docs/pictures: pages of real runs in which something known is slow, as Chromium shows them.

Needs make test-packages (Chromium); the throttled link needs root.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, FloatRect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
PACELINE = Path(sys.executable).parent / "paceline"
SCRIPT = "tests/record/zoo/plain_loop.py"
WIDTH = 1100
# A network of its own whose loopback passes 400 Mbit/s.
THROTTLED = (
    "ip link set lo up && tc qdisc add dev lo root tbf rate 400mbit burst 256kb latency 1s && "
    'exec "$@"'
)
# Name, ranks, what is planted, prefix of the command.
RUNS: tuple[tuple[str, int, list[str], list[str]], ...] = (
    ("slow-rank", 4, ["--slow-rank", "2", "--factor", "3"], []),
    ("slow-loader", 2, ["--input-sleep", "0.04", "--input-rank", "0"], []),
    ("validation-on-one-rank", 2, ["--validate-rank0", "0.3"], []),
    ("throttled-link", 2, [], ["unshare", "--net", "sh", "-c", THROTTLED, "throttled"]),
)


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("this needs chromium. HINT: make test-packages")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for run, ranks, planted, prefix in RUNS:
            record, page = Path(name) / run, Path(name) / f"{run}.html"
            command = [*prefix, str(PACELINE), "run", "-n", str(ranks), "--threads", "1"]
            command += ["--record", str(record), SCRIPT, "--steps", "80", *planted]
            call(command)
            call([str(PACELINE), "report", str(record), "--html", str(page)])
            summary(browser, page, run)
            if run == "validation-on-one-rank":
                parts(browser, page, f"{run}-steps", ["steps", "waiting"])
            if run == "slow-rank":
                parts(browser, page, f"{run}-whom", ["states", "whom"])
                parts(browser, page, f"{run}-dark", ["moments"], theme="dark")
        browser.close()


def call(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\nexit code {done.returncode} of: {' '.join(command)}")


def summary(browser: Browser, page: Path, name: str) -> None:
    """From the top to the end of what was lost, and why."""
    opened = browser.new_page(viewport={"width": WIDTH, "height": 900})
    opened.goto(f"file://{page}")
    opened.wait_for_selector("html[data-ready]")
    box = opened.locator("#summary").bounding_box()
    assert box is not None
    clip: FloatRect = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 12}
    opened.screenshot(path=PICTURES / f"{name}.png", clip=clip, full_page=True)
    opened.close()


def parts(
    browser: Browser,
    page: Path,
    name: str,
    ids: list[str],
    theme: Literal["light", "dark"] = "light",
) -> None:
    """Some sections of the page, which follow each other or not."""
    opened = browser.new_page(
        viewport={"width": WIDTH, "height": 900},
        color_scheme=theme,
    )
    opened.goto(f"file://{page}")
    opened.wait_for_selector("html[data-ready]")
    opened.add_style_tag(content="header, nav, footer { display: none !important }")
    hide = "ids => document.querySelectorAll('section')"
    hide += ".forEach(section => { section.hidden = !ids.includes(section.id) })"
    opened.evaluate(hide, ids)
    for section in ids:
        for chart in opened.locator(f"#{section} [data-chart]").all():
            chart.scroll_into_view_if_needed()
            chart.locator(".main-svg").first.wait_for()
    opened.screenshot(path=PICTURES / f"{name}.png", full_page=True)
    opened.close()


if __name__ == "__main__":
    main()
