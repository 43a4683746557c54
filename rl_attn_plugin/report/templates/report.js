"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const layout = (given) => {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const narrow = window.innerWidth < 600;
    const axis = (a) => ({ ...a, gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true });
    return {
      ...given,
      template: null,
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style.getPropertyValue("--font").trim(), size: 12, color: ink },
      margin: { l: 8, r: 12, t: 8, b: 8 },
      legend: { orientation: "h", y: narrow ? -0.3 : -0.22, x: 0 },
      xaxis: axis(given.xaxis || {}),
      yaxis: axis(given.yaxis || {}),
    };
  };
  const draw = () => {
    for (const [id, figure] of Object.entries(figures)) {
      const element = document.getElementById(id);
      if (element) {
        Plotly.react(element, figure.data, layout(figure.layout), { displayModeBar: false, responsive: true });
      }
    }
  };
  draw();
  dark.addEventListener("change", draw);
})();
