"use strict";
// The section of measured noise. `kit` contains the functions and state shared with the other figures.
const noiseSection = (kit) => {
  const { byId, color, html, layout, root, show, state } = kit;
  const PARTS = ["shift", "scale"];
  const DASHES = ["dot", "dashdot"];
  // The choices of the reader, which are kept when the content is renewed.
  const chosen = { run: null, epoch: null, hidden: new Set() };

  const there = () => byId("noise-run") !== null;
  const runs = () => state.data.noise;
  const run = () => runs().find((each) => each.label === chosen.run) || runs()[0];
  const reading = () => run().readings.find((each) => each.epoch === chosen.epoch) || run().readings[0];
  const names = () => [...new Set(run().readings.flatMap((each) => each.layers.map((layer) => layer.name)))];
  function hue(name) {
    const all = names();
    const share = all.length > 1 ? all.indexOf(name) / (all.length - 1) : 0;
    return `hsl(${Math.round(275 * (1 - share))}, 85%, ${root.dataset.theme === "dark" ? 64 : 42}%)`;
  }

  function drawPart(part) {
    const now = reading();
    const spot = "%{y:.3g} at %{x:.3g}<extra></extra>";
    const traces = now.layers.filter((layer) => layer[part] && !chosen.hidden.has(layer.name)).map((layer) => ({
      ...layer[part], mode: "lines", name: html(layer.name), showlegend: false,
      line: { color: hue(layer.name), width: 1.6 }, hovertemplate: `${html(layer.name)}<br>${spot}` }));
    now.laws[part].forEach((law, at) => traces.push({
      ...law.line, mode: "lines", name: html(law.label), showlegend: true,
      line: { color: color("--ink"), width: 2, dash: DASHES[at % DASHES.length] },
      hovertemplate: `${html(law.label)}<br>${spot}` }));
    const made = layout(run().words[part], `density of the ${part}`, {
      xaxis: { range: run().within[part] }, yaxis: { rangemode: "tozero" }, layout: { uirevision: run().label } });
    show(`plot-${part}`, traces, { ...made, showlegend: true }, "");
  }
  function draw() { if (there()) PARTS.forEach(drawPart); }

  function prepareLayers() {
    byId("noise-layers").replaceChildren(...names().map((name, at) => {
      const label = document.createElement("label"), box = document.createElement("input"), chip = document.createElement("span");
      box.type = "checkbox";
      box.id = `noise-layer-${at}`;
      box.checked = !chosen.hidden.has(name);
      box.addEventListener("change", () => {
        if (box.checked) chosen.hidden.delete(name); else chosen.hidden.add(name);
        draw();
      });
      chip.className = "chip";
      chip.style.borderTopColor = hue(name);
      label.append(box, chip, name);
      return label;
    }));
  }
  function turn() {
    const select = byId("noise-epoch"), now = reading();
    select.replaceChildren(...run().readings.map((each) => new Option(String(each.epoch), String(each.epoch))));
    select.value = String(now.epoch);
    const id = `noise-${runs().indexOf(run())}-${now.epoch}`;
    for (const each of document.querySelectorAll(".noise-at")) each.hidden = each.id !== id;
    prepareLayers();
  }
  function prepare() {
    if (!there()) return;
    const select = byId("noise-run"), epoch = byId("noise-epoch");
    select.selectedIndex = runs().indexOf(run());
    select.addEventListener("change", () => { chosen.run = runs()[select.selectedIndex].label; turn(); draw(); });
    epoch.addEventListener("change", () => { chosen.epoch = Number(epoch.value); turn(); draw(); });
    for (const [id, on] of [["noise-all", true], ["noise-none", false]]) {
      byId(id).addEventListener("click", () => {
        chosen.hidden = new Set(on ? [] : names());
        prepareLayers();
        draw();
      });
    }
    turn();
  }
  return { draw, prepare, recolor: () => { if (there()) prepareLayers(); }, plots: PARTS.map((part) => `plot-${part}`) };
};
