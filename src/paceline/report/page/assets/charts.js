"use strict";
// Draws the page's charts from the JSON in #data. Figures are computed in Python; here is only
// what they look like.
(() => {
  const text = document.getElementById("data").textContent;
  const data = JSON.parse(text);
  const root = document.documentElement;
  const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const LINES = ["validation", "wait", "useful", "transfer", "input", "checkpoint", "starved", "other"]; // colours
  const FULL = 250; // stands for a share of 1
  const SMALL_DATA = 300000; // characters; all charts of such a page are drawn while it loads
  const PAPER_WIDTH = 690; // pixels of a chart that is printed
  const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

  function rows(base64, width, make) {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const found = [];
    for (let start = 0; start < bytes.length; start += width) {
      found.push(Array.from(bytes.subarray(start, start + width), make));
    }
    return found;
  }

  let paper = false;
  function layout(height, more) {
    const axis = { gridcolor: css("line"), zerolinecolor: css("line"), linecolor: css("line"), automargin: true };
    const base = {
      height, margin: { l: 60, r: 20, t: 10, b: 45 }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("ink"), family: "system-ui, Liberation Sans, sans-serif", size: 13 },
      hoverlabel: { bgcolor: css("ink"), font: { color: css("ground") } },
    };
    const found = { ...base, ...(paper ? { width: PAPER_WIDTH } : {}), ...more };
    for (const name of ["xaxis", "yaxis"]) found[name] = { ...axis, ...(more[name] || {}) };
    return found;
  }

  const unit = (seconds) => (seconds < 1 ? ["ms", 1e3] : ["s", 1]); // one for a whole axis

  const scale = () => [[0, css("map0")], [0.35, css("map1")], [1, css("map2")]];
  const chosen = (name, otherwise) => {
    const box = document.querySelector(`input[name=${name}]:checked`);
    return box ? box.value : otherwise;
  };
  const category = (title, more) => ({ title: { text: title }, type: "category", nticks: 16, ...more });
  // A row of a map never gets less than a pixel: what can't be seen would be left out.
  const tall = (count, least) => Math.max(least, Math.min(24, Math.max(1, 420 / count)) * count + 90);

  const label = (state) => (data.stateNames || {})[state] || state;

  function states() {
    const { ranks, shares } = data.shares;
    const order = ranks.map((_, i) => i);
    if (chosen("sort", "rank") === "loss") order.sort((a, b) => shares.useful[a] - shares.useful[b]);
    const names = order.map((i) => String(ranks[i]));
    const traces = data.states.map((state) => ({
      type: "bar", name: label(state), x: names, y: order.map((i) => shares[state][i]),
      marker: { color: css(state), line: { width: 0 } },
      hovertemplate: `rank %{x}<br>${label(state)} %{y:.1%}<extra></extra>`,
    }));
    return [traces, layout(320, {
      barmode: "stack", bargap: ranks.length > 64 ? 0 : 0.15,
      xaxis: category("rank"), yaxis: { title: { text: "share of the rank's time" }, tickformat: ".0%", range: [0, 1] },
    })];
  }

  function steps() {
    const { at, names, together } = data.steps;
    const [sign, times] = unit(data.medianStep);
    const [median, least, most] = ["median", "least", "most"].map((name) => data.steps[name].map((v) => v * times));
    const traces = [];
    if (together) {
      const band = { type: "scatter", mode: "lines", x: at, line: { width: 0 }, hoverinfo: "skip" };
      traces.push({ ...band, y: least }, { ...band, y: most, fill: "tonexty", fillcolor: css("line") });
    }
    traces.push({
      type: "scatter", mode: "lines", x: at, y: median, line: { color: css("validation"), width: 1.5 },
      customdata: names.map((name, i) => [name, least[i], most[i]]),
      hovertemplate: together
        ? `steps %{customdata[0]}<br>median %{y:.4~g} ${sign}, %{customdata[1]:.4~g} to %{customdata[2]:.4~g} ${sign}<extra></extra>`
        : `step %{x}<br>%{y:.4~g} ${sign}<extra></extra>`,
    });
    traces.push({
      type: "scatter", mode: "markers", x: data.outliers.map((o) => o.step), y: data.outliers.map((o) => o.seconds * times),
      marker: { color: css("wait"), size: 7, symbol: "diamond" },
      text: data.outliers.map((o) => o.text), hovertemplate: `step %{x}: %{y:.4~g} ${sign}<br>%{text}<extra></extra>`,
    });
    const wide = Math.max(...most) > 8 * data.medianStep * times; // a few long steps would flatten all others
    return [traces, layout(320, {
      xaxis: { title: { text: "step" } },
      yaxis: { title: { text: `step time (${sign})` },
        ...(wide ? { type: "log", dtick: "D2" } : { rangemode: "tozero" }) },
    })];
  }

  function waiting() {
    const map = data.waiting;
    const which = chosen("map", "mean");
    const z = rows(map[which], map.columns.length, (v) => v / FULL);
    const most = z.reduce((top, row) => Math.max(top, ...row), 0.05);
    const trace = {
      type: "heatmap", z, x: map.columns, y: map.rows, zmin: 0, zmax: most, colorscale: scale(),
      colorbar: { tickformat: ".0%", thickness: 12, outlinewidth: 0, title: { text: "waiting", side: "right" } },
      hovertemplate: "rank %{y}, step %{x}<br>waited for %{z:.1%} of the step<extra></extra>",
    };
    return [[trace], layout(tall(map.rows.length, 220), {
      xaxis: category("step", { tickangle: 0, nticks: 10 }), yaxis: category("rank", { autorange: "reversed" }),
    })];
  }

  function late() {
    const { names, shares } = data.late;
    const traces = Object.keys(shares).map((state) => ({
      type: "bar", orientation: "h", y: names, x: shares[state], name: label(state), marker: { color: css(state) },
      hovertemplate: `%{y} was late: ${data.longer[state]}<br>%{x:.1%} of all ranks' time<extra></extra>`,
    }));
    return [traces, layout(Math.max(220, 26 * names.length + 80), {
      barmode: "stack", xaxis: { title: { text: "share of all ranks' time" }, tickformat: ".1%", rangemode: "tozero" },
      yaxis: { type: "category", autorange: "reversed" },
    })];
  }

  function pairs() {
    const { names, shares, most } = data.pairs;
    const trace = {
      type: "heatmap", z: rows(shares, names.length, (v) => (v / FULL) * most), x: names, y: names,
      colorscale: scale(), zmin: 0, zmax: most || 1, colorbar: { tickformat: ".1%", thickness: 12, outlinewidth: 0 },
      hovertemplate: "rank %{y} waited for rank %{x}<br>%{z:.1%} of the time of rank %{y}<extra></extra>",
    };
    return [[trace], layout(Math.min(560, tall(names.length, 260)), {
      xaxis: category("late rank"), yaxis: category("waiting rank", { autorange: "reversed" }),
    })];
  }

  function schedule() { // of a pipeline: a bar for each forward and backward of a micro-batch
    const { rows: stages, bars } = data.schedule;
    const traces = [true, false].map((forward) => {
      const own = bars.filter((bar) => bar[4] === forward);
      return {
        type: "bar", orientation: "h", y: own.map((bar) => stages[bar[0]]), base: own.map((bar) => bar[1]),
        x: own.map((bar) => bar[2] - bar[1]), text: own.map((bar) => bar[3]), textposition: "inside",
        insidetextanchor: "middle", name: forward ? "forward" : "backward",
        marker: { color: css(forward ? "validation" : "useful"), line: { color: css("ground"), width: 1 } },
        hovertemplate: "%{y}: %{text}<br>%{x:.3~g} ms, from %{base:.3~f} ms<extra></extra>",
      };
    });
    return [traces, layout(Math.max(200, 46 * stages.length + 110), {
      barmode: "overlay", showlegend: true, legend: { orientation: "h", y: 1.15 },
      xaxis: { title: { text: "ms from the start of the step" } },
      yaxis: { type: "category", autorange: "reversed", categoryorder: "array", categoryarray: stages },
    })];
  }

  function moment(number) {
    const one = data.moments[number];
    const z = rows(one.state, one.columns, (v) => (v >= FULL ? null : v));
    const text = z.map((row) => row.map((v) => (v === null ? "" : label(data.states[v]))));
    const count = data.states.length;
    const steps = data.states.flatMap((state, i) => [[i / count, css(state)], [(i + 1) / count, css(state)]]);
    const width = one.span_ms / one.columns;
    const trace = {
      type: "heatmap", z, text, x0: width / 2, dx: width, y: one.rows, zmin: -0.5, zmax: count - 0.5,
      colorscale: steps, showscale: false, zsmooth: false,
      hovertemplate: "rank %{y}, at %{x:.3~f} ms<br>%{text}<extra></extra>",
    };
    return [[trace], layout(tall(one.rows.length, 150), {
      xaxis: { title: { text: "ms" }, showgrid: false }, yaxis: category("rank", { autorange: "reversed", showgrid: false }),
    })];
  }

  function runs() { // time a step of several runs, by state
    const { names, seconds } = data.runs;
    const whole = names.map((_, i) => data.states.reduce((sum, state) => sum + seconds[state][i], 0));
    const [sign, times] = unit(Math.max(...whole));
    const traces = data.states.map((state) => ({
      type: "bar", orientation: "h", y: names, x: seconds[state].map((v) => v * times), name: label(state),
      marker: { color: css(state) }, hovertemplate: `%{y}<br>${label(state)} %{x:.3~g} ${sign} per step<extra></extra>`,
    }));
    return [traces, layout(Math.max(180, 48 * names.length + 90), {
      barmode: "stack", xaxis: { title: { text: `time per step, mean of all ranks (${sign})` } },
      yaxis: { type: "category", autorange: "reversed" },
    })];
  }

  function courses() { // step times of several runs
    const [sign, times] = unit(Math.max(...data.courses.flatMap((run) => run.median)));
    const traces = data.courses.map((run, i) => ({
      type: "scatter", mode: "lines", name: run.name, x: run.at, y: run.median.map((v) => v * times),
      line: { color: css(LINES[i % LINES.length]), width: 1.5 },
      hovertemplate: `%{fullData.name}, step %{x}<br>%{y:.4~g} ${sign}<extra></extra>`,
    }));
    return [traces, layout(320, {
      showlegend: true, legend: { orientation: "h", y: 1.12 }, xaxis: { title: { text: "step" } },
      yaxis: { title: { text: `step time (${sign})` }, rangemode: "tozero" },
    })];
  }

  function curves(which) {
    const found = data[which];
    const traces = found.lines.map((line, i) => ({
      type: "scatter", mode: "lines+markers", name: line.name, x: found.ranks, y: line.values,
      line: line.ideal ? { color: css("soft"), dash: "dash" } : { color: css(LINES[i % LINES.length]) },
      text: found.ranks.map((n) => (n === 1 ? "1 rank" : `${n} ranks`)),
      hovertemplate: `%{text}<br>${line.name} %{y:.3f}<extra></extra>`,
    }));
    return [traces, layout(340, {
      showlegend: true, legend: { orientation: "h", y: 1.15 },
      xaxis: { title: { text: "ranks" }, type: "log", tickvals: found.ranks, ticktext: found.ranks.map(String) },
      yaxis: found.log ? { type: "log", dtick: "D2" } : { range: [0, 1.05] },
    })];
  }

  function bands(which) { // lines by number of ranks, with intervals
    const found = data.bands[which];
    const traces = [];
    for (const line of found.lines) {
      const colour = line.ideal ? css("soft") : css(LINES[line.colour % LINES.length]);
      if (line.fitted) {
        const edge = { type: "scatter", mode: "lines", x: line.x, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
        traces.push({ ...edge, y: line.low }, { ...edge, y: line.high, fill: "tonexty", fillcolor: colour + "22" });
      }
      const text = line.x.map((n) => (n === 1 ? "1 rank" : `${n} ranks`));
      traces.push({
        type: "scatter", mode: line.ideal || line.fitted ? "lines" : "lines+markers", name: line.name, x: line.x, y: line.y, text,
        line: { color: colour, dash: line.ideal ? "dash" : line.fitted ? "dot" : "solid" },
        ...(line.above ? { error_y: { type: "data", array: line.above, arrayminus: line.below, color: colour, thickness: 1.5, width: 5 } } : {}),
        hovertemplate: `%{text}<br>%{fullData.name} %{y:.4~g}<extra></extra>`,
      });
    }
    return [traces, layout(340, {
      showlegend: true, legend: { orientation: "h", y: 1.2 },
      xaxis: { title: { text: "ranks" }, type: "log", tickvals: found.ranks, ticktext: found.ranks.map(String) },
      yaxis: { title: { text: found.title }, ...(found.log ? { type: "log", dtick: "D2", tickformat: "~g" } : { rangemode: "tozero" }) },
    })];
  }

  function branches() { // loss by samples, of each batch
    const traces = [];
    for (const line of data.branches) {
      const colour = css(LINES[line.colour % LINES.length]);
      const edge = { type: "scatter", mode: "lines", x: line.x, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      traces.push({ ...edge, y: line.low }, { ...edge, y: line.high, fill: "tonexty", fillcolor: colour + "22" });
      traces.push({
        type: "scatter", mode: "lines", name: line.name, x: line.x, y: line.y, line: { color: colour },
        hovertemplate: `%{x:,} samples<br>batch of %{fullData.name}: %{y:.4~g}<extra></extra>`,
      });
    }
    return [traces, layout(380, {
      showlegend: true, legend: { orientation: "h", y: 1.15 },
      xaxis: { title: { text: "samples since the checkpoint" } }, yaxis: { title: { text: "loss" } },
    })];
  }

  function losses(kind) { // time of a step by state, of each size
    const { ranks, seconds, names } = data.losses[kind];
    const whole = ranks.map((_, i) => data.states.reduce((sum, state) => sum + seconds[state][i], 0));
    const [sign, times] = unit(Math.max(...whole));
    const traces = data.states.map((state) => ({
      type: "bar", name: label(state), x: names || ranks.map(String), y: seconds[state].map((v) => v * times), marker: { color: css(state) },
      hovertemplate: `%{x}${names ? "" : " ranks"}<br>${label(state)} %{y:.3~g} ${sign} per step<extra></extra>`,
    }));
    return [traces, layout(320, {
      barmode: "stack", xaxis: category("ranks"), yaxis: { title: { text: `time per step (${sign})` }, rangemode: "tozero" },
    })];
  }

  function roofline() {
    const traces = data.roofline.data.map((trace, i) => ({
      ...trace, line: { color: css(LINES[i % LINES.length]) }, textfont: { color: css("ink") },
      marker: { color: css("wait"), size: 9, symbol: "diamond" },
      hovertemplate: (trace.text ? "%{text}" : "%{fullData.name}") + "<br>%{x:.3~g} FLOP/byte, %{y:.3~s}FLOP/s<extra></extra>",
    }));
    const { xaxis, yaxis } = data.roofline.layout;
    return [traces, layout(380, { xaxis, yaxis, showlegend: true, legend: { orientation: "h", y: 1.15 } })];
  }

  function waterfall(of) { // from the ideal down to the measured rate
    const { names, bases, lengths, errors, colours, sure, shares, text, top, unit } = of;
    const sign = (i) => (bases[i] === 0 ? "" : lengths[i] < 0 ? "\u2212" : "+"); // of a loss, of a gain
    const labels = names.map((name, i) => `${name}<br>${sign(i)}${Math.abs(100 * shares[i]).toFixed(1)} %`);
    const trace = {
      type: "bar", orientation: "h", y: names, x: lengths, base: bases, text, textposition: "none",
      marker: { color: colours.map(css), pattern: { shape: sure.map((v) => (v ? "" : "/")), size: 7 } },
      error_x: { type: "data", array: errors, color: css("ink"), thickness: 1.5, width: 5 },
      hovertemplate: "%{y}<br>%{text}<extra></extra>",
    };
    const ends = bases.map((base, i) => base + lengths[i]);
    const shapes = ends.slice(0, -1).map((end, i) => ({ // from a bar's end to the next one's start
      type: "line", x0: end, x1: end, y0: i - 0.4, y1: i + 1.4, line: { color: css("soft"), width: 1, dash: "dot" },
    }));
    return [[trace], layout(48 * names.length + 80, {
      bargap: 0.3, shapes, xaxis: { title: { text: unit }, range: [0, top] },
      yaxis: { type: "category", autorange: "reversed", tickvals: names, ticktext: labels },
    })];
  }

  function samples() { // which rank trains which sample
    const { x, y, z, ranks, colours } = data.samples;
    const palette = [...LINES.filter((name) => name !== "wait").slice(0, colours), "wait"];
    const count = palette.length;
    const steps = palette.flatMap((name, i) => [[i / count, css(name)], [(i + 1) / count, css(name)]]);
    const told = (v) => (v === -1 ? "no rank" : v === -2 ? "several ranks" : `rank ${v}`);
    const trace = {
      type: "heatmap", x, y, text: z.map((row) => row.map(told)), ygap: 4,
      z: z.map((row) => row.map((v) => (v === -1 ? null : v === -2 ? count - 1 : v % (count - 1)))),
      zmin: -0.5, zmax: count - 0.5, colorscale: steps, showscale: false, zsmooth: false, hoverongaps: false,
      hovertemplate: "%{y}, sample %{x}<br>%{text}<extra></extra>",
    };
    return [[trace], layout(46 * y.length + 100, {
      xaxis: category("sample", { showgrid: false, tickangle: 0, nticks: 10 }),
      yaxis: { type: "category", autorange: "reversed", showgrid: false },
    })];
  }

  function layers() { // differences of gradients, and their tolerances
    const { names, values, limits } = data.layers;
    const bars = {
      type: "bar", orientation: "h", y: names, x: values, name: "difference",
      marker: { color: values.map((v, i) => css(v > limits[i] ? "wait" : "useful")) },
      hovertemplate: "%{y}<br>difference %{x:.2~e}<extra></extra>",
    };
    const marks = {
      type: "scatter", mode: "markers", y: names, x: limits, name: "tolerance",
      marker: { color: css("ink"), symbol: "line-ns-open", size: 14, line: { width: 2 } },
      hovertemplate: "%{y}<br>tolerance %{x:.2~e}<extra></extra>",
    };
    return [[bars, marks], layout(Math.max(200, 22 * names.length + 100), {
      xaxis: { title: { text: "relative difference" }, type: "log", exponentformat: "power" },
      yaxis: { type: "category", autorange: "reversed" },
    })];
  }

  function rates() { // learning rate over samples
    const traces = data.rates.lines.map((line, i) => ({
      type: "scatter", mode: "lines+markers", name: line.name, x: line.x, y: line.y,
      line: { color: css(LINES[i % LINES.length]), shape: "hv" },
      hovertemplate: "%{fullData.name}, after %{x} samples<br>%{y:.4~g}<extra></extra>",
    }));
    return [traces, layout(320, {
      showlegend: true, legend: { orientation: "h", y: 1.12 }, xaxis: { title: { text: "samples" } },
      yaxis: { title: { text: "learning rate" }, rangemode: "tozero" },
    })];
  }

  // A study of paceline tune
  const BINS = 8; // colours of the lines of trials
  function mixed(one, two, share) { // between two colours #rrggbb
    const parts = (name) => [1, 3, 5].map((i) => parseInt(css(name).slice(i, i + 2), 16));
    const [a, b] = [parts(one), parts(two)];
    return `rgb(${a.map((v, i) => Math.round(v + share * (b[i] - v))).join(",")})`;
  }

  function tuningHistory() {
    const { metric, numbers, values, best, text } = data.tuning.history;
    const line = { type: "scatter", x: numbers };
    return [[
      { ...line, mode: "markers", y: values, text, marker: { color: css("checkpoint") }, name: metric,
        hovertemplate: "trial %{x}: %{y:.6~g}<br>%{text}<extra></extra>" },
      { ...line, mode: "lines", y: best, line: { color: css("wait"), shape: "hv" }, name: "best until then",
        hovertemplate: "best after trial %{x}: %{y:.6~g}<extra></extra>" },
    ], layout(320, {
      showlegend: true, legend: { orientation: "h", y: 1.12 },
      xaxis: { title: { text: "trial" } }, yaxis: { title: { text: metric } },
    })];
  }

  function tuningParallel() {
    const { axes, lines, good } = data.tuning.parallel;
    const bins = Array.from({ length: BINS }, () => []);
    for (const line of lines) {
      const share = good ? line.score : 1 - line.score;
      bins[Math.min(BINS - 1, Math.floor(share * BINS))].push(line);
    }
    const at = axes.map((_, i) => i);
    const trace = (some, colour, width, name) => ({
      type: "scatter", mode: "lines", name, connectgaps: false, line: { color: colour, width },
      x: some.flatMap(() => [...at, null]), y: some.flatMap((line) => [...line.y, null]),
      text: some.flatMap((line) => [...at.map(() => `trial ${line.trial}`), ""]),
      hovertemplate: "%{text}<extra></extra>",
    });
    const traces = bins.map((some, i) => trace(some, mixed("line", "map2", (i + 1) / BINS), 1, `group ${i}`));
    traces.push(trace(lines.filter((line) => line.best), css("validation"), 3, "best"));
    const annotations = axes.flatMap((axis, i) => axis.ticks.map(([y, text]) => ({
      x: i, y, text: text.replace(/</g, "&lt;"), showarrow: false, xanchor: "left", xshift: 4, font: { size: 11, color: css("soft") },
    })));
    return [traces, layout(380, {
      annotations, margin: { l: 40, r: 60, t: 10, b: 60 },
      xaxis: { tickvals: at, ticktext: axes.map((axis) => axis.name.replace(/</g, "&lt;")), range: [-0.2, axes.length - 0.6] },
      yaxis: { range: [-0.06, 1.06], showticklabels: false, showgrid: false, zeroline: false },
    })];
  }

  function tuningImportances() {
    const { names, values } = data.tuning.importances;
    return [[{
      type: "bar", orientation: "h", y: names, x: values, marker: { color: css("validation") },
      hovertemplate: "%{y}: %{x:.1%}<extra></extra>",
    }], layout(Math.max(160, 30 * names.length + 80), {
      xaxis: { title: { text: "share of the differences" }, tickformat: ".0%", rangemode: "tozero" },
      yaxis: { type: "category", autorange: "reversed" },
    })];
  }

  function tuningCurves() {
    const { metric, lines, rungs } = data.tuning.curves;
    const traces = [...lines].reverse().map((line, i) => ({
      type: "scatter", mode: "lines+markers", name: line.name, x: line.x, y: line.y, marker: { size: 4 },
      line: line.best ? { color: css("validation"), width: 3 }
        : { color: mixed("line", "map2", (i + 1) / lines.length), width: 1 },
      text: line.x.map(() => line.state), hovertemplate: "%{fullData.name}, step %{x}<br>%{y:.6~g} (%{text})<extra></extra>",
    }));
    const shapes = rungs.map((x) => ({
      type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: css("soft"), width: 1, dash: "dot" },
    }));
    return [traces, layout(380, { shapes, xaxis: { title: { text: "step" } }, yaxis: { title: { text: metric } } })];
  }

  function tuningPareto() {
    const { metrics, x, y, best, text } = data.tuning.pareto;
    const some = (which) => x.map((_, i) => i).filter((i) => best[i] === which);
    const trace = (of, name, marker) => ({
      type: "scatter", mode: "markers", name, x: of.map((i) => x[i]), y: of.map((i) => y[i]),
      text: of.map((i) => text[i]), marker, hovertemplate: "%{text}<br>%{x:.6~g}, %{y:.6~g}<extra></extra>",
    });
    return [[
      trace(some(false), "other trials", { color: css("checkpoint") }),
      trace(some(true), "Pareto front", { color: css("wait"), size: 10, symbol: "diamond" }),
    ], layout(380, {
      showlegend: true, legend: { orientation: "h", y: 1.12 },
      xaxis: { title: { text: metrics[0] } }, yaxis: { title: { text: metrics[1] } },
    })];
  }

  function tuningLineage() {
    const { points, edges } = data.tuning.lineage;
    const lines = (which, colour, width) => {
      const some = edges.filter((edge) => edge.best === which);
      return { type: "scatter", mode: "lines", hoverinfo: "skip", line: { color: colour, width }, name: "continued from",
        x: some.flatMap((edge) => [...edge.x, null]), y: some.flatMap((edge) => [...edge.y, null]) };
    };
    const marks = {
      type: "scatter", mode: "markers", name: "trials", x: points.map((p) => p.x), y: points.map((p) => p.y),
      text: points.map((p) => p.text), hovertemplate: "%{text}<extra></extra>",
      marker: { size: 9, color: points.map((p) => css(p.failed ? "low" : p.best ? "validation" : "checkpoint")) },
    };
    const traces = [lines(false, css("line"), 1.5), lines(true, css("validation"), 3)];
    return [[...traces, marks], layout(360, {
      xaxis: { title: { text: "generation" }, dtick: 1 }, yaxis: { title: { text: "member" }, dtick: 1, autorange: "reversed" },
    })];
  }

  const DRAW = {
    tuningHistory, tuningParallel, tuningImportances, tuningCurves, tuningPareto, tuningLineage,
    samples, layers, rates,
    roofline, states, steps, waiting, late, pairs, schedule, runs, courses,
    waterfall: () => waterfall(data.waterfall), after: () => waterfall(data.after),
    moment0: () => moment(0), moment1: () => moment(1), moment2: () => moment(2),
    speedup: () => curves("speedup"), efficiency: () => curves("efficiency"),
    branches,
    ...Object.fromEntries(Object.keys(data.bands || {}).map((name) => [name, () => bands(name)])),
    ...Object.fromEntries(Object.keys(data.losses || {}).map((kind) => [`losses-${kind}`, () => losses(kind)])),
  };
  const plots = [...document.querySelectorAll("[data-chart]")];
  const drawn = new Set();

  // plotly takes a while to start: a large page can be read before. Its hash allows it.
  let plotly = null;
  function started() {
    plotly = plotly || new Promise((done) => setTimeout(() => {
      start();
      done();
    }));
    return plotly;
  }
  function start() {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
  }

  async function draw(plot) {
    await started();
    drawNow(plot);
  }

  function drawNow(plot) {
    const [traces, how] = DRAW[plot.dataset.chart]();
    drawn.add(plot);
    plot.style.minHeight = how.height + "px";
    return Plotly.react(plot, traces, how, CONFIG);
  }
  const redraw = () => [...drawn].forEach(drawNow);
  const drawAll = () => { start(); plots.forEach((plot) => drawn.has(plot) || drawNow(plot)); };

  // A page of 512 ranks opens at once: charts that are near are drawn first, the others while the
  // browser is idle, so that a screenshot of the whole page has them, too.
  function drawInTurn() {
    const near = new IntersectionObserver((seen) => {
      for (const one of seen) if (one.isIntersecting) { near.unobserve(one.target); drawn.has(one.target) || draw(one.target); }
    }, { rootMargin: "600px" });
    plots.forEach((plot) => near.observe(plot));
    const idle = window.requestIdleCallback || ((call) => setTimeout(call, 200));
    const next = () => {
      const rest = plots.find((plot) => !drawn.has(plot));
      if (rest) draw(rest).then(() => idle(next));
    };
    addEventListener("load", () => idle(next));
  }

  const button = document.getElementById("theme");
  function theme(name) {
    root.dataset.theme = name;
    button.setAttribute("aria-pressed", String(name === "dark"));
    redraw();
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", (event) => theme(event.matches ? "dark" : "light"));
  button.addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));
  document.querySelectorAll(".choice input").forEach((box) => box.addEventListener("change", redraw));

  let before = "light";
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    paper = true;
    theme("light");
    drawAll();
  });
  addEventListener("afterprint", () => {
    paper = false;
    drawn.forEach((plot) => Plotly.purge(plot)); // plotly would keep the width of the paper
    theme(before);
  });
  if (text.length < SMALL_DATA) drawAll();
  else drawInTurn();

  // Escape closes a definition; one that would leave the window is moved back into it.
  document.querySelectorAll(".term").forEach((term) => {
    const tip = term.querySelector(".tip");
    const place = () => {
      tip.style.marginLeft = "";
      const over = tip.getBoundingClientRect().right - root.clientWidth + 8;
      if (over > 0 && getComputedStyle(tip).position === "absolute") tip.style.marginLeft = -over + "px";
    };
    const unhush = () => term.classList.remove("hushed");
    for (const kind of ["mouseenter", "focus"]) term.addEventListener(kind, place);
    for (const kind of ["mouseleave", "blur"]) term.addEventListener(kind, unhush);
    term.addEventListener("keydown", (event) => event.key === "Escape" && term.classList.add("hushed"));
  });
  root.dataset.ready = "true";
})();
