"use strict";
// The section of measured noise. `kit` contains the functions and state shared with the other figures.
const noiseSection = (kit) => {
  const { byId, draw: show, state } = kit;
  const PARTS = ["shift", "scale"];
  const DASHES = ["dot", "dashdot"];
  // The choices of the reader, which are kept when the content is renewed.
  const chosen = { run: null, epoch: null, hidden: new Set() };

  const there = () => byId("noise-run") !== null;
  const runs = () => state.data.noise;
  const run = () => runs().find((each) => each.label === chosen.run) || runs()[0];
  const reading = () => run().readings.find((each) => each.epoch === chosen.epoch) || run().readings[0];
  const names = () => [...new Set(run().readings.flatMap((each) => each.layers.map((layer) => layer.name)))];
  const hue = (name) => run().colors[names().indexOf(name)];

  function drawPart(part) {
    const now = reading(), marks = [], entries = [];
    const line = (data, more) => marks.push({ kind: "line", points: data.x.map((at, k) => [at, data.y[k]]), ...more });
    for (const layer of now.layers) if (layer[part] && !chosen.hidden.has(layer.name)) line(layer[part], { color: hue(layer.name), name: "layer" });
    now.laws[part].forEach((law, at) => {
      line(law.line, { dash: DASHES[at % DASHES.length], name: "law" });
      entries.push({ label: law.label, dash: DASHES[at % DASHES.length] });
    });
    const [min, max] = run().within[part];
    const high = 1.05 * Math.max(...marks.flatMap((mark) => mark.points.map(([, value]) => value)));
    const targets = now.layers.filter((layer) => layer[part] && !chosen.hidden.has(layer.name))
      .flatMap((layer) => layer[part].x.map((at, k) => ({ at: [at, layer[part].y[k]], say: layer.name })));
    show(`plot-${part}`, { height: 360, about: `density of the ${part}`, grid: "y", legend: entries, marks, targets,
      x: { label: run().words[part], min, max, ticks: plots.ticks(min, max, 5) },
      y: { label: `density of the ${part}`, min: 0, max: high, ticks: plots.ticks(0, high, 6) } }, "");
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
      chip.className = "chip tint";
      chip.style.cssText = `--l:${hue(name)[0]};--d:${hue(name)[1]}`;
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
  return { draw, prepare };
};
