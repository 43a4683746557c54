// Draws the charts of the parity report.
(() => {
  const { data, css, escaped, short, axis, draw } = Page;
  const tested = (arm) => arm.name === data.armUnderTest;
  const others = data.arms.filter((arm) => !tested(arm)).map((arm) => arm.name);
  const colour = (arm) => css(tested(arm) ? "--tested" : others.indexOf(arm.name) ? "--third" : "--other");

  function steps() {
    const narrow = document.getElementById("steps").clientWidth < 480;
    const widest = Math.max(...data.arms.flatMap((arm) => arm.steps.map((v) => v || 0)));
    const traces = data.arms.map((arm) => ({
      type: "bar", orientation: "h", name: escaped(arm.name), x: arm.steps, y: data.steps,
      text: arm.steps.map((v) => (v === null ? "" : short(v))), textposition: "outside", cliponaxis: false,
      textfont: { color: css("--ink") }, customdata: arm.shares.map((v) => (v === null ? "–" : `${(100 * v).toFixed(0)} %`)),
      marker: { color: tested(arm) ? colour(arm) : "rgba(0,0,0,0)", line: { color: colour(arm), width: 1.5 } },
      hovertemplate: "%{y}<br>%{x:.3~g} nats, %{customdata} of the arm<extra>%{fullData.name}</extra>",
    }));
    draw("steps", traces, {
      bargap: 0.3, bargroupgap: 0.15, xaxis: axis("mean |step|, nats", { range: [0, widest * (narrow ? 1.4 : 1.15) || 1], nticks: narrow ? 3 : 6, tickangle: 0 }),
      yaxis: axis("", { autorange: "reversed", gridcolor: "rgba(0,0,0,0)", tickfont: { color: css("--ink") }, ticksuffix: "  " }),
    });
  }

  function histograms() {
    const top = Math.max(1, ...data.arms.flatMap((arm) => arm.histogram.counts));
    data.arms.forEach((arm, i) => {
      const { edges, counts } = arm.histogram;
      const middle = counts.map((_, k) => (edges[k] + edges[k + 1]) / 2);
      draw(`histogram-${i}`, [{
        type: "bar", x: middle, y: counts.map((n) => n || null), width: edges[1] - edges[0], marker: { color: colour(arm), line: { width: 0 } },
        customdata: counts.map((_, k) => `${short(edges[k])} to ${short(edges[k + 1])}`),
        hovertemplate: "%{y} tokens<br>dlogp %{customdata}<extra></extra>",
      }], {
        bargap: 0, xaxis: axis("dlogp, nats", { range: [edges[0], edges[edges.length - 1]], nticks: 5, zeroline: true, zerolinecolor: css("--soft") }),
        yaxis: axis("tokens", { type: "log", range: [Math.log10(0.6), Math.log10(top * 1.6)], dtick: 1, tickformat: ",d" }),
      });
    });
  }

  function curves(id, title, key, x, label, more) {
    const panels = [["yaxis", "y", 3, "mean"], ["yaxis2", "y2", 4, "largest"]];
    const traces = panels.flatMap(([, yaxis, column, word]) => data.arms.map((arm) => {
      const bins = arm[key];
      return {
        type: "scatter", mode: "lines+markers", name: escaped(arm.name), legendgroup: escaped(arm.name), showlegend: column === 3, yaxis,
        x: bins.map(x), y: bins.map((b) => b[column]), customdata: bins.map((b) => [label(b), b[2]]),
        line: { color: colour(arm), width: 2, dash: tested(arm) ? "solid" : "dot" },
        marker: { color: colour(arm), size: 6, symbol: tested(arm) ? "square" : "circle-open", line: { color: colour(arm), width: 1.5 } },
        hovertemplate: `%{customdata[0]}, %{customdata[1]} tokens<br>${word} %{y:.3~g}<extra>%{fullData.name}</extra>`,
      };
    }));
    draw(id, traces, {
      xaxis: axis(title, { anchor: "y", ...more }),
      yaxis: axis("mean |dlogp|", { rangemode: "tozero", nticks: 4, domain: [0, 0.46] }),
      yaxis2: axis("largest", { rangemode: "tozero", nticks: 4, domain: [0.54, 1] }),
    });
  }

  function scatters() {
    data.arms.forEach((arm, i) => {
      const p = arm.points;
      const about = p.text.map((text, k) => [escaped(text), p.sample[k], p.position[k], short(p.dlogp[k])]);
      draw(`scatter-${i}`, [
        { type: "scatter", mode: "lines", x: [0, 1], y: [0, 1], line: { color: css("--line"), width: 1.5 }, hoverinfo: "skip" },
        { type: "scatter", mode: "markers", x: p.rollout, y: p.trainer, customdata: about,
          marker: { color: colour(arm), size: 6, opacity: 0.5, symbol: tested(arm) ? "circle" : "circle-open" },
          hovertemplate: "<b>%{customdata[0]}</b><br>rollout %{x:.4f}, trainer %{y:.4f}<br>dlogp %{customdata[3]}<br>sample %{customdata[1]}, position %{customdata[2]}<extra></extra>" },
      ], {
        showlegend: false, xaxis: axis("rollout probability", { range: [-0.02, 1.02], dtick: 0.25, zeroline: false }),
        yaxis: axis("trainer probability", { range: [-0.02, 1.02], dtick: 0.25, zeroline: false }),
      });
      const note = document.querySelector(`.shown[data-arm="${i}"]`);
      if (p.rollout.length < p.all) note.textContent = `${p.rollout.length} of ${p.all} tokens, the worst among them`;
    });
  }

  function all() {
    steps();
    histograms();
    curves("position", "index in the completion", "position", (b) => (b[0] + b[1]) / 2,
      (b) => (b[0] === b[1] ? `token ${b[0]}` : `tokens ${b[0]} to ${b[1]}`), { rangemode: "tozero", zeroline: false });
    const edges = data.probabilityEdges;
    curves("probability", "rollout probability of the token", "probability", (b) => edges.indexOf(b[0]) + 0.5,
      (b) => `probability ${b[0]} to ${b[1]}`, Page.even(edges));
    scatters();
  }

  Page.run(all);
})();
