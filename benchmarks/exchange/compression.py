"""What sending less does to a training: the held-out loss after each epoch, and the bytes that each
rank exchanges in a step, with each knob that compresses or averages, over some seeds.

Handwritten digits (real ones, scikit-learn's) on DDP and two ranks. The knobs are set by `paceline
run --settings`; the bytes are those of the record's collectives, of an all-gather what comes out.
No time is measured: what a knob gains hangs on the network; `paceline diagnose --try` measures it.

    python benchmarks/exchange/compression.py --picture docs/pictures/compression.png
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, new_table, options, ratio, run, spread

ALL = "all of it"
WAYS: dict[str, dict[str, Any]] = {
    ALL: {},
    "bfloat16": {"compress-bf16": True},
    "float16": {"compress-fp16": True},
    "PowerSGD, rank 2": {"compress-powersgd": 2},
    "top 1 %": {"compress-topk": 0.01},
    "mean every 8 steps": {"average-every": 8},
}


def main() -> None:
    parser = options("compression", __doc__ or "", repeats=5)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--picture", help="of the losses, as PNG (needs Chromium)")
    args = parser.parse_args()
    curves: dict[str, list[list[dict[str, float]]]] = {way: [] for way in WAYS}
    sent: dict[str, float] = {}
    for seed in range(args.repeats):
        for way in WAYS:
            losses, sent[way] = trained(way, seed, args.epochs)
            curves[way].append(losses)
        console.print(f"seed {seed + 1} of {args.repeats}", highlight=False)
    report(args, curves, sent)


def trained(way: str, seed: int, epochs: int) -> tuple[list[dict[str, float]], float]:
    """Of each epoch loss and accuracy; bytes a step of a rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = ['format = "paceline-settings"', "version = 1", "[knobs]"]
        lines += [f"{knob} = {json.dumps(value)}" for knob, value in WAYS[way].items()]
        (folder / "s.toml").write_text("\n".join(lines) + "\n")
        words = ["run", "-n", "2", "--threads", "1", "--settings", folder / "s.toml"]
        words += ["--record", folder / "record", SCRIPTS / "exchange/digits_ddp.py"]
        printed = output([BIN / "paceline", *words, "--seed", seed, "--epochs", epochs])
        figures = json.loads(output([BIN / "paceline", "report", "--json", folder / "record"]))
    found = [json.loads(one) for one in re.findall(r"{.*}", printed)]
    assert len(found) == epochs, printed
    whole = sum(one["bytes"] for group in figures["groups"] for one in group["collectives"])
    return found, whole / figures["steps"]


def output(command: list[Any]) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{done.stderr}\nexit code {done.returncode} of: {' '.join(map(str, command))}")
    return done.stdout


def report(args: Any, curves: dict[str, Any], sent: dict[str, float]) -> None:
    headings = ("", "kB a step", "held-out loss", "low", "high", "accuracy")
    table = new_table(*headings, title=f"digits after {args.epochs} epochs, {args.repeats} seeds")
    last = {way: [each[-1]["loss"] for each in runs] for way, runs in curves.items()}
    medians = {}
    for way, runs in curves.items():
        accuracy = statistics.median(each[-1]["accuracy"] for each in runs)
        medians[way] = {
            "bytes_a_step": sent[way],
            "accuracy": accuracy,
            "losses": [
                statistics.median(each[epoch]["loss"] for each in runs)
                for epoch in range(args.epochs)
            ],
        }
        figures = spread(last[way])
        cells = [f"{figures[key]:.4f}" for key in ("median", "low", "high")]
        table.add_row(way, f"{sent[way] / 1e3:.1f}", *cells, f"{accuracy:.3f}")
    console.print(table)
    if args.picture:
        drawn(medians, Path(args.picture))
    finish(args, curves, medians, {way: ratio(last[way], last[ALL]) for way in WAYS}, [])


def drawn(medians: dict[str, Any], path: Path) -> None:
    """The median loss by epoch, a line a way, as Chromium shows it."""
    import plotly.graph_objects as plots
    from playwright.sync_api import sync_playwright

    figure = plots.Figure(layout={"width": 900, "height": 480, "template": "plotly_white"})
    for way, figures in medians.items():
        name = f"{way}: {figures['bytes_a_step'] / 1e3:.1f} kB a step"
        epochs = list(range(1, len(figures["losses"]) + 1))
        figure.add_scatter(x=epochs, y=figures["losses"], name=name, mode="lines+markers")
    figure.update_xaxes(title="epoch")
    figure.update_yaxes(title="held-out loss", type="log")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        page = Path(name) / "losses.html"
        figure.write_html(page, include_plotlyjs=True)
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 920, "height": 500})
        opened.goto(f"file://{page}")
        opened.wait_for_selector(".main-svg")
        opened.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    run(main)
