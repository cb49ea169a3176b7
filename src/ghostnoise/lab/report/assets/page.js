"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const LIVE_MS = 3000;
  // The choices of the reader, which are kept when the content is renewed.
  const state = { sort: {}, shown: {}, measure: null, seeds: true, whole: false, zoom: null, view: null, data: JSON.parse(byId("data").textContent) };

  // ---- light and dark
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("ghostnoise-theme"); } catch { /* a page from a file may have no storage */ }
  function paint() {
    const dark = chosen ? chosen === "dark" : system.matches;
    root.dataset.theme = dark ? "dark" : "light";
    byId("theme").textContent = dark ? "Light theme" : "Dark theme"; // what a click changes to
  }
  byId("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("ghostnoise-theme", chosen); } catch { /* as above */ }
    paint();
  });
  system.addEventListener("change", paint);

  // ---- sorting
  function value(row, column) {
    const cell = row.cells[column];
    if (cell.dataset.number !== undefined) return Number(cell.dataset.number);
    const text = cell.textContent.trim();
    if (text === "–" || text === "") return null;
    const number = Number(text.replaceAll(",", ""));
    return Number.isNaN(number) ? text : number;
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
          state.sort[table.id] = [head.firstChild.id, direction];
          sort(table, column, direction);
        });
      });
      const [id, direction] = state.sort[table.id] || [];
      const column = [...table.tHead.rows[0].cells].findIndex((head) => head.firstChild.id === id);
      if (column >= 0) sort(table, column, direction);
    }
  }

  // ---- figures of results
  const draw = (id, spec, words) => { if (byId(id)) plots.show(byId(id), spec, words); };
  const NOTHING = "No run has finished yet.";
  function drawMain() {
    const { views } = state.data, chart = views.find((each) => each.title === state.view) || views[0];
    draw("plot-main", charts.result(chart), NOTHING);
    if (byId("main-note")) byId("main-note").textContent = chart.note;
  }
  function drawResults() {
    drawMain();
    draw("plot-cost", charts.cost(state.data.cost), NOTHING);
    draw("plot-gap", state.data.gap && charts.result(state.data.gap), NOTHING);
  }
  function prepareViews() {
    const select = byId("view");
    if (!select) return;
    select.replaceChildren(...state.data.views.map((each) => new Option(each.title, each.title)));
    if (state.view) select.value = state.view;
    select.addEventListener("change", () => { state.view = select.value; drawMain(); });
  }

  // ---- training curves
  const START = 0.15; // part of the training whose values do not determine the axis, unless the whole range is shown
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  const isShown = (group) => state.shown[group.label] ?? group.shown;
  const measure = () => state.measure || state.data.training.first;
  // Selected cells with the same colour have different dashes.
  function dash(group) {
    const same = state.data.training.groups.filter((each) => isShown(each) && each.color[0] === group.color[0]);
    return DASHES[Math.max(0, same.indexOf(group)) % DASHES.length];
  }
  function logarithmic(min, max) {
    const found = [];
    for (let power = Math.floor(Math.log10(min)); power <= Math.ceil(Math.log10(max)); power += 1) {
      for (const factor of max / min > 200 ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
    }
    return found.filter((value) => value >= min && value <= max).map((value) => [value, String(Number(value.toPrecision(1)))]);
  }
  function fitted(groups, from, to) {
    const values = [];
    for (const { curve } of groups) {
      curve.x.forEach((epoch, at) => {
        if (epoch < from || epoch > to) return;
        for (const line of [curve.mean, curve.low, curve.high, ...(state.seeds ? curve.runs || [] : [])]) if (line[at] !== null) values.push(line[at]);
      });
    }
    return values;
  }
  function trainingAxis(groups) {
    const epochs = groups.flatMap(({ curve }) => curve.x), last = Math.max(...epochs), first = Math.min(...epochs);
    const [min, max] = state.zoom || [first === last ? 0 : Math.min(first, 1), last];
    const from = state.zoom || state.whole ? min : Math.max(min, START * max);
    let values = fitted(groups, from, max);
    if (!values.length) values = fitted(groups, 0, Infinity);
    let low = Math.min(...values), high = Math.max(...values);
    const x = { label: "epoch", min, max, ticks: plots.ticks(min, max, 8) };
    const label = state.data.training.measures[measure()];
    const positive = values.filter((value) => value > 0);
    if (measure().includes("loss") && positive.length && high / Math.min(...positive) > 20) {
      low = Math.min(...positive) / 1.1;
      return { x, y: { label, min: low, max: high * 1.1, log: true, ticks: logarithmic(low, high * 1.1) } };
    }
    const margin = 0.04 * (high - low) || 0.5;
    [low, high] = [low - margin, high + margin];
    if (measure().includes("accuracy")) [low, high] = [Math.max(low, 0), Math.min(high, 100 + margin)];
    return { x, y: { label, min: low, max: high, ticks: plots.ticks(low, high, 7) } };
  }
  function drawTraining() {
    const all = state.data.training.groups;
    const groups = all.filter(isShown).map((group) => ({ ...group, dash: dash(group), curve: group.curves[measure()] })).filter(({ curve }) => curve.x.length);
    const words = !all.length ? "No run has finished an epoch yet." : all.some(isShown) ? "The selected runs have no such values yet." : "No curve is selected.";
    if (!groups.length) return draw("plot-training", null, words);
    const { x, y } = trainingAxis(groups), marks = [], targets = [];
    const floor = (value) => (value === null ? null : y.log ? Math.max(value, y.min) : value);
    for (const { curve, color } of groups) marks.push({ kind: "band", points: curve.x.map((at, k) => [at, floor(curve.low[k]), floor(curve.high[k])]), color });
    for (const { curve, color, label, runs } of groups) {
      if (!state.seeds || !curve.runs) continue;
      curve.runs.forEach((run, number) => {
        const points = curve.x.map((at, k) => [at, floor(run[k])]), there = points.filter(([, value]) => value !== null);
        if (there.length > 1) marks.push({ kind: "line", points, color, name: "seed" });
        else for (const at of there) marks.push({ kind: "dot", at, color, r: 3, name: "seed", say: `${label}, ${runs[number]}\n${at[1]} after epoch ${at[0]}` });
      });
    }
    for (const { curve, color, label, runs, dash: own } of groups) {
      const points = curve.x.map((at, k) => [at, floor(curve.mean[k])]);
      if (points.length > 1) marks.push({ kind: "line", points, color, dash: own, name: "mean" });
      else marks.push({ kind: "dot", at: points[0], color, r: 5, name: "mean" });
      points.forEach((at, k) => targets.push({ at, say: `${label}\n${curve.mean[k]} after epoch ${at[0]}${runs.length > 1 ? `, mean of ${runs.length} runs` : `, ${runs[0]}`}` }));
    }
    draw("plot-training", { height: 420, about: y.label, grid: "y", marks, targets, x, y,
      onZoom: (range) => { state.zoom = range; drawTraining(); } }, words);
  }
  const noise = noiseSection({ byId, draw, state });
  function drawAll() { drawResults(); drawTraining(); noise.draw(); }

  // ---- controls of the training curves
  function prepareControls() {
    const select = byId("measure");
    select.replaceChildren(...Object.entries(state.data.training.measures).map(([name, words]) => new Option(words, name)));
    select.value = measure();
    select.addEventListener("change", () => { state.measure = select.value; drawTraining(); });
    for (const id of ["seeds", "whole"]) {
      byId(id).checked = state[id];
      byId(id).addEventListener("change", () => { state[id] = byId(id).checked; state.zoom = null; drawTraining(); });
    }
    for (const [id, on] of [["all", true], ["none", false]]) {
      byId(id).addEventListener("click", () => {
        for (const group of state.data.training.groups) state.shown[group.label] = on;
        prepareSeries();
        drawTraining();
      });
    }
    prepareSeries();
  }
  function prepareSeries() {
    byId("series").replaceChildren(...state.data.training.groups.map((group, at) => {
      const label = document.createElement("label"), box = document.createElement("input"), chip = document.createElement("span");
      box.type = "checkbox";
      box.id = `series-${at}`;
      box.checked = isShown(group);
      box.addEventListener("change", () => {
        state.shown[group.label] = box.checked;
        prepareSeries();
        byId(box.id).focus();
        drawTraining();
      });
      chip.className = "chip tint";
      chip.style.cssText = `--l:${group.color[0]};--d:${group.color[1]};border-top-style:${{ dash: "dashed", dot: "dotted", dashdot: "dashed", longdash: "dashed" }[dash(group)] || "solid"}`;
      label.append(box, chip, group.label);
      return label;
    }));
  }

  // ---- updates, if this page is served
  let tag = root.dataset.tag;
  function renew(news) {
    const focused = document.activeElement && document.activeElement.id;
    const scrolled = [...document.querySelectorAll(".scroll")].map((each) => [each.scrollLeft, each.scrollTop]);
    plots.forget();
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

  function prepareAll() { prepareTables(); prepareViews(); prepareControls(); noise.prepare(); drawAll(); }
  paint();
  prepareAll();
  if (tag) ask();
})();
