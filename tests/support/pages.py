"""Report pages opened in Chromium.

A page must make no requests and cause no console messages, errors or dialogs. Its figures are
compared with those of --json.
"""

import contextlib

import pytest

from paceline.report.page.write_page import document_page
from paceline.report.run_comparison import comparison_charts, comparison_document

UNITS = {"%": 0.01, "s": 1, "ms": 1e-3, "µs": 1e-6, "min": 60, "h": 3600}

HOSTILE = "<img src=x onerror=alert(1)></script><script>window.ours=1</script>\"'&{{7*7}}"

# Elements whose contrast between text and background is too low (WCAG AA: 4.5).
CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (one) => { for (; one; one = one.parentElement) {
    const c = parse(getComputedStyle(one).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const all = "p, li, td, th, dt, dd, a, b, small, figcaption, button, label, h1, h2, h3, summary";
  return [...document.querySelectorAll(all)]
    .filter((one) => one.checkVisibility() && one.textContent.trim())
    .map((one) => { const [a, b] = [light(parse(getComputedStyle(one).color)), light(ground(one))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.outerHTML.slice(0, 80)]; })
    .filter(([ratio]) => ratio < 4.5);
}"""


def before_and_after(before, after):
    """Return the page of two analysed runs."""
    document = comparison_document([before.report], [after.report])
    return document_page(document, comparison_charts([before, after], ["before", "after"]))


class Opening:
    """Opener of pages.

    Attributes:
        troubles: Every request, console message, error and dialog of the pages.
    """

    def __init__(self, browser):
        self.browser, self.troubles, self.contexts = browser, [], []

    @property
    def count(self):
        return len(self.contexts)

    def __call__(self, path, width=1280, theme="light"):
        troubles = self.troubles
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, offline=True
        )
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.on("request", lambda request: troubles.append(request.url))
        page.goto(f"file://{path}")
        troubles.remove(f"file://{path}")
        page.wait_for_selector("html[data-ready]")
        return page


@contextlib.contextmanager
def watched(browser):
    """Yield an Opening, close its pages at the end and fail if one of them had troubles."""
    opening = Opening(browser)
    try:
        yield opening
    finally:
        for context in opening.contexts:
            context.close()
    assert opening.troubles == []


def drawn(page, name):
    """Wait until a chart is drawn and return its plotly traces."""
    plot = page.locator(f"[data-chart={name}]")
    plot.scroll_into_view_if_needed()
    page.wait_for_selector(f"[data-chart={name}] .main-svg")
    return page.evaluate(
        "name => document.querySelector(`[data-chart=${name}]`).data.map(one => ({"
        "x: [...(one.x || [])], y: [...(one.y || [])], z: (one.z || []).map(row => [...row]),"
        "name: one.name, text: one.text}))",
        name,
    )


def number(text):
    """Return the value of a displayed figure, with a tolerance of half its last digit."""
    value, _, unit = text.strip().replace(",", "").partition(" ")
    last = 10.0 ** -len(value.partition(".")[2]) if "e" not in value else abs(float(value)) / 10
    one = UNITS.get(unit, 1)
    return pytest.approx(float(value) * one, abs=0.51 * last * one, rel=0)


def at(data, path):
    for part in path.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part]
    return data


def agree(page, data):
    """Assert that every figure on the page equals that of the JSON; return their number."""
    shown = page.eval_on_selector_all(
        "[data-figure]", "all => all.map(one => [one.dataset.figure, one.textContent.trim()])"
    )
    for path, text in shown:
        # mean.*: the mean of a state's share over the ranks; a/b: the ratio of two figures.
        if path.startswith("mean."):
            shares = [rank[path[5:]] for rank in data["states"]]
            wanted = sum(shares) / len(shares)
        else:
            above, _, below = path.partition("/")
            wanted = at(data, above) / at(data, below) if below else at(data, path)
        if text == "\N{EN DASH}":
            assert wanted is None, path
        elif isinstance(wanted, bool):
            assert text == ("yes" if wanted else "no"), path
        elif text == "one clock":
            assert wanted == 0, path
        elif isinstance(wanted, str):
            assert text == wanted, path
        else:
            assert wanted == number(text), path
    return len(shown)
