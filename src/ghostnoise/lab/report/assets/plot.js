"use strict";
// Small charts in SVG. Colours are pairs for light and dark pages, chosen by the style sheet, so that a change of the
// theme needs no redrawing.
const plots = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = { dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "14 3" };
  const NEAR = 28; // pixels from the pointer to a point whose text is shown
  const specs = new Map();
  const ruler = document.createElement("canvas").getContext("2d");

  function make(tag, attributes, ...content) {
    const made = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(name, value);
    made.append(...content);
    return made;
  }
  const tint = (color) => (color ? `--l:${color[0]};--d:${color[1]}` : null);
  const inked = (color, more) => ({ class: `${color ? "tint" : "ink"}${more ? ` ${more}` : ""}`, style: tint(color) });
  function width(text, size) {
    ruler.font = `${size}px system-ui, sans-serif`;
    return ruler.measureText(text).width;
  }

  // Round numbers that divide a range into about `count` parts.
  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(count, 1) || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 2.5, 5, 10].find((each) => each * power >= rough * 0.999);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + (step / power === 2.5 ? 1 : 0));
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * step; at += 1) found.push([at * step, (at * step).toFixed(Math.min(digits, 8))]);
    return found;
  }
  function scale(axis, from, to) {
    const value = axis.log ? Math.log : (each) => each;
    const [low, high] = [value(axis.min), value(axis.max)];
    const span = high - low || 1;
    return (each) => from + ((value(each) - low) / span) * (to - from);
  }

  function symbol(marker, x, y, r, attributes) {
    const corners = (points) => make("path", { d: `M${points.map(([dx, dy]) => `${(x + dx * r).toFixed(1)} ${(y + dy * r).toFixed(1)}`).join("L")}Z`, ...attributes });
    switch (marker) {
      case "square": return make("rect", { x: x - r * 0.9, y: y - r * 0.9, width: r * 1.8, height: r * 1.8, ...attributes });
      case "triangle": return corners([[0, -1.2], [1.1, 0.8], [-1.1, 0.8]]);
      case "diamond": return corners([[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]]);
      case "cross": return corners([[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]]);
      case "star": return corners([[0, -1.4], [0.4, -0.4], [1.4, 0], [0.4, 0.4], [0, 1.4], [-0.4, 0.4], [-1.4, 0], [-0.4, -0.4]]);
      default: return make("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r, ...attributes });
    }
  }
  // Connects the points before and after a missing one.
  const path = (points, x, y) => points.filter(([, value]) => value !== null)
    .map(([at, value], k) => `${k ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");

  const draws = {
    band(mark, x, y) {
      const points = mark.points.filter(([, low, high]) => low !== null && high !== null);
      if (points.length < 2) return [];
      const there = points.map(([at, , high]) => `${x(at).toFixed(1)} ${y(high).toFixed(1)}`);
      const back = points.map(([at, low]) => `${x(at).toFixed(1)} ${y(low).toFixed(1)}`).reverse();
      return [make("path", { d: `M${[...there, ...back].join("L")}Z`, ...inked(mark.color, "band") })];
    },
    line(mark, x, y) {
      return [make("path", { d: path(mark.points, x, y), fill: "none", stroke: "currentColor", "stroke-dasharray": DASHES[mark.dash], ...inked(mark.color, mark.name) })];
    },
    segment(mark, x, y) {
      const [[x1, y1], [x2, y2]] = mark.ends;
      return [make("line", { x1: x(x1), y1: y(y1), x2: x(x2), y2: y(y2), stroke: "currentColor", ...inked(mark.color, mark.name) })];
    },
    dot(mark, x, y) {
      const style = mark.hollow ? { fill: "var(--ground)", stroke: "currentColor", "stroke-width": 1.6 } : { fill: "currentColor" };
      return [symbol(mark.marker, x(mark.at[0]), y(mark.at[1]), mark.r || 4, { ...style, ...inked(mark.color, mark.name) })];
    },
    // A short line across the direction of the rows.
    tick(mark, x, y) {
      const [at, row] = [x(mark.at[0]), y(mark.at[1])];
      return [make("line", { x1: at, x2: at, y1: row - 6, y2: row + 6, stroke: "currentColor", "stroke-width": 3, ...inked(mark.color, mark.name) })];
    },
    text(mark, x, y) {
      const [dx, dy] = mark.offset;
      return [make("text", { x: x(mark.at[0]) + dx, y: y(mark.at[1]) + dy, ...inked(mark.color, "mark-text") }, mark.text)];
    },
    // The name of a point, at the first place around it at which it covers no other name.
    name(mark, x, y, box, taken) {
      const wide = width(mark.text, 13), [px, py] = [x(mark.at[0]), y(mark.at[1])];
      const free = [[8, -7], [8, 16], [-8 - wide, -7], [-8 - wide, 16], [8, -21], [8, 30], [-8 - wide, -21], [-8 - wide, 30]]
        .map(([dx, dy]) => [px + dx, py + dy])
        .filter(([left, base]) => left >= box.left && left + wide <= box.right && base >= box.top + 10 && base <= box.bottom)
        .find(([left, base]) => taken.every((each) => left + wide < each.left || each.right < left || Math.abs(base - each.base) > 13));
      if (!free) return [];
      taken.push({ left: free[0], right: free[0] + wide, base: free[1] });
      return [make("text", { x: free[0], y: free[1], ...inked(mark.color, "mark-text") }, mark.text)];
    },
  };

  function axes(svg, spec, box, x, y) {
    const { left, right, top, bottom } = box;
    for (const [value, text] of spec.x.ticks) {
      if (spec.grid !== "y") svg.append(make("line", { x1: x(value), x2: x(value), y1: top, y2: bottom, class: "grid" }));
      svg.append(make("text", { x: x(value), y: bottom + 17, "text-anchor": "middle", class: "tick" }, text));
    }
    for (const [value, text] of spec.y.ticks) {
      if (spec.grid !== "x") svg.append(make("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" }));
      svg.append(make("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end", class: "tick" }, text));
    }
    svg.append(make("path", { d: `M${left} ${top}V${bottom}H${right}`, class: "axis" }));
    svg.append(make("text", { x: (left + right) / 2, y: bottom + 38, "text-anchor": "middle", class: "title" }, spec.x.label));
    if (spec.y.label) svg.append(make("text", { transform: `translate(13 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle", class: "title" }, spec.y.label));
  }

  // Names of ticks that would overlap are left out, evenly.
  function thinned(spec, across) {
    const widest = Math.max(0, ...spec.x.ticks.map(([, text]) => width(text, 13))) + 8;
    const every = Math.max(1, Math.ceil((spec.x.ticks.length * widest) / across));
    return { ...spec, x: { ...spec.x, ticks: spec.x.ticks.filter((_, at) => at % every === 0) } };
  }

  function legend(entries) {
    const list = document.createElement("ul");
    list.className = "legend";
    for (const entry of entries) {
      const item = document.createElement("li"), chip = make("svg", { width: 30, height: 14, "aria-hidden": "true" });
      if (entry.line !== false) chip.append(make("line", { x1: 1, x2: 29, y1: 7, y2: 7, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": DASHES[entry.dash], ...inked(entry.color) }));
      if (entry.marker) chip.append(symbol(entry.marker, 15, 7, 4, { fill: entry.hollow ? "none" : "currentColor", stroke: entry.hollow ? "currentColor" : null, ...inked(entry.color) }));
      item.append(chip, entry.label);
      list.append(item);
    }
    return list;
  }

  function hover(place, svg, targets) {
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    place.append(tip);
    const leave = () => { tip.hidden = true; };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), [px, py] = [event.clientX - box.left, event.clientY - box.top];
      let best = null, nearest = NEAR ** 2;
      for (const each of targets) {
        const distance = (each.x - px) ** 2 + (each.y - py) ** 2;
        if (distance < nearest) [best, nearest] = [each, distance];
      }
      if (!best) return leave();
      tip.textContent = best.text;
      tip.hidden = false;
      tip.style.left = `${Math.min(Math.max(best.x - tip.offsetWidth / 2, 0), box.width - tip.offsetWidth)}px`;
      tip.style.top = `${svg.offsetTop + Math.max(best.y - tip.offsetHeight - 10, 0)}px`;
    });
  }

  // Select a part of the x axis with the mouse; a double click shows everything again.
  function zoom(svg, spec, box, unscaled) {
    let from = null;
    const veil = make("rect", { y: box.top, height: box.bottom - box.top, class: "veil", visibility: "hidden" });
    svg.append(veil);
    const within = (event) => Math.min(Math.max(event.clientX - svg.getBoundingClientRect().left, box.left), box.right);
    svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && event.button === 0) { from = within(event); event.preventDefault(); } });
    svg.addEventListener("pointermove", (event) => {
      if (from === null) return;
      const to = within(event);
      veil.setAttribute("x", Math.min(from, to));
      veil.setAttribute("width", Math.abs(to - from));
      veil.setAttribute("visibility", "visible");
    });
    const done = (event) => {
      if (from === null) return;
      const ends = [from, within(event)].sort((a, b) => a - b).map(unscaled);
      const far = Math.abs(within(event) - from) > 8;
      from = null;
      veil.setAttribute("visibility", "hidden");
      if (far) spec.onZoom(ends);
    };
    svg.addEventListener("pointerup", done);
    svg.addEventListener("pointerleave", done);
    svg.addEventListener("dblclick", () => spec.onZoom(null));
  }

  function draw(place, given) {
    const wide = place.clientWidth || 320;
    const size = 13, names = Math.max(0, ...given.y.ticks.map(([, text]) => width(text, size)));
    const box = { left: Math.min(names + 14 + (given.y.label ? 22 : 0), wide * 0.45), right: wide - 12, top: 8, bottom: given.height - 46 };
    const spec = thinned(given, box.right - box.left);
    const x = scale(spec.x, box.left + (spec.inset || 0), box.right - (spec.inset || 0));
    const y = spec.rows ? scale(spec.y, box.top, box.bottom) : scale(spec.y, box.bottom, box.top);
    const svg = make("svg", { width: wide, height: spec.height, viewBox: `0 0 ${wide} ${spec.height}`, role: "img", "aria-label": `${spec.about}; the table has the numbers` });
    axes(svg, spec, box, x, y);
    const clip = `clip-${place.id}`, inner = make("g", { "clip-path": `url(#${clip})` }), targets = [];
    svg.append(make("clipPath", { id: clip }, make("rect", { x: box.left - 6, y: box.top - 6, width: box.right - box.left + 12, height: box.bottom - box.top + 7 })));
    const taken = spec.marks.filter((mark) => mark.kind === "dot" && mark.say)
      .map(({ at }) => ({ left: x(at[0]) - 6, right: x(at[0]) + 6, base: y(at[1]) + 4 }));
    for (const mark of spec.marks) {
      inner.append(...draws[mark.kind](mark, x, y, box, taken));
      if (mark.say) targets.push({ x: x(mark.at[0]), y: y(mark.at[1]), text: mark.say });
    }
    for (const each of spec.targets || []) targets.push({ x: x(each.at[0]), y: y(each.at[1]), text: each.say });
    svg.append(inner);
    place.replaceChildren(...(spec.legend && spec.legend.length ? [legend(spec.legend)] : []), svg);
    hover(place, svg, targets);
    if (spec.onZoom) zoom(svg, spec, box, (px) => spec.x.min + ((px - box.left) / (box.right - box.left)) * (spec.x.max - spec.x.min));
  }

  const widths = new Map();
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (specs.has(target) && widths.get(target) !== target.clientWidth) {
        widths.set(target, target.clientWidth);
        draw(target, specs.get(target));
      }
    }
  });
  // Draw a chart in an element, or `words` if there is nothing to draw.
  function show(place, spec, words) {
    const empty = !spec || spec.marks.length === 0;
    place.classList.toggle("empty", empty);
    if (empty) {
      specs.delete(place);
      place.textContent = words;
      return;
    }
    specs.set(place, spec);
    widths.set(place, place.clientWidth);
    draw(place, spec);
    observer.observe(place);
  }
  function forget() {
    observer.disconnect();
    specs.clear();
    widths.clear();
  }
  return { show, forget, ticks };
})();
