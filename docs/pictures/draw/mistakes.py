"""Draw docs/pictures/verify-*.png and guard-band.png: pages of ``paceline verify`` for scripts with
one mistake each, and the band of a reference with a run that leaves it.

Each picture has a light variant (NAME.png) and a dark one (dark/NAME-dark.png). The script checks
that Paceline names the mistake. It needs Chromium (make test-packages). Arguments: the pictures
to draw; all by default.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as plots
from pages import PACELINE, PICTURES, ROOT, THEMES, call, draw_sections, draw_summary, picture
from playwright.sync_api import Browser, sync_playwright

from paceline.analyze.reference.reference_file import read_reference
from paceline.analyze.reference.run_guard import make_standard

RIGHT = ROOT / "tests/record/zoo/parallel/ddp.py"
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
WRAP = "    model = DDP(nn.Sequential(*layers))\n"
FROZEN = f"    layers[2].requires_grad_(False)\n{WRAP}    layers[2].requires_grad_(True)\n"
# Name, text of the right script, text instead of it, title of the finding, drawn section.
MISTAKES = (
    ("verify-epochs", SET_EPOCH, "", "All epochs have the same order", "samples"),
    ("verify-gradients", WRAP, FROZEN, "Gradients are not exchanged", "layers"),
)
GUARDED = ROOT / "benchmarks/scripts/verify/guarded.py"
FAULT = ("--fault", "rate", "--at", "350")  # the learning rate grows tenfold
BACKGROUNDS = {"light": "#ffffff", "dark": "#14171b"}
WIDTHS = 2  # of a value's noise that the drawn band is wider than that of curves


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("this needs chromium. HINT: make test-packages")
    (PICTURES / "dark").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, right, wrong, title, section in MISTAKES:
            if len(sys.argv) > 1 and name not in sys.argv[1:]:
                continue
            page = verify(Path(folder) / name, right, wrong)
            for theme in THEMES:
                draw_summary(browser, page, name, theme, title)
                draw_sections(browser, page, f"{name}-{section}", theme, [section])
        if len(sys.argv) == 1 or "guard-band" in sys.argv[1:]:
            draw_band(browser, Path(folder))
        browser.close()


def verify(folder: Path, right: str, wrong: str) -> Path:
    """Verify the script with a mistake; return the page."""
    folder.mkdir()
    text = RIGHT.read_text()
    assert right in text
    (folder / "train.py").write_text(text.replace(right, wrong))
    page = folder / "verify.html"
    words = ["verify", "-n", "4", "--threads", "1", "--html", str(page), "train.py"]
    call([str(PACELINE), *words, "--steps", "40", "--batch", "32"], folder, code=1)
    return page


def draw_band(browser: Browser, folder: Path) -> None:
    """Train a reference and a job with a fault, and draw its loss over the band."""
    reference, record, result = (folder / name for name in ("ref.json", "record", "out.json"))
    (folder / "train.py").symlink_to(GUARDED)
    made = [str(PACELINE), "run", "--make-reference", str(reference), "--seeds", "3", "train.py"]
    call([*made, "--seed", "{seed}"], folder)
    held = ["run", "-n", "2", "--reference", str(reference), "--record", str(record)]
    held += ["--metric", "backward", "--json", str(result), "train.py", "--seed", "7", *FAULT]
    print(call([str(PACELINE), *held], folder))
    left = json.loads(result.read_text())["guard"]["left"]
    if left is None:
        sys.exit("the run did not leave the band. HINT: repeat it")
    band = make_standard(read_reference(reference)).band
    run = read_reference(record).runs[0]
    wide = band.offset + WIDTHS * band.noise
    edges = np.concatenate([band.high + wide, (band.low - wide)[::-1]])
    figure = plots.Figure()
    figure.add_scatter(
        x=np.concatenate([band.x, band.x[::-1]]),
        y=np.maximum(edges, 0),
        fill="toself",
        mode="none",
        fillcolor="rgba(86, 180, 233, 0.35)",
        name="band of 3 reference runs on one rank",
    )
    figure.add_scatter(x=band.x, y=band.mean, name="their mean", line={"color": "#56b4e9"})
    line = {"color": "#d55e00", "width": 1.5}
    figure.add_scatter(x=run.samples, y=run.values, name="the job on 2 ranks", line=line)
    said = f"left the band at step {left['step']},<br>certain at step {left['found_step']}"
    figure.add_vline(x=left["samples"], line={"dash": "dash", "color": "#888888"})
    place: dict[str, Any] = {"x": left["samples"], "y": 1, "yref": "paper"}
    figure.add_annotation(
        **place, text=said, showarrow=False, xanchor="right", xshift=-8, align="right"
    )
    for theme in THEMES:
        figure.update_layout(
            width=900,
            height=400,
            margin={"l": 60, "r": 20, "t": 50, "b": 50},
            template="plotly_white" if theme == "light" else "plotly_dark",
            paper_bgcolor=BACKGROUNDS[theme],
            plot_bgcolor=BACKGROUNDS[theme],
            legend={"orientation": "h", "y": 1.12},
            xaxis={"title": "samples of all ranks"},
            yaxis={"title": "loss", "rangemode": "tozero"},
        )
        page = folder / "band.html"
        figure.write_html(page, include_plotlyjs=True)
        opened = browser.new_page(viewport={"width": 920, "height": 420}, color_scheme=theme)
        opened.goto(f"file://{page}")
        opened.add_style_tag(content=f"body {{ margin: 0; background: {BACKGROUNDS[theme]} }}")
        opened.locator(".main-svg").first.wait_for()
        opened.locator(".plotly-graph-div").screenshot(path=picture("guard-band", theme))
        opened.close()


if __name__ == "__main__":
    main()
