// Build src/paceline/report/page/assets/plotly.min.js: plotly.js with the trace types that
// charts.js draws (scatter is part of the core). All of plotly.js is four times as large.
//
//     make plotly-bundle
import { readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const TRACES = ["bar", "heatmap"];
const ASSETS = new URL("../../src/paceline/report/page/assets/", import.meta.url);
const { version } = JSON.parse(readFileSync("node_modules/plotly.js/package.json", "utf8"));
const traces = TRACES.map((name) => `require("plotly.js/lib/${name}")`);

await build({
  stdin: {
    contents: `const Plotly = require("plotly.js/lib/core");
      Plotly.register([${traces.join(", ")}]);
      module.exports = Plotly;`,
    resolveDir: ".",
  },
  outfile: new URL("plotly.min.js", ASSETS).pathname,
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "Plotly",
  target: "es2020",
  charset: "ascii",
  legalComments: "inline",
  define: { global: "window", "define.amd": "false", "process.env.NODE_DEBUG": "false" },
  loader: { ".css": "empty" }, // of maps, which the page does not have
  banner: { js: `/* plotly.js ${version}, with ${TRACES.join(", ")} and scatter; MIT: plotly.LICENSE */` },
});
writeFileSync(
  new URL("plotly.LICENSE", ASSETS),
  readFileSync("node_modules/plotly.js/LICENSE", "utf8"),
);
