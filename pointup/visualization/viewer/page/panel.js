"use strict";
// The controls beside the picture. They change `state`; `apply` of main.js shows it.

const byId = (id) => document.getElementById(id);
const MODES = [["side", "Side by side"], ["fade", "Fade"], ["swipe", "Swipe"], ["together", "Together"]];
const PROJECTIONS = [["perspective", "Perspective"], ["parallel", "Parallel"]];
const VIEWS = [["Whole"], ["Above", 0, 90], ["South", 0, 0], ["East", 90, 0]];
const SHAPE_VIEWS = [["Whole"], ["Front", 0, 0], ["Side", 90, 0], ["Above", 0, 90]];
const KEYS = [
  ["drag, one finger", "turn"], ["right drag, two fingers", "move"], ["wheel, pinch, + −", "nearer, farther"],
  ["double click", "turn about this point"], ["click", "values of a point"], ["arrows", "turn; with Shift move"],
  ["1 2 3 4", "views"], ["p", "perspective or parallel"], ["c, Shift c", "next, previous colour"], ["m", "next arrangement"],
  ["f", "fade or swipe: to the next cloud"], ["x", "cross-section"], ["[ ]", "move the cross-section"], ["l", "look at the cross-section"],
  ["d", "measure"], ["Esc", "end measuring, close"], ["s", "screenshot"], ["b", "dark or light"], ["t", "turn by itself"],
  ["h", "show or hide the controls"], ["?", "these keys"],
];

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** A row of buttons of which one is chosen. */
function fillChoice(parent, options, chosen, choose) {
  parent.replaceChildren(...options.map(([value, label]) => {
    const button = element("button", { type: "button", textContent: label, onclick: () => choose(value) });
    button.setAttribute("role", "radio");
    button.setAttribute("aria-checked", String(value === chosen));
    return button;
  }));
}

/** What points can be coloured by: [name, label] of each channel, height and layer. */
function colorChoices(scene) {
  const label = (text) => text.charAt(0).toUpperCase() + text.slice(1);
  const channels = Object.entries(scene.channels).map(([name, channel]) => [name, label(channel.label)]);
  return [["height", "Height"], ...channels, ["layer", "One colour for each cloud"]];
}

/** Range of colours of a channel: as chosen, else as suggested. Heights are in file coordinates. */
function rangeOf(state, scene, name = state.color) {
  if (state.ranges[name]) return state.ranges[name];
  const up = scene.up === "z" ? 2 : 1;
  if (name === "height") return scene.heights.map((end) => end + scene.origin[up]);
  return scene.channels[name]?.shown ?? [0, 1];
}

/** The largest value of the present channel that is drawn. */
function limitOf(state) {
  return state.limits[state.color] ?? Infinity;
}

function colormapOf(state, scene) {
  return state.colormaps[state.color] ?? scene.channels[state.color]?.colormap ?? "viridis";
}

function isScale(scene, name) {
  return name === "height" || scene.channels[name]?.kind === "scalar";
}

function showPanel(state, scene, stage, change) {
  byId("title").textContent = manifest.title;
  byId("note").textContent = scene.note;
  byId("note").hidden = !scene.note;
  byId("scenes").hidden = manifest.scenes.length < 2;
  byId("scene").replaceChildren(...manifest.scenes.map(({ name }, i) => element("option", { value: i, textContent: name, selected: i === state.scene })));
  showClouds(state, scene, stage, change);
  fillChoice(byId("modes"), MODES, state.mode, (mode) => change({ mode }));
  byId("modes").hidden = scene.layers.length < 2;
  byId("color").replaceChildren(...colorChoices(scene).map(([value, label]) => element("option", { value, textContent: label, selected: value === state.color })));
  showRange(state, scene);
  showCategories(state, scene, change);
  for (const name of ["size", "shading"]) byId(name).value = state[name];
  for (const name of ["dark", "turning"]) byId(name).checked = state[name];
  const views = scene.up === "z" ? VIEWS : SHAPE_VIEWS;
  byId("views").replaceChildren(...views.map(([label, azimuth, elevation]) =>
    element("button", { type: "button", textContent: label, onclick: () => stage.look(azimuth, elevation) })));
  fillChoice(byId("projection"), PROJECTIONS, state.projection, (projection) => change({ projection }));
  showSlice(state, scene, stage);
  showBox(state, scene, change);
  showLegend(state, scene, stage);
  showShare(state, stage);
  byId("measure").setAttribute("aria-pressed", String(state.measuring));
  byId("footer").textContent = `pointup ${manifest.version}, three.js r${THREE.REVISION} (MIT licence)`;
}

function showClouds(state, scene, stage, change) {
  byId("clouds").replaceChildren(...stage.clouds.map((cloud, i) => {
    const box = element("input", { type: "checkbox", checked: cloud.visible, disabled: stage.clouds.length < 2 });
    box.onchange = () => change({ shown: stage.clouds.map((_, j) => (j === i ? box.checked : state.shown[j])) });
    const { count, total, name } = cloud.layer;
    const number = count < total ? `${count.toLocaleString("en")} of ${total.toLocaleString("en")}` : total.toLocaleString("en");
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = state.color === "layer" ? cloud.color : "transparent";
    return element("label", { className: "check" }, box, ...(state.color === "layer" ? [swatch] : []), name,
      element("span", { className: "count", textContent: number }));
  }));
}

function showRange(state, scene) {
  byId("range").hidden = !isScale(scene, state.color);
  showRangeEnds(state, scene);
  const [low, high] = rangeOf(state, scene);
  byId("limitLine").hidden = scene.channels[state.color]?.kind !== "scalar";
  byId("limit").value = Math.min((limitOf(state) - low) / (high - low), 1);
  byId("colormap").replaceChildren(...Object.keys(manifest.colormaps).map((name) =>
    element("option", { value: name, textContent: name, selected: name === colormapOf(state, scene) })));
}

/** The ends of the range, with as many decimals as tell thousandths of it apart. */
function showRangeEnds(state, scene) {
  const [low, high] = rangeOf(state, scene);
  const decimals = Math.min(Math.max(3 - Math.floor(Math.log10(high - low)), 0), 100);
  byId("low").value = Number(low.toFixed(decimals));
  byId("high").value = Number(high.toFixed(decimals));
}

function showCategories(state, scene, change) {
  const channel = scene.channels[state.color];
  const hidden = state.hidden[state.color] ?? [];
  byId("categories").hidden = channel?.kind !== "category";
  byId("categories").replaceChildren(...(channel?.categories ?? []).map(([value, name], number) => {
    const box = element("input", { type: "checkbox", checked: !hidden.includes(value) });
    box.onchange = () => {
      const others = hidden.filter((each) => each !== value);
      change({ hidden: { ...state.hidden, [state.color]: box.checked ? others : [...others, value] } });
    };
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = categoryColor(value, name, number);
    return element("label", { className: "check" }, box, swatch, name === String(value) ? name : `${value} ${name}`);
  }));
}

function showSlice(state, scene, stage) {
  byId("slice").checked = state.clip.on;
  byId("sliceControls").hidden = !state.clip.on;
  const reach = sliceReach(stage);
  Object.assign(byId("angle"), { value: state.clip.angle });
  Object.assign(byId("place"), { min: reach.low, max: reach.high, value: state.clip.place });
  // Thickness by powers, so that thin slices are as easy to set as thick ones.
  const [thin, thick] = [0.002 * stage.radius, 1.0 * stage.radius];
  Object.assign(byId("thickness"), { min: Math.log(thin), max: Math.log(thick), value: Math.log(state.clip.thickness) });
  byId("sliceValue").textContent = `${format(state.clip.thickness, scene.unit)} thick, ${format(state.clip.place - reach.low, scene.unit)} from the edge`;
}

/** Lowest and highest position of a slice in its present direction. */
function sliceReach(stage) {
  const { normal } = stage.slice();
  const { low, high } = stage.scene;
  const along = normal.toArray();
  const end = (near, far) => along.reduce((sum, part, i) => sum + part * (part > 0 ? far[i] : near[i]), 0);
  return { low: end(high, low), high: end(low, high) };
}

function showBox(state, scene, change) {
  const rows = [];
  ["x", "y", "z"].forEach((axis, i) => {
    for (const [side, word] of [["low", "from"], ["high", "to"]]) {
      const input = element("input", { type: "range", min: scene.low[i], max: scene.high[i], step: "any", value: state.clip[side][i] });
      input.setAttribute("aria-label", `${axis} ${word}`);
      input.oninput = () => {
        const ends = [...state.clip[side]];
        ends[i] = Number(input.value);
        change({ clip: { ...state.clip, [side]: ends } }, false);
      };
      rows.push(element("label", { className: "line" }, `${axis} ${word}`, input));
    }
  });
  byId("boxControls").replaceChildren(...rows);
}

/** What the colours mean; also drawn into screenshots. */
function legendOf(state, scene, stage) {
  const channel = scene.channels[state.color];
  const unit = state.color === "height" ? scene.unit : channel?.unit ?? "";
  const shown = stage.clouds.filter((cloud) => cloud.visible);
  const without = shown.filter((cloud) => channel && !cloud.layer.columns[state.color]).map((cloud) => cloud.layer.name);
  const notes = shown.map((cloud) => [cloud.layer.name, cloud.layer.columns[state.color]?.note]).filter(([, note]) => note);
  const lines = notes.map(([name, note]) => `${name}: ${note}`);
  if (without.length) lines.push(`grey: not known for ${without.join(", ")}`);
  if (isScale(scene, state.color)) {
    const [low, high] = rangeOf(state, scene);
    const up = scene.up === "z" ? 2 : 1;
    const top = channel?.high ?? scene.high[up] + scene.origin[up];
    const above = high < top ? "≥ " : "";
    if (channel && limitOf(state) < channel.high) lines.push(`hidden: above ${format(limitOf(state), unit, high - low)}`);
    // A long unit, such as points/m², is named once.
    const name = channel?.label ?? "height";
    const [label, short] = unit.length > 5 ? [`${name}, ${unit}`, ""] : [name, unit];
    return { label, colors: manifest.colormaps[colormapOf(state, scene)], low: format(low, short, high - low), high: above + format(high, short, high - low), lines };
  }
  if (channel?.kind === "category") {
    const hidden = state.hidden[state.color] ?? [];
    const items = channel.categories.map(([value, name], number) => [categoryColor(value, name, number), name, value]);
    const seen = items.filter(([, , value]) => !hidden.includes(value));
    if (seen.length > 10) lines.push(`and ${seen.length - 10} more`);
    return { label: channel.label, items: seen.slice(0, 10), lines };
  }
  if (state.color === "layer") return { label: "", items: shown.map((cloud) => [cloud.color, cloud.layer.name]), lines };
  return { label: channel?.label ?? "", lines };
}

function showLegend(state, scene, stage) {
  const legend = legendOf(state, scene, stage);
  const parts = legend.label ? [element("div", { textContent: legend.label })] : [];
  if (legend.colors) {
    const bar = element("canvas", { width: 256, height: 1 });
    const context = bar.getContext("2d");
    const image = context.createImageData(256, 1);
    for (let i = 0; i < 256; i++) image.data.set([...legend.colors.slice(3 * i, 3 * i + 3), 255], 4 * i);
    context.putImageData(image, 0, 0);
    parts.push(element("div", { className: "item" }, legend.low, bar, legend.high));
  }
  for (const [color, name] of legend.items ?? []) {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = color;
    parts.push(element("div", { className: "item" }, swatch, name));
  }
  parts.push(...legend.lines.map((text) => element("div", { className: "missing", textContent: text })));
  byId("legend").replaceChildren(...parts);
  byId("legend").hidden = !parts.length;
}

function showShare(state, stage) {
  const shown = stage.clouds.filter((cloud) => cloud.visible).map((cloud) => cloud.layer.name);
  const used = (state.mode === "fade" || state.mode === "swipe") && shown.length > 1;
  byId("slider").hidden = !used;
  byId("share").value = state.share;
  byId("share").previousElementSibling.textContent = state.mode === "fade" ? `Fade ${shown.join(" → ")}` : "Swipe";
}
