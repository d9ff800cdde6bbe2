"""Claim: the page of 512 ranks with 10,000 steps each is under 10 MB and opens in under 3 seconds.

The record is made up as in report_size.py, with one bucket a step. Measured: `paceline report
FOLDER --html` in a process of its own; the file; and in headless Chromium, a fresh one each round,
the time from asking for the file until the page can be read and used, and until every chart in it
has been drawn (they are drawn when they come near the window).
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, console, finish, launch, new_table, options, run, spread, target
from playwright.sync_api import sync_playwright
from report_size import simulated, write
from rich.progress import track

MEGABYTES, SECONDS = 10.0, 3.0
WHAT = {
    "write_s": "paceline report --html, s",
    "megabytes": "file, MB",
    "open_s": "until it can be read, s",
    "drawn_s": "until every chart is drawn, s",
}
SCROLL = """async () => {
  const charts = [...document.querySelectorAll('[data-chart]')];
  for (const chart of charts) {
    chart.scrollIntoView();
    while (!chart.querySelector('.main-svg')) await new Promise(requestAnimationFrame);
  }
}"""


def main() -> None:
    parser = options("page_size", __doc__ or "", repeats=5)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="8 ranks, 20 steps: shows it runs")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.steps = 8, 20
    chromium = shutil.which("chromium") or parser.error("needs chromium: make test-packages")
    with tempfile.TemporaryDirectory() as name:
        folder, page = Path(name) / "record", Path(name) / "page.html"
        folder.mkdir()
        write(folder, args.ranks, *simulated(args.ranks, args.steps, args.ranks, buckets=1))
        turns = track(range(args.repeats), "page size", transient=True)
        found = [measure(folder, page, chromium) for _ in turns]
    report(args, found)


def measure(folder: Path, page: Path, chromium: str) -> dict[str, float]:
    start, end = launch([str(BIN / "paceline"), "report", str(folder), "--html", str(page)])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        asked = time.monotonic()
        opened.goto(f"file://{page}")
        opened.wait_for_selector("html[data-ready]")
        ready = time.monotonic()
        opened.evaluate(SCROLL)
        drawn = time.monotonic()
        browser.close()
    return {
        "write_s": end - start,
        "megabytes": page.stat().st_size / 1e6,
        "open_s": ready - asked,
        "drawn_s": drawn - asked,
    }


def report(args: Any, found: list[dict[str, float]]) -> None:
    rounds = {name: [one[name] for one in found] for name in WHAT}
    medians = {name: spread(values) for name, values in rounds.items()}
    headings = ("what", "median (quartiles)")
    title = f"Page of {args.ranks} ranks of {args.steps} steps, {args.repeats} rounds"
    table = new_table(*headings, title=title)
    for name, label in WHAT.items():
        m = medians[name]
        table.add_row(label, f"{m['median']:.2f} ({m['q1']:.2f}-{m['q3']:.2f})")
    console.print(table)
    size = f"the page of {args.ranks} ranks of {args.steps} steps"
    targets = [
        target(f"{size} {claim}", limit, rounds[name])
        for name, claim, limit in (
            ("megabytes", f"has at most {MEGABYTES:g} MB", MEGABYTES),
            ("open_s", f"opens in at most {SECONDS:g} s", SECONDS),
        )
    ]
    finish(args, found, medians, {}, targets)


if __name__ == "__main__":
    run(main)
