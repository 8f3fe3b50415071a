"use strict";
// The link that restores a view: the state of the page as the part of its address after "#".

function toHash(state) {
  return `#view=${encodeURIComponent(JSON.stringify(state, (_, value) =>
    typeof value === "number" ? Number(value.toPrecision(7)) : value))}`;
}

/** The state in a link; null where there is none. */
function fromHash(hash) {
  const match = /^#view=(.+)$/.exec(hash);
  if (!match) return null;
  try {
    return JSON.parse(decodeURIComponent(match[1]));
  } catch {
    return null; // an address that was cut; the view opens as it is
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

/** The state of a link; null where it was saved for other data, such as those of an earlier file of this name. */
function stateToRestore(saved) {
  const scene = manifest.scenes[saved.scene];
  if (!scene || saved.fingerprint !== scene.fingerprint) return null;
  const { fingerprint, ...kept } = saved;
  const side = (name) => kept.clip[name].map((x, i) => x ?? scene[name][i]);
  return { ...kept, clip: { ...kept.clip, low: side("low"), high: side("high") } };
}
