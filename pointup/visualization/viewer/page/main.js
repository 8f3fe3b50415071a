"use strict";
// Opens a scene, keeps the state of the page, and listens to pointer and keyboard.

const state = {
  scene: 0, shown: [], mode: "side", share: 0.5, color: "height", ranges: {}, colormaps: {}, hidden: {}, limits: {}, size: 1, shading: 0.5,
  dark: true, turning: false, projection: "perspective", clip: null, measuring: false, pose: null,
};
let stage, overlay, scene;

async function open(number, restored = null) {
  scene = manifest.scenes[number];
  if (stage) stage.dispose();
  stage = new Stage(byId("points"), scene);
  overlay = new Overlay(byId("overlay"), stage);
  stage.clouds = scene.layers.map((layer, i) => new Cloud(layer, scene, COLORS[i % COLORS.length]));
  for (const cloud of stage.clouds) await cloud.load();
  const span = Math.max(...scene.high.map((x, i) => x - scene.low[i]));
  Object.assign(state, {
    scene: number, shown: scene.layers.map(() => true), mode: scene.mode, color: scene.color, ranges: {}, hidden: {}, limits: {}, measuring: false,
    clip: { low: [...scene.low], high: [...scene.high], on: false, angle: 0, place: 0, thickness: 0.03 * span },
  }, restored ?? {});
  if (!colorChoices(scene).some(([name]) => name === state.color)) state.color = "height";
  stage.listeners.push((moving) => afterFrame(moving));
  await apply();
  stage.useCamera(state.projection);
  if (restored?.pose) stage.pose = restored.pose;
  else stage.look();
}

/** Show the state. `rebuild` false leaves the controls alone, while one of them is dragged. */
async function apply(rebuild = true) {
  stage.clouds.forEach((cloud, i) => (cloud.visible = state.shown[i]));
  for (const name of ["size", "shading", "dark", "mode", "share", "turning"]) stage.options[name] = state[name];
  stage.clip = state.clip;
  stage.boxShown = byId("box").open;
  const up = scene.up === "z" ? 2 : 1;
  let range = rangeOf(state, scene);
  if (state.color === "height") range = range.map((end) => end - scene.origin[up]);
  const colormap = colormapOf(state, scene);
  const hidden = state.hidden[state.color] ?? [];
  await Promise.all(stage.clouds.map((cloud) => cloud.colorBy(state.color, range, colormap, hidden, limitOf(state), state.dark)));
  document.body.classList.toggle("dark", state.dark);
  if (rebuild) showPanel(state, scene, stage, change);
  else {
    showLegend(state, scene, stage);
    if (state.clip.on) showSlice(state, scene, stage);
  }
  stage.moved();
}

async function change(changes, rebuild = true) {
  const projection = state.projection;
  Object.assign(state, changes);
  if (state.projection !== projection) stage.useCamera(state.projection);
  await apply(rebuild);
}

function afterFrame(moving) {
  overlay.draw();
  const shown = stage.panels.flatMap((panel) => panel.groups.flat());
  const drawn = shown.reduce((sum, cloud) => sum + cloud.drawn, 0);
  const count = shown.reduce((sum, cloud) => sum + cloud.layer.count, 0);
  const rate = state.turning ? `, ${stage.framesPerSecond.toFixed(0)} frames/s` : "";
  const { on, low, high } = state.clip;
  // The graphics card leaves points out one by one, and does not count them.
  const isCut = on || low.some((x, i) => x > scene.low[i]) || high.some((x, i) => x < scene.high[i])
    || limitOf(state) < Infinity || state.hidden[state.color]?.length > 0;
  const number = isCut ? "some" : drawn.toLocaleString("en");
  byId("status").textContent = `${number} of ${count.toLocaleString("en")} points drawn${rate}`;
  if (!moving) saveState();
}

// Inside another page, such as a report, the viewer has no address of its own.
const hasAddress = location.protocol !== "about:";
let saving;
function saveState() {
  if (!hasAddress) return;
  clearTimeout(saving);
  // replaceState keeps the list of visited pages short.
  saving = setTimeout(() => history.replaceState(null, "", toHash(stateToSave(state, scene, stage, overlay))), 300);
}

/** Open what a link in the address restores; without one that fits the data, `otherwise`. */
async function openLink(otherwise) {
  const saved = fromHash(location.hash);
  const restored = saved && stateToRestore(saved);
  if (!restored) await otherwise();
  else {
    const { points, ...kept } = restored;
    await open(kept.scene, kept);
    overlay.measured = points.map((point) => new THREE.Vector3(...point));
  }
  if (saved) say(restored ? "" : "The link is ignored: it is of other data than this page has, or has been changed.");
}

function say(text) {
  byId("message").textContent = text;
}

function listenToControls() {
  byId("scene").onchange = (event) => {
    const { color, mode } = state;
    open(Number(event.target.value), { color, mode });
  };
  byId("color").onchange = (event) => change({ color: event.target.value });
  byId("colormap").onchange = (event) => change({ colormaps: { ...state.colormaps, [state.color]: event.target.value } });
  byId("low").onchange = (event) => setRangeEnd(0, event.target.value);
  byId("high").onchange = (event) => setRangeEnd(1, event.target.value);
  byId("limit").oninput = (event) => setLimit(Number(event.target.value));
  for (const name of ["size", "shading", "share"]) byId(name).oninput = (event) => change({ [name]: Number(event.target.value) }, false);
  for (const name of ["dark", "turning"]) byId(name).onchange = (event) => change({ [name]: event.target.checked });
  byId("slice").onchange = (event) => setSlice(event.target.checked);
  for (const name of ["angle", "place"]) {
    byId(name).oninput = (event) => change({ clip: { ...state.clip, [name]: Number(event.target.value) } }, false);
  }
  byId("thickness").oninput = (event) => change({ clip: { ...state.clip, thickness: Math.exp(Number(event.target.value)) } }, false);
  byId("faceSlice").onclick = faceSlice;
  byId("box").ontoggle = () => apply(false);
  byId("resetBox").onclick = () => change({ clip: { ...state.clip, low: [...scene.low], high: [...scene.high] } });
  byId("measure").onclick = toggleMeasuring;
  byId("screenshot").onclick = () => saveScreenshot(stage, overlay, legendOf(state, scene, stage));
  byId("link").onclick = copyLink;
  byId("link").hidden = !hasAddress;
  byId("help").onclick = showKeys;
  byId("toggle").onclick = togglePanel;
}

/** Set one end of the range of colours; the other one stays as it is, although its box shows it rounded. */
function setRangeEnd(end, text) {
  const range = [...rangeOf(state, scene)];
  range[end] = Number(text);
  // The text is empty where the input is no number.
  if (text.trim() === "") showRangeEnds(state, scene);
  else if (range[0] < range[1]) change({ ranges: { ...state.ranges, [state.color]: range } });
  else say("The first number of a range is the smaller one.");
}

/** Hide the points above a share of the range of colours; none with a share of 1. */
function setLimit(share) {
  const [low, high] = rangeOf(state, scene);
  const { [state.color]: _, ...others } = state.limits;
  change({ limits: share < 1 ? { ...others, [state.color]: low + share * (high - low) } : others }, false);
}

function setSlice(on) {
  change({ clip: { ...state.clip, on } }).then(() => say(on ? "Keys [ and ] move the slice, l looks at it." : ""));
}

function moveSlice(direction) {
  const { low, high } = sliceReach(stage);
  const place = state.clip.place + direction * state.clip.thickness * 0.5;
  change({ clip: { ...state.clip, on: true, place: Math.min(Math.max(place, low), high) } });
}

function faceSlice() {
  const { angle } = state.clip;
  change({ projection: "parallel" }).then(() => {
    stage.look(angle, 0);
    const pose = stage.pose;
    const { normal, place } = stage.slice();
    const middle = new THREE.Vector3(...pose.target);
    stage.pose = { ...pose, target: middle.addScaledVector(normal, place - normal.dot(middle)).toArray() };
  });
}

function toggleMeasuring() {
  overlay.measured = [];
  change({ measuring: !state.measuring }).then(() => say(state.measuring ? "Click points to measure between them." : ""));
}

function copyLink() {
  const address = location.href.replace(/#.*$/, "") + toHash(stateToSave(state, scene, stage, overlay));
  history.replaceState(null, "", address);
  // Browsers refuse the clipboard to some pages; the address bar then has the link.
  navigator.clipboard?.writeText(address).then(() => say("The link to this view is copied."), () => say("The address of this page is the link to this view."));
}

function togglePanel() {
  const folded = document.body.classList.toggle("folded");
  byId("toggle").setAttribute("aria-expanded", String(!folded));
}

function showKeys() {
  const rows = KEYS.map(([keys, effect]) => element("tr", {}, element("td", {}, element("kbd", { textContent: keys })), element("td", { textContent: effect })));
  byId("keys").replaceChildren(element("table", {}, ...rows));
  byId("keys").onclick = () => byId("keys").close();
  byId("keys").showModal();
}

async function showPoint(found) {
  overlay.picked = found?.position ?? null;
  byId("card").hidden = !found;
  if (found) {
    const at = found.position.toArray().map((x, i) => (x + scene.origin[i]).toFixed(scene.unit ? 2 : 4));
    const rows = [["cloud", found.cloud.layer.name], ...["x", "y", "z"].map((axis, i) => [axis, at[i]]), ...(await found.cloud.describe(found.row))];
    const close = element("button", { type: "button", textContent: "×", onclick: () => showPoint(null) });
    close.setAttribute("aria-label", "Close");
    byId("card").replaceChildren(close, element("table", {}, ...rows.map(([name, value]) => element("tr", {}, element("td", { textContent: name }), element("td", { textContent: value })))));
  }
  stage.invalidate();
}

function clicked(event) {
  const found = pick(stage, event.offsetX, event.offsetY);
  if (!state.measuring) return showPoint(found);
  if (!found) return say("There is no point here.");
  overlay.measured.push(found.position);
  const points = overlay.measured;
  if (points.length > 1) {
    const step = points.at(-1).clone().sub(points.at(-2));
    const upwards = Math.abs(step.dot(stage.up));
    const level = Math.sqrt(Math.max(step.lengthSq() - upwards ** 2, 0));
    say(`${format(step.length(), scene.unit)}: ${format(level, scene.unit)} level, ${format(upwards, scene.unit)} upright`);
  }
  stage.invalidate();
}

function listenToPointer() {
  const canvas = byId("points");
  let pressed = null;
  canvas.addEventListener("pointerdown", (event) => (pressed = [event.offsetX, event.offsetY]));
  canvas.addEventListener("pointerup", (event) => {
    const moved = pressed ? Math.hypot(event.offsetX - pressed[0], event.offsetY - pressed[1]) : 99;
    if (moved < 4 && event.button === 0) clicked(event);
    pressed = null;
  });
  canvas.addEventListener("dblclick", (event) => {
    const found = pick(stage, event.offsetX, event.offsetY);
    if (found) stage.pose = { ...stage.pose, target: found.position.toArray() };
  });
}

const SHORTCUTS = {
  p: () => change({ projection: state.projection === "parallel" ? "perspective" : "parallel" }),
  c: () => nextColor(1), C: () => nextColor(-1),
  m: () => change({ mode: MODES[(MODES.findIndex(([mode]) => mode === state.mode) + 1) % MODES.length][0] }),
  f: () => change({ share: state.share >= 1 ? 0 : Math.min(1, state.share + 1 / Math.max(state.shown.filter(Boolean).length - 1, 1)) }),
  x: () => setSlice(!state.clip.on), "[": () => moveSlice(-1), "]": () => moveSlice(1), l: () => faceSlice(),
  d: () => toggleMeasuring(), s: () => byId("screenshot").click(), b: () => change({ dark: !state.dark }),
  t: () => change({ turning: !state.turning }), h: () => togglePanel(), "?": () => showKeys(),
  "+": () => nearer(1 / 1.2), "=": () => nearer(1 / 1.2), "-": () => nearer(1.2),
  ArrowLeft: (event) => step(event, -1, 0), ArrowRight: (event) => step(event, 1, 0), ArrowUp: (event) => step(event, 0, 1), ArrowDown: (event) => step(event, 0, -1),
  Escape: () => {
    if (state.measuring) toggleMeasuring();
    showPoint(null);
  },
};

function nextColor(direction) {
  const names = colorChoices(scene).map(([name]) => name);
  change({ color: names[(names.indexOf(state.color) + direction + names.length) % names.length] });
}

function nearer(factor) {
  stage.pose = { ...stage.pose, distance: stage.pose.distance * factor };
}

function step(event, right, upwards) {
  const pose = stage.pose;
  if (event.shiftKey) {
    const far = pose.distance / 15;
    const across = new THREE.Vector3(1, 0, 0).applyQuaternion(stage.camera.quaternion).multiplyScalar(right * far);
    const along = new THREE.Vector3(0, 1, 0).applyQuaternion(stage.camera.quaternion).multiplyScalar(upwards * far);
    pose.target = new THREE.Vector3(...pose.target).add(across).add(along).toArray();
  } else {
    pose.azimuth += 6 * right;
    pose.elevation += 6 * upwards;
  }
  stage.pose = pose;
}

document.addEventListener("keydown", (event) => {
  // What has the focus keeps the keys that it uses itself: a check box has none of these.
  const { type } = event.target;
  const typing = (type === "number" || type === "select-one" || (type === "range" && /^Arrow/.test(event.key))) && event.key !== "Escape";
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !stage || byId("keys").open) return;
  const views = scene.up === "z" ? VIEWS : SHAPE_VIEWS;
  const action = views[Number(event.key) - 1] ? () => stage.look(...views[Number(event.key) - 1].slice(1)) : SHORTCUTS[event.key];
  if (!action) return;
  event.preventDefault();
  action(event);
});

addEventListener("hashchange", () => openLink(() => null));

async function start() {
  if (!globalThis.DecompressionStream) throw new Error("Its points are compressed; a browser of 2023 or later reads them");
  if (innerWidth <= 720) togglePanel();
  listenToControls();
  await openLink(() => open(0));
  listenToPointer();
  byId("loading").remove();
  // For tests and measurements.
  window.viewer = { get stage() { return stage; }, get overlay() { return overlay; }, state, change };
  document.body.dataset.ready = "true";
}

start().catch((error) => {
  byId("loading").firstElementChild.textContent = `This page can't be shown. ${error.message}.`;
  throw error;
});
