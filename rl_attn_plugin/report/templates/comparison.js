// Draws each layer's chart.
(() => {
  const { css, escaped, short } = Page;
  const layers = Page.data.layers;

  // One scale for all layers. Equal bits have no place on a logarithm: they get their own to the left of it, infinity to the right.
  const sizes = layers.flat().flatMap((row) => [row.max, row.p99]).filter((v) => typeof v === "number" && v > 0).map(Math.log10);
  const low = Math.floor(Math.min(-7, ...sizes)), high = Math.ceil(Math.max(0, ...sizes));
  const infinite = layers.flat().some((row) => row.max === "inf");
  const EQUAL = 10 ** (low - 1), INFINITE = 10 ** (high + 1);
  const place = (row) => (row.max === "inf" ? INFINITE : row.equal || !row.max ? EQUAL : row.max);

  function draw(chart) {
    const rows = layers[Number(chart.dataset.layer)];
    if (!rows.length || !chart.clientWidth) return; // folded: drawn when it opens
    const narrow = chart.clientWidth < 600, tiny = chart.clientWidth < 450;
    const colour = (row) => css(row.state === "lost" ? "--bad" : row.equal ? "--good" : row.state === "kept" ? "--tested" : "--other");
    const ys = [], heads = [];
    let y = 0;
    rows.forEach((row, i) => {
      if (i === 0 || rows[i - 1].group !== row.group) { heads.push([y, row.group]); y += 1; }
      ys.push(y);
      y += 1;
    });
    const apart = rows.map((row, i) => ({ row, y: ys[i] })).filter(({ row }) => !row.equal && row.p99 !== null);
    const below = ({ row }) => row.p99 || EQUAL; // 99 % of the elements may be equal where not all are
    const name = (row) => escaped(row.name).replace(":", narrow ? "<br>:" : ":");
    const powers = Array.from({ length: high - low + 1 }, (_, k) => low + k).filter((k) => (high - k) % (tiny ? 3 : narrow ? 2 : 1) === 0);
    const traces = [
      { type: "scatter", mode: "lines", hoverinfo: "skip", line: { color: css("--soft"), width: 1.5 }, cliponaxis: false,
        x: apart.flatMap((p) => [below(p), place(p.row), null]), y: apart.flatMap((p) => [p.y, p.y, null]) },
      { type: "scatter", mode: "markers", hoverinfo: "skip", x: apart.map(below), y: apart.map((p) => p.y),
        marker: { symbol: "line-ns", size: 12, line: { color: apart.map(({ row }) => colour(row)), width: 3 } } },
      { type: "scatter", mode: "markers+text", x: rows.map(place), y: ys, cliponaxis: false,
        text: rows.map((row) => (row.max === null ? "  nothing to compare" : row.equal ? (row.state === "lost" ? "  out equal, lost elsewhere" : "  equal") : `  ${short(row.max)}`)),
        textposition: "middle right", textfont: { color: rows.map((row) => (row.equal || row.state === "lost" ? colour(row) : css("--ink"))) },
        marker: { size: 11, color: rows.map(colour), opacity: rows.map((row) => (row.max === null ? 0 : 1)),
          symbol: rows.map((row) => (row.max === "inf" ? "triangle-right" : row.state === "lost" ? "x" : row.equal ? "square" : "circle")) },
        customdata: rows.map((row) => [escaped(row.name), row.equal ? "equal" : short(row.max), short(row.p99), short(row.mean), escaped(row.group)]),
        hovertemplate: "<b>%{customdata[0]}</b><br>%{customdata[4]}<br>largest %{customdata[1]}<br>99 % below %{customdata[2]}<br>mean %{customdata[3]}<extra></extra>" },
    ];
    const size = narrow ? 11 : 13;
    chart.style.height = `${y * 26 + 56}px`;
    Page.draw(chart, traces, {
      margin: { l: 8, r: 14, t: 4, b: 8 }, showlegend: false, font: { family: css("--sans"), size, color: css("--soft") },
      xaxis: {
        type: "log", range: [low - (tiny ? 1.8 : 1.3), high + (infinite ? 1.2 : 0) + (tiny ? 3 : narrow ? 1.5 : 0.8)], fixedrange: true, automargin: true, gridcolor: css("--grid"),
        zeroline: false, tickangle: 0, title: { text: "|reference − candidate| of out", standoff: 8, font: { size } },
        tickvals: [EQUAL, ...powers.map((k) => 10 ** k), ...(infinite ? [INFINITE] : [])],
        ticktext: ["equal", ...powers.map((k) => (k === 0 ? "1" : `1e${k}`)), ...(infinite ? ["∞"] : [])],
      },
      yaxis: {
        range: [y - 0.4, -0.6], fixedrange: true, automargin: true, showgrid: false, zeroline: false, ticksuffix: "  ",
        tickvals: [...heads.map(([at]) => at), ...ys],
        ticktext: [...heads.map(([, text]) => `<b>${escaped(text)}</b>`), ...rows.map((row) => `<span style="color:${css("--ink")}">${name(row)}</span>`)],
      },
      // what is equal stands on its own ground
      shapes: [{ type: "line", xref: "x", yref: "paper", x0: 10 ** (low - 0.15), x1: 10 ** (low - 0.15), y0: 0, y1: 1, line: { color: css("--line"), width: 1, dash: "dot" } }],
    });
  }

  Page.run(() => document.querySelectorAll(".chart").forEach(draw));
  document.querySelectorAll("details.layer").forEach((layer) =>
    layer.addEventListener("toggle", () => layer.querySelectorAll(".chart").forEach(draw)));
})();
