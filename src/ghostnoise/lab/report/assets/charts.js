"use strict";
// The charts of results: accuracy and gap, as curves or rows, and accuracy against cost.
const charts = (() => {
  const ROW = 30;
  const fixed = (value, signed) => `${signed && value > 0 ? "+" : ""}${value.toFixed(2)}`;
  function say(label, point, unit) {
    const interval = point.low === null ? "one seed: no interval" : `95 % interval ${fixed(point.low)} to ${fixed(point.high)}`;
    return `${label}\n${fixed(point.mean)}${unit} (n = ${point.n})\n${interval}`;
  }
  const known = (series) => series.points.filter((point) => point.mean !== undefined);
  const paper = (point, at) => ({ kind: "dot", at, marker: "diamond", hollow: true, r: 5, name: "paper", say: `the paper: ${point.paper}` });

  function axis(chart) {
    const all = [...new Set(chart.series.filter((each) => !each.flat).flatMap((each) => each.points.map((point) => point.x)))];
    const numeric = all.every((value) => typeof value === "number");
    if (!numeric) return { place: (value) => all.map(String).indexOf(String(value)), min: 0, max: Math.max(all.length - 1, 1), ticks: all.map((value, at) => [at, String(value)]) };
    all.sort((a, b) => a - b);
    const ticks = all.length > 10 && chart.log ? all.filter((value) => Number.isInteger(Math.log2(value))) : all;
    return { place: (value) => value, min: all[0], max: all.length > 1 ? all[all.length - 1] : all[0] + 1, log: chart.log, ticks: ticks.map((value) => [value, String(value)]) };
  }

  function curves(chart) {
    const x = axis(chart), marks = [], entries = [];
    for (const series of chart.series) {
      const points = known(series), { color } = series;
      if (!points.length) continue;
      if (series.flat) {
        const [point] = points, ends = [x.min, x.max];
        marks.push({ kind: "band", points: ends.map((at) => [at, ...(point.band || [null, null])]), color });
        marks.push({ kind: "line", points: ends.map((at) => [at, point.mean]), color, dash: "dot", name: "mean" });
        marks.push({ kind: "dot", at: [x.max, point.mean], color, r: 0.01, say: say(series.label, point, "") });
        entries.push({ label: series.label, color, dash: "dot" });
        continue;
      }
      entries.push({ label: series.label, color, dash: series.dash, marker: series.marker });
      marks.push({ kind: "band", points: points.map((point) => [x.place(point.x), ...(point.band || [point.mean, point.mean])]), color });
      for (const point of points) {
        if (point.n > 1) for (const seed of point.seeds) marks.push({ kind: "dot", at: [x.place(point.x), seed], color, r: 2, name: "seed" });
      }
      marks.push({ kind: "line", points: points.map((point) => [x.place(point.x), point.mean]), color, dash: series.dash, name: "mean" });
      for (const point of points) {
        const at = x.place(point.x);
        marks.push({ kind: "dot", at: [at, point.mean], color, marker: series.marker, hollow: !point.band, name: "point", say: say(`${series.label}, ${chart.x} ${point.x}`, point, "") });
        if (point.paper !== undefined) marks.push(paper(point, [at, point.paper]));
      }
    }
    if (!marks.length) return null;
    const [min, max] = chart.range;
    return { height: 400, inset: 14, about: `${chart.y} over the ${chart.x}`, grid: "y", legend: entries, marks,
      x: { ...x, label: chart.x }, y: { label: chart.y, min, max, ticks: plots.ticks(min, max, 7) } };
  }

  function rows(chart) {
    if (!chart.range) return null;
    const marks = [], [min, max] = chart.range, count = chart.series.length;
    chart.series.forEach((series, at) => {
      const [point] = series.points, { color } = series;
      if (point.mean === undefined) marks.push({ kind: "text", at: [min, at], text: point.lacking, offset: [6, 4] });
      else if (point.outside) marks.push({ kind: "text", at: [min, at], text: `◂ ${fixed(point.mean)}`, offset: [2, 4], color });
      else {
        if (point.n > 1) for (const seed of point.seeds) marks.push({ kind: "dot", at: [seed, at - 0.17], color, r: 3, name: "seed" });
        if (point.band) marks.push({ kind: "segment", ends: point.band.map((end) => [end, at + 0.15]), color, name: "bar" });
        marks.push(point.band ? { kind: "tick", at: [point.mean, at + 0.15], color, name: "point", say: say(series.label, point, "") }
          : { kind: "dot", at: [point.mean, at + 0.15], color, hollow: true, name: "point", say: say(series.label, point, "") });
      }
      if (point.paper !== undefined) marks.push(paper(point, [point.paper, at]));
    });
    return { height: 64 + ROW * count, rows: true, about: chart.y, grid: "x", marks,
      x: { label: chart.y, min, max, ticks: plots.ticks(min, max, 6) },
      y: { min: -0.5, max: count - 0.5, ticks: chart.series.map((series, at) => [at, series.label]) } };
  }

  // The best cell of each method has a name; whiskers are the interval of the accuracy, and the fastest and slowest run.
  function cost(data) {
    if (!data) return null;
    const marks = [];
    for (const point of data.points) {
      const { color } = point, name = point.best ? "" : "faded";
      marks.push({ kind: "segment", ends: [[point.fastest, point.mean], [point.slowest, point.mean]], color, name: `whisker ${name}` });
      if (point.band) marks.push({ kind: "segment", ends: point.band.map((end) => [point.cost, end]), color, name: `whisker ${name}` });
    }
    for (const point of data.points) {
      const { color } = point, text = `${point.label}\n${fixed(point.mean)} % at ${point.cost.toFixed(2)} × the time of ${data.baseline}`;
      marks.push({ kind: "dot", at: [point.cost, point.mean], color, marker: point.marker, hollow: !point.band, name: `point ${point.best ? "" : "faded"}`,
        say: `${text}\nfastest run ${point.fastest.toFixed(2)} ×, slowest ${point.slowest.toFixed(2)} ×` });
      if (point.best) marks.push({ kind: "name", at: [point.cost, point.mean], text: point.label, color });
    }
    const [[xmin, xmax], [min, max]] = data.ranges;
    return { height: 400, about: `${data.y} against training time`, marks, x: { label: data.x, min: xmin, max: xmax, ticks: plots.ticks(xmin, xmax, 6) },
      y: { label: data.y, min, max, ticks: plots.ticks(min, max, 7) } };
  }
  return { result: (chart) => (chart.form === "curves" ? curves(chart) : rows(chart)), cost };
})();
