"use strict";
// Reads the points that the page holds: base64 text of deflated arrays, byte plane by byte plane.

const manifest = JSON.parse(document.getElementById("manifest").textContent);

/** Values of a block: Uint8Array or Uint16Array, `width` values for each point. */
async function readBlock({ block, bytes, width }) {
  const element = document.getElementById(`block${block}`);
  const packed = fromBase64(element.textContent);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = planes.length / bytes;
  const count = length / width;
  const values = bytes === 2 ? new Uint16Array(length) : new Uint8Array(length);
  // In the file, all x come before all y; the graphics card wants x, y, z of each point together.
  for (let axis = 0; axis < width; axis++) {
    let from = axis * count;
    for (let to = axis; to < length; to += width, from++) {
      values[to] = bytes === 2 ? planes[from] | (planes[length + from] << 8) : planes[from];
    }
  }
  return values;
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const values = new Uint8Array(binary.length);
  for (let i = 0; i < values.length; i++) values[i] = binary.charCodeAt(i);
  return values;
}

/**
 * A number with its unit: with three or four significant digits, or with as many decimals as tell
 * the values of a smaller `span` apart, such as heights from 1650.1 to 1650.9.
 */
function format(value, unit = "", span = Math.abs(value)) {
  const size = Math.abs(value);
  let text;
  if (size === 0) text = "0";
  else if (span > 0 && span < size) {
    const decimals = Math.min(Math.max(2 - Math.floor(Math.log10(span)), 0), 20);
    text = value.toLocaleString("en", { maximumFractionDigits: decimals, useGrouping: size >= 10000 });
  }
  else if (size >= 10000) text = Math.round(value).toLocaleString("en");
  else if (size < 0.001) text = value.toExponential(1);
  else text = String(Number(value.toPrecision(size >= 1000 ? 4 : 3)));
  return unit ? `${text} ${unit}` : text;
}
