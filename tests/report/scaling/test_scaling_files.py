"""Files of a scaling study: CSV, LaTeX, SVG, input of Extra-P, output of TALP."""

import csv
import io
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.analyze.scaling.study_model import STRONG, WEAK, HostPlacement
from paceline.report.scaling.findings import Curve, Findings
from paceline.report.scaling.study_charts import COLOURS, svg_text
from paceline.report.scaling.study_files import (
    columns,
    csv_text,
    decimals,
    extrap_text,
    latex_text,
    talp_files,
)
from studies import make_study, throughput

SVG = "{http://www.w3.org/2000/svg}"


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_has_every_size_with_its_interval():
    rows = rows_of(csv_text(make_study(spread=0.0)))
    assert [(row["scaling"], row["ranks"], row["global_batch"]) for row in rows] == [
        *((STRONG, str(n), "64") for n in (1, 2, 4, 8)),
        *((WEAK, str(n), str(64 * n)) for n in (1, 2, 4, 8)),
    ]
    for row in rows:
        ranks = int(row["ranks"])
        assert float(row["samples_per_s"]) == pytest.approx(throughput(ranks), rel=1e-4)
        assert float(row["speedup"]) == pytest.approx(throughput(ranks) / 1000, rel=1e-4)
        assert float(row["samples_per_s_low"]) <= float(row["samples_per_s"])
        assert float(row["efficiency"]) == pytest.approx(float(row["speedup"]) / ranks, rel=1e-4)
        states = sum(float(row[f"{name}_s"]) for name in ("useful", "wait", "transfer"))
        assert states == pytest.approx(float(row["step_s"]), rel=1e-4)
        assert int(row["memory_bytes"]) == (100 + ranks - 1) << 20
        assert (row["runs"], row["energy_is_estimate"], row["transfer"]) == ("3", "1", "")
    assert list(rows[0]) == columns()


def test_csv_cells_of_a_failed_size_are_empty_and_no_formula():
    study = make_study(kinds=(STRONG,), failed={8}, energy=False)
    last = rows_of(csv_text(study))[-1]
    assert last["failure"] == "RuntimeError: <b>no memory</b>"
    assert (last["failed_runs"], last["samples_per_s"], last["speedup_low"]) == ("2", "", "")
    study.points[-1].__dict__["failure"] = "=HYPERLINK(1)\nmore"
    assert rows_of(csv_text(study))[-1]["failure"] == "'=HYPERLINK(1)"


def test_one_run_without_an_interval_has_empty_ends():
    study = make_study((1, 2), (STRONG,), runs=1)
    study.points[1].runs[0].figures.step_s[:] = study.points[1].runs[0].figures.step_s[:2]
    row = rows_of(csv_text(study))[1]
    assert (float(row["samples_per_s_low"]), row["samples_per_s_high"]) == (0.0, "")


def test_latex_table_escapes_names_and_shows_digits_of_the_interval():
    text = latex_text(make_study(failed={4}))
    assert text.count(r"\begin{tabular}{rrrrrrrrr}") == text.count(r"\end{tabular}") == 2
    assert r"train\textless{}1\textgreater{}.py" in text
    cells = [line.split(" & ") for line in text.splitlines() if line.startswith("8 & 1 & 64 ")]
    assert len(cells) == 1
    assert re.fullmatch(r"\$4\.\d+ \\pm 0\.\d+\$|\$5\.\d+ \\pm 0\.\d+\$", cells[0][5])
    assert "4 & 1 & 64 & \\multicolumn{6}{l}{failed} \\\\" in text
    assert [decimals(*pair) for pair in ((5.6, 0.0123), (1234.0, 56.0), (5.6, math.inf))] == [
        3,
        0,
        3,
    ]


def test_latex_file_has_no_table_without_sizes():
    study = make_study()
    strong = replace(study, points=study.of_kind(STRONG))  # weak scaling was left out
    text = latex_text(strong)
    assert text.count(r"\begin{table}") == 1
    assert "tab:scaling-weak" not in text


def test_fitted_line_below_one_is_not_cut():
    study = make_study((1, 2), (STRONG,), spread=0.0)
    values = [1000.0, 800.0, 500.0]
    curve = Curve(STRONG, "cost model", [1, 2, 4], values, values, values)
    text = svg_text(study, Findings(curves=[curve]))
    (line, _) = re.findall(r'points="([^"]+)"[^>]*stroke-dasharray="2', text)
    heights = [float(point.split(",")[1]) for point in line.split()]
    assert heights == sorted(set(heights))


def test_documents_name_the_script_without_its_folder():
    study = make_study()
    study = replace(study, request=replace(study.request, script="/home/me/train.py"))
    for text in (latex_text(study), svg_text(study, Findings())):
        assert "caling of train.py" in text
        assert "/home/me" not in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_table_compiles(tmp_path):
    table = latex_text(make_study(failed={4}))
    document = f"\\documentclass{{article}}\\begin{{document}}{table}\\end{{document}}"
    (tmp_path / "a.tex").write_text(document)
    words = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "a.tex"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "Overfull" not in result.stdout  # it fits the text width


def test_svg_is_xml_with_points_at_their_values():
    study = make_study()
    fitted = [throughput(n) for n in (1, 8, 16)]
    curve = Curve(STRONG, "law", [1, 8, 16], fitted, [0.9 * x for x in fitted], fitted)
    root = ElementTree.fromstring(svg_text(study, Findings(curves=[curve])))
    assert root.find(f"{SVG}title").text == "Scaling of train<1>.py"
    circles = [one for one in root.iter(f"{SVG}circle") if one.get("fill") == COLOURS[STRONG]]
    assert len(circles) == 2 * 4 + 1  # both panels, and the legend
    speedups = [float(one.get("cy")) for one in circles[:4]]
    assert speedups == sorted(speedups, reverse=True)  # upwards
    # One rank is at the lower left corner of the first panel, 16 ranks would be at its right edge.
    assert (circles[0].get("cx"), circles[0].get("cy")) == ("60.0", "280.0")
    assert float(circles[3].get("cx")) == pytest.approx(60 + 290 * 3 / 4, abs=0.2)
    assert len(list(root.iter(f"{SVG}polygon"))) == 2  # the band of the curve, in both panels
    text = " ".join(one.text for one in root.iter(f"{SVG}text"))
    assert "strong scaling" in text
    assert "weak scaling" in text


def test_svg_of_a_study_without_figures_is_refused():
    study = make_study((1, 2), failed={1, 2})
    with pytest.raises(ValueError, match=r"no measured size\. HINT: paceline scale --continue"):
        svg_text(study, Findings())


def test_extrap_json_follows_its_schema():
    study = make_study()
    tree = json.loads(extrap_text(study, Path("a.json")))
    assert tree["parameters"] == ["p"]
    for callpath, metrics in tree["measurements"].items():
        assert re.fullmatch(r"(strong|weak)->step(->\w+)?", callpath)
        for rows in metrics.values():
            assert [row["point"] for row in rows] == [[1], [2], [4], [8]]
            assert all(len(row["values"]) == 3 for row in rows)
            assert all(isinstance(value, float) for row in rows for value in row["values"])
    times = tree["measurements"]["strong->step"]["time"]
    wanted = [run.mean_step_s for run in study.of_kind(STRONG)[2].figures]
    assert times[2]["values"] == pytest.approx(wanted)
    assert "strong->step->wait" in tree["measurements"]
    assert "strong->step->input" not in tree["measurements"]  # always 0


def test_extrap_json_lines_have_the_same_values():
    study = make_study()
    tree = json.loads(extrap_text(study, Path("a.json")))["measurements"]
    lines = [json.loads(line) for line in extrap_text(study, Path("a.jsonl")).splitlines()]
    found = {(x["callpath"], x["metric"], x["params"]["p"]): x["value"] for x in lines}
    assert len(found) == len(lines)
    assert found["weak->step->useful", "time", 4] == next(
        row["values"] for row in tree["weak->step->useful"]["time"] if row["point"] == [4]
    )


def test_talp_files_have_the_fields_that_talp_pages_reads():
    files = talp_files(make_study((1, 4), runs=2))
    assert sorted(files) == sorted(
        f"{kind}/n{n}-b{batch}-{run}.json"
        for kind, n, batch in (
            (STRONG, 1, 64),
            (STRONG, 4, 64),
            (WEAK, 1, 64),
            (WEAK, 4, 256),
        )
        for run in (0, 1)
    )
    tree = json.loads(files["strong/n4-b64-0.json"])
    assert tree["dlbVersion"].startswith("3.5")
    assert tree["resources"] == {"numCpus": 4, "numNodes": 1, "numMpiRanks": 4}
    region = tree["Application"]["Global"]
    # all ranks' time is outside communication or in it
    whole = 4 * region["elapsedTime"]
    assert region["usefulTime"] + region["mpiTime"] == pytest.approx(whole, rel=1e-6)
    assert region["parallelEfficiency"] == pytest.approx(region["usefulTime"] / whole, rel=0.02)
    product = region["mpiLoadBalance"] * region["mpiCommunicationEfficiency"]
    assert product == pytest.approx(region["mpiParallelEfficiency"])
    inside, outside = region["mpiLoadBalanceIn"], region["mpiLoadBalanceOut"]
    assert inside * outside == pytest.approx(region["mpiLoadBalance"])


def test_talp_balance_is_split_by_node():
    study = make_study((4,), (STRONG,), runs=1)
    figures = study.points[0].runs[0].figures
    figures.spread.busy_mean_s[:] = [1.0, 1.0, 3.0, 1.0]
    figures.pop["load_balance"] = 0.5  # mean 1.5 over the largest, 3
    figures.placement[:] = [HostPlacement("a", "0-1"), HostPlacement("b", "2-3,9-99999999999")]
    region = json.loads(talp_files(study)["strong/n4-b64-0.json"])["Application"]["Global"]
    assert region["mpiLoadBalanceOut"] == pytest.approx(1.5 / 2)
    assert region["mpiLoadBalanceIn"] == pytest.approx(2 / 3)
