// Draws the charts of the drift of files.
(() => {
  const { data, css, escaped, axis, draw } = Page;
  const there = (id) => document.getElementById(id) !== null;
  const colour = (k) => css(k ? "--other" : "--tested");
  const dash = (k) => (k ? "dot" : "solid");
  const total = (run) => run.histogram.zeros + [...run.histogram.positive, ...run.histogram.negative].reduce((a, b) => a + b, 0);

  function series() {
    data.checks.forEach((check, i) => {
      if (!there(`series-${i}`)) return;
      const traces = data.runs.flatMap((run, k) => {
        const values = run.series[check.metric];
        const found = [{
          type: "scatter", mode: run.steps.length > 60 ? "lines" : "lines+markers", name: escaped(run.name), x: run.steps, y: values, connectgaps: false,
          line: { color: colour(k), width: 2, dash: dash(k) }, marker: { color: colour(k), size: 5, symbol: k ? "circle-open" : "square" },
          hovertemplate: "step %{x}<br>%{y:.3~g}<extra>%{fullData.name}</extra>",
        }];
        const fired = run.steps.map((_, s) => run.firing[s].includes(check.metric));
        if (!k && fired.some(Boolean)) found.push({
          type: "scatter", mode: "markers", name: "fires", x: run.steps.filter((_, s) => fired[s]), y: values.filter((_, s) => fired[s]), hoverinfo: "skip",
          marker: { color: css("--bad"), size: 8, symbol: "x" },
        });
        return found;
      });
      const all = data.runs.flatMap((run) => run.series[check.metric]).filter((v) => v !== null);
      // a bound far above everything would press the curve flat: then the text alone says it
      const near = check.bound !== null && (check.below || Math.max(...all, 0) > check.bound / 8);
      const top = Math.max(...all, near ? check.bound : 0, 0) * 1.12 || 1;
      draw(`series-${i}`, traces, {
        showlegend: false, xaxis: axis("step", { nticks: 6, zeroline: false, tickformat: "d" }), yaxis: axis("", { nticks: 4, range: [Math.min(0, ...all) * 1.05, top] }),
        shapes: near ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: check.bound, y1: check.bound, line: { color: css("--ink"), width: 1.2, dash: "dash" } }] : [],
        annotations: check.bound === null ? [] : [{
          xref: "paper", x: 1, xanchor: "right", yanchor: near ? "bottom" : "top", showarrow: false, font: { size: 11, color: css("--soft") },
          ...(near ? { y: check.bound } : { yref: "paper", y: 1 }), text: `${check.below ? "at least" : "at most"} ${check.bound}`,
        }],
      });
    });
  }

  function histogram() {
    const traces = data.runs.flatMap((run, k) => ["positive", "negative"].map((side) => {
      const n = total(run);
      const label = side === "positive" ? "trainer finds it more likely" : "less likely";
      return {
        type: "scatter", mode: "lines", name: data.runs.length > 1 ? `${escaped(run.name)}: ${label}` : label,
        x: run.histogram.low.map((low) => 10 ** (low + run.histogram.width / 2)), y: run.histogram[side].map((c) => (c ? c / n : null)),
        customdata: run.histogram[side], connectgaps: false, line: { color: colour(k), width: side === "positive" ? 2.2 : 1.4, shape: "hvh", dash: side === "positive" ? "solid" : "dot" },
        hovertemplate: "|dlogp| near %{x:.2~g}<br>%{customdata:,} tokens<extra>%{fullData.name}</extra>",
      };
    }));
    draw("histogram", traces, {
      xaxis: axis("|dlogp|, nats", { type: "log", dtick: 1, zeroline: false }), yaxis: axis("share of tokens", { type: "log", dtick: 1, tickformat: ".0e" }),
    });
  }

  function curves(id, title, key, x, more) {
    if (!there(id)) return;
    const panels = [["y", 3, "mean"], ["y2", 4, "p99"]];
    const traces = panels.flatMap(([yaxis, column, word]) => data.runs.map((run, k) => ({
      type: "scatter", mode: "lines+markers", name: escaped(run.name), legendgroup: k, showlegend: column === 3 && data.runs.length > 1, yaxis,
      x: run[key].map(x), y: run[key].map((b) => b[column]), customdata: run[key].map((b) => [b[5], b[2]]),
      line: { color: colour(k), width: 2, dash: dash(k) }, marker: { color: colour(k), size: 6, symbol: k ? "circle-open" : "square" },
      hovertemplate: `${key} %{customdata[0]}, %{customdata[1]:,} tokens<br>${word} %{y:.3~g}<extra>%{fullData.name}</extra>`,
    })));
    draw(id, traces, {
      xaxis: axis(title, { anchor: "y", ...more }), yaxis: axis("mean |dlogp|", { rangemode: "tozero", nticks: 4, domain: [0, 0.46] }),
      yaxis2: axis("p99 |dlogp|", { rangemode: "tozero", nticks: 4, domain: [0.54, 1] }),
    });
  }

  function all() {
    series();
    histogram();
    // from 1, so that the first token has a place on a logarithmic axis
    curves("position", "number of the token in its completion", "position", (b) => 1 + (b[1] === null ? b[0] : (b[0] + b[1]) / 2), { type: "log", zeroline: false, dtick: 1 });
    const edges = data.probabilityEdges;
    curves("probability", "rollout probability of the token", "probability", (b) => edges.indexOf(b[0]) + 0.5, Page.even(edges));
  }

  Page.run(all);
})();
