"use strict";
// The link that restores a view: the state of the page as the part of its address after "#".

function toHash(state) {
  return `#view=${encodeURIComponent(JSON.stringify(state, (_, value) =>
    typeof value === "number" ? Number(value.toPrecision(7)) : value))}`;
}

/** What a link holds; null where there is none. */
function fromHash(hash) {
  const match = /^#view=(.*)$/.exec(hash);
  if (!match) return null;
  try {
    return Object(JSON.parse(decodeURIComponent(match[1])));
  } catch {
    return {}; // an address that was cut
  }
}

/** What a link keeps. A side of the clipping box is null where it cuts nothing off, because a rounded one would. */
function stateToSave(state, scene, stage, overlay) {
  const { measuring, turning, ...kept } = state;
  const cuts = (side) => state.clip[side].map((x, i) => (x === scene[side][i] ? null : x));
  return {
    ...kept, fingerprint: scene.fingerprint, clip: { ...state.clip, low: cuts("low"), high: cuts("high") },
    pose: stage.pose, points: overlay.measured.map((point) => point.toArray()),
  };
}

const isNumber = Number.isFinite;
const isSwitch = (value) => typeof value === "boolean";
const isList = (value, fits, length = value?.length) => Array.isArray(value) && value.length === length && value.every(fits);
const isPoint = (value) => isList(value, isNumber, 3);
const isSide = (value) => isList(value, (x) => x === null || isNumber(x), 3);
const isOneOf = (names) => (value) => names.includes(value);
const isTable = (value, fits) => value !== null && typeof value === "object" && Object.values(value).every(fits);

// What each part of a link must be, because people edit and cut addresses.
const FORMS = {
  shown: (value, scene) => isList(value, isSwitch, scene.layers.length),
  mode: isOneOf(MODES.map(([mode]) => mode)),
  share: (value) => value >= 0 && value <= 1,
  color: (value, scene) => colorChoices(scene).some(([name]) => name === value),
  ranges: (value) => isTable(value, (range) => isList(range, isNumber, 2) && range[0] < range[1]),
  colormaps: (value) => isTable(value, isOneOf(Object.keys(manifest.colormaps))),
  hidden: (value) => isTable(value, (categories) => isList(categories, isNumber)),
  limits: (value) => isTable(value, isNumber),
  size: isNumber,
  shading: isNumber,
  dark: isSwitch,
  projection: isOneOf(PROJECTIONS.map(([projection]) => projection)),
  clip: (value) => isSide(value?.low) && isSide(value.high) && isSwitch(value.on)
    && isNumber(value.angle) && isNumber(value.place) && value.thickness > 0,
  pose: (value) => isPoint(value?.target) && value.distance > 0 && isNumber(value.azimuth) && isNumber(value.elevation)
    && (value.columns === undefined || Number.isInteger(value.columns)),
  points: (value) => isList(value, isPoint),
};

/** The state of a link; null where it was saved for other data, such as those of an earlier file of this
 * name, or where it has been edited into one that cannot be shown. */
function stateToRestore(saved) {
  const scene = Number.isInteger(saved.scene) ? manifest.scenes[saved.scene] : null;
  if (!scene || saved.fingerprint !== scene.fingerprint) return null;
  const parts = Object.entries(FORMS);
  if (!parts.every(([name, fits]) => fits(saved[name], scene))) return null;
  const kept = Object.fromEntries(parts.map(([name]) => [name, saved[name]]));
  const side = (name) => kept.clip[name].map((x, i) => x ?? scene[name][i]);
  return { ...kept, scene: saved.scene, clip: { ...kept.clip, low: side("low"), high: side("high") } };
}
