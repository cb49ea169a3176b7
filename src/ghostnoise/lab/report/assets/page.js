"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const LIVE_MS = 3000;
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x"];
  // The choices of the reader, which are kept when the content is renewed.
  const state = { sort: {}, shown: {}, measure: "accuracy", data: JSON.parse(byId("data").textContent) };

  // ---- light and dark
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("ghostnoise-theme"); } catch { /* a page from a file may have no storage */ }
  function repaint() { paint(); noise.recolor(); drawAll(); }
  function paint() {
    const dark = chosen ? chosen === "dark" : system.matches;
    root.dataset.theme = dark ? "dark" : "light";
    byId("theme").setAttribute("aria-pressed", String(dark));
  }
  byId("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("ghostnoise-theme", chosen); } catch { /* as above */ }
    repaint();
  });
  system.addEventListener("change", repaint);
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // ---- sorting
  function value(row, column) {
    const cell = row.cells[column];
    if (cell.dataset.number !== undefined) return Number(cell.dataset.number);
    const text = cell.textContent.trim();
    return text === "–" || text === "" ? null : text;
  }
  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  }
  function sort(table, column, direction) {
    const rows = [...table.tBodies[0].rows];
    const sign = direction === "ascending" ? 1 : -1;
    rows.sort((left, right) => {
      const [a, b] = [value(left, column), value(right, column)];
      if (a === null || b === null) return (a === null) - (b === null); // missing values come last in both directions
      return sign * compare(a, b);
    });
    table.tBodies[0].append(...rows);
    [...table.tHead.rows[0].cells].forEach((head, at) => {
      head.setAttribute("aria-sort", at === column ? direction : "none");
    });
  }
  function prepareTables() {
    for (const table of document.querySelectorAll("table.sortable")) {
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        head.querySelector("button").addEventListener("click", () => {
          const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
          state.sort[table.id] = [column, direction];
          sort(table, column, direction);
        });
      });
      if (state.sort[table.id]) sort(table, ...state.sort[table.id]);
    }
  }

  // ---- figures
  const methods = () => [...new Set([...state.data.main.curves, ...state.data.training].map((each) => each.method))];
  const seriesColor = (index) => color(`--s${index % 7}`);
  const clear = (hex, share) => hex + Math.round(share * 255).toString(16).padStart(2, "0");
  const html = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function layout(x, y, more) {
    const line = color("--line"), ink = color("--ink");
    const axis = { gridcolor: line, linecolor: line, zeroline: false, automargin: true };
    return {
      paper_bgcolor: color("--ground"), plot_bgcolor: color("--ground"), font: { color: ink, size: 13, family: "system-ui, sans-serif" },
      margin: { l: 56, r: 12, t: 12, b: 48 }, hovermode: "closest", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", showlegend: false, uirevision: "kept",
      legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
      xaxis: { ...axis, title: { text: x }, showgrid: false, ...(more && more.xaxis) },
      yaxis: { ...axis, title: { text: y }, ...(more && more.yaxis) },
      ...(more && more.layout),
    };
  }
  const config = { displayModeBar: false, displaylogo: false, responsive: true };

  function show(id, traces, made, words) {
    const place = byId(id);
    place.classList.toggle("empty", traces.length === 0);
    if (traces.length === 0) {
      Plotly.purge(place);
      place.textContent = words;
      return;
    }
    if (!place.querySelector(".plot-container")) place.textContent = "";
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", `${made.yaxis.title.text || made.xaxis.title.text}; the table has the numbers`);
    Plotly.react(place, traces, made, config);
  }
  const hover = (curve, point) => `${html(curve.label)}<br>${point.mean.toFixed(2)}`
    + (point.std === null ? "" : ` ± ${point.std.toFixed(2)}`) + ` (n = ${point.n})`;

  function drawCurves(main) {
    const traces = [];
    const all = [...new Set(main.curves.filter((c) => !c.flat).flatMap((c) => c.points.map((s) => s.x)))];
    const numeric = all.every((x) => typeof x === "number");
    if (numeric) all.sort((a, b) => a - b);
    main.curves.forEach((curve, index) => {
      const own = seriesColor(index);
      let points = curve.points.filter((point) => point.mean !== null);
      if (!points.length || !all.length) return;
      if (curve.flat) points = (all.length > 1 ? [all[0], all[all.length - 1]] : [all[0]]).map((x) => ({ ...points[0], x }));
      const xs = points.map((point) => numeric ? point.x : String(point.x));
      const group = { legendgroup: curve.label, x: xs };
      const band = (sign) => points.map((point) => point.mean + sign * (point.std || 0));
      traces.push({ ...group, y: band(-1), mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip" });
      traces.push({ ...group, y: band(1), mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip",
        fill: "tonexty", fillcolor: clear(own, curve.flat ? 0.07 : 0.16) });
      traces.push({ ...group, y: points.map((point) => point.mean), name: html(curve.label),
        mode: curve.flat ? "lines" : "lines+markers", text: points.map((point) => hover(curve, point)), hoverinfo: "text",
        line: { color: own, width: 2, dash: curve.flat ? "dot" : "solid" },
        marker: { size: 8, symbol: SYMBOLS[index % SYMBOLS.length] } });
    });
    const xaxis = main.log && numeric
      ? { type: "log", tickvals: all, ticktext: all.map(String) } : { type: numeric ? "linear" : "category" };
    return [traces, layout(html(main.x), html(main.y), { xaxis, layout: { showlegend: true } })];
  }

  function drawBars(main) {
    const known = methods();
    const traces = [];
    main.curves.forEach((curve, at) => {
      const point = curve.points[0];
      const own = seriesColor(known.indexOf(curve.method));
      if (point.mean !== null) {
        traces.push({ x: point.seeds, y: point.seeds.map(() => at - 0.15), mode: "markers", hoverinfo: "x",
          marker: { color: clear(own, 0.6), size: 8 } });
        traces.push({ x: [point.mean], y: [at + 0.15], mode: "markers", text: [hover(curve, point)], hoverinfo: "text",
          marker: { color: own, size: 13, symbol: "line-ns-open", line: { width: 3, color: own } },
          error_x: { type: "data", array: [point.std || 0], color: own, thickness: 2, width: 4 } });
      }
      if (point.paper !== null) {
        traces.push({ x: [point.paper], y: [at], mode: "markers", text: [`paper: ${point.paper}`], hoverinfo: "text",
          marker: { size: 9, symbol: "diamond-open", color: color("--ink") } });
      }
    });
    const yaxis = { tickvals: main.curves.map((_, at) => at), ticktext: main.curves.map((curve) => html(curve.label)),
      range: [main.curves.length - 0.5, -0.5], showgrid: false };
    byId("plot-main").style.height = `${90 + 34 * main.curves.length}px`;
    return [traces, layout(html(main.y), "", { yaxis, xaxis: { showgrid: true } })];
  }

  function lineOf(at) {
    const groups = state.data.training, known = methods();
    if (groups.length <= 7) return [seriesColor(at), "solid"];
    const same = groups.filter((group) => group.method === groups[at].method);
    return [seriesColor(known.indexOf(groups[at].method)), DASHES[same.indexOf(groups[at]) % DASHES.length]];
  }
  const isShown = (group) => state.shown[group.label] ?? group.shown;

  function drawTraining() {
    const traces = [];
    state.data.training.forEach((group, at) => {
      if (!isShown(group)) return;
      const [own, dash] = lineOf(at);
      for (const run of group.runs) {
        const measured = run[state.measure].filter((value) => value !== null).length; // not every epoch is evaluated
        traces.push({ x: run.epoch, y: run[state.measure], mode: measured > 1 ? "lines" : "markers", connectgaps: true,
          line: { color: own, dash, width: 1.5 }, marker: { color: own }, opacity: 0.8, name: html(`${group.label} seed ${run.seed}`),
          hovertemplate: `%{y:.4g} after epoch %{x}<br>${html(group.label)} seed ${run.seed}, ${html(run.status)}<extra></extra>` });
      }
    });
    const words = state.data.training.length ? "No line is selected." : "No run has finished an epoch yet.";
    show("plot-training", traces, layout("epoch", html(state.data.measures[state.measure])), words);
  }
  function drawMain() {
    const main = state.data.main;
    const [traces, made] = main.form === "curves" ? drawCurves(main) : drawBars(main);
    show("plot-main", traces, made, "No run has finished yet.");
  }
  const noise = noiseSection({ byId, color, html, layout, root, show, state });
  function drawAll() { drawMain(); drawTraining(); noise.draw(); }

  // ---- controls of the training curves
  function prepareControls() {
    const select = byId("measure");
    select.replaceChildren(...Object.entries(state.data.measures).map(([name, words]) => new Option(words, name)));
    select.value = state.measure;
    select.addEventListener("change", () => { state.measure = select.value; drawTraining(); });
    for (const [id, on] of [["all", true], ["none", false]]) {
      byId(id).addEventListener("click", () => {
        for (const group of state.data.training) state.shown[group.label] = on;
        prepareSeries();
        drawTraining();
      });
    }
    prepareSeries();
  }
  function prepareSeries() {
    byId("series").replaceChildren(...state.data.training.map((group, at) => {
      const label = document.createElement("label"), box = document.createElement("input"), chip = document.createElement("span");
      const [own, dash] = lineOf(at);
      box.type = "checkbox";
      box.id = `series-${at}`;
      box.checked = isShown(group);
      box.addEventListener("change", () => { state.shown[group.label] = box.checked; drawTraining(); });
      chip.className = "chip";
      chip.style.borderTopColor = own;
      chip.style.borderTopStyle = dash === "solid" ? "solid" : dash.includes("dot") ? "dotted" : "dashed";
      label.append(box, chip, group.label);
      return label;
    }));
  }

  // ---- updates, if this page is served
  let tag = root.dataset.tag;
  function renew(news) {
    const focused = document.activeElement && document.activeElement.id;
    const scrolled = [...document.querySelectorAll(".scroll")].map((each) => [each.scrollLeft, each.scrollTop]);
    for (const id of ["plot-main", "plot-training", ...noise.plots]) if (byId(id)) Plotly.purge(byId(id));
    byId("content").innerHTML = news.main; // escaped by the server; the content security policy runs no script in it
    state.data = news.plots;
    prepareAll();
    document.querySelectorAll(".scroll").forEach((each, at) => {
      if (scrolled[at]) [each.scrollLeft, each.scrollTop] = scrolled[at];
    });
    if (focused && byId(focused)) byId(focused).focus({ preventScroll: true });
  }
  async function ask() {
    try {
      const answer = await fetch("data.json", { headers: { "If-None-Match": tag }, cache: "no-store" });
      if (answer.status === 200) {
        const news = await answer.json();
        tag = answer.headers.get("ETag");
        renew(news);
      }
      byId("live").textContent = answer.ok || answer.status === 304 ? "Live: updated while runs continue." : "The server reports an error.";
    } catch {
      byId("live").textContent = "The server does not answer; this is the last state that it sent.";
    }
    setTimeout(ask, LIVE_MS);
  }

  function prepareAll() { prepareTables(); prepareControls(); noise.prepare(); drawAll(); }
  paint();
  prepareAll();
  if (tag) ask();
})();
