"use strict";
// What the pages' scripts share: colours of the style sheet, texts, the look of a chart, and when to draw again.
const Page = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // plotly reads a few tags in texts: what comes from outside must not be one of them
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (value) => (value === null ? "–" : value === "inf" ? "∞" : value === 0 ? "0"
    : Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(3));

  const axis = (title, more) => ({
    title: { text: title, standoff: 8, font: { size: 13 } }, gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"),
    tickcolor: css("--line"), automargin: true, fixedrange: true, exponentformat: "e", ...more,
  });
  const layout = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 14, t: 8, b: 8 },
    font: { family: css("--sans"), size: 13, color: css("--soft") }, hovermode: "closest", bargap: 0.06,
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 13 }, align: "left" },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: css("--ink") }, itemclick: false, itemdoubleclick: false },
    ...more,
  });
  const draw = (chart, traces, look) =>
    Plotly.react(chart, traces, layout(look), { displayModeBar: false, responsive: true, doubleClick: false });

  // Bins of unlike width, such as those of probabilities, are drawn equally wide between their edges.
  const even = (edges) => ({
    range: [0, edges.length - 1], tickvals: edges.map((_, k) => k), ticktext: edges.map((p) => String(p).replace("0.", ".")), tickangle: 0, zeroline: false,
  });

  // Draws now, and when colours change; a page without plotly has nothing to draw.
  function run(all) {
    const drawn = () => { if (window.Plotly) all(); document.documentElement.dataset.drawn = "yes"; };
    drawn();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawn);
    matchMedia("print").addEventListener("change", () => {
      drawn();
      document.querySelectorAll(".js-plotly-plot").forEach((chart) => { if (chart.clientWidth) Plotly.Plots.resize(chart); });
    });
  }

  return { data, css, escaped, short, axis, layout, draw, even, run };
})();
