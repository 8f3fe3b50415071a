"use strict";
// Tools: the point under the pointer, screenshots.

const PICK_PIXELS = 9;

/** The drawn point that is nearest to the viewer within 9 pixels of (x, y), or null. */
function pick(stage, x, y) {
  const panel = stage.panels.find((each) => x >= each.x && x < each.x + each.width && y >= each.y && y < each.y + each.height);
  if (!panel) return null;
  stage.aim(panel);
  for (const clouds of cloudsToPick(panel, x)) {
    const found = pickFrom(clouds, stage, panel, x, y);
    if (found) return found;
  }
  return null;
}

/** Lists of clouds that a click at x may pick from; one is asked where those before it have no point. */
function cloudsToPick({ groups, blend, share, x: left, width }, x) {
  const [a, b] = groups;
  if (blend === 2) return [(x - left) / width < share ? b : a];
  if (blend !== 1 || share === 0.5) return [groups.flat()];
  // Of two clouds that fade, the one that is better seen comes first; one without a share is invisible.
  const order = share < 0.5 ? [a, b] : [b, a];
  return share > 0 && share < 1 ? order : order.slice(0, 1);
}

function pickFrom(clouds, stage, panel, x, y) {
  const at = [((x - panel.x) / panel.width) * 2 - 1, 1 - ((y - panel.y) / panel.height) * 2];
  const [reachX, reachY] = [(2 * PICK_PIXELS) / panel.width, (2 * PICK_PIXELS) / panel.height];
  const matrix = new THREE.Matrix4().multiplyMatrices(stage.camera.projectionMatrix, stage.camera.matrixWorldInverse);
  const { normal, place, half } = stage.slice();
  const { low, high } = stage.box();
  const outside = (p) => p.x < low[0] || p.x > high[0] || p.y < low[1] || p.y > high[1] || p.z < low[2] || p.z > high[2]
    || Math.abs(normal.dot(p) - place) > half;
  let best = null;
  const world = new THREE.Vector3();
  for (const cloud of clouds) {
    for (const node of cloud.nodes) {
      if (!node.drawn) continue;
      // Positions in 16 bits go straight to clip coordinates.
      const own = new THREE.Matrix4().makeScale(node.size.x / 65535, node.size.y / 65535, node.size.z / 65535);
      const e = own.setPosition(node.low).premultiply(matrix).elements;
      for (let i = 0, p = 3 * node.start; i < node.drawn; i++, p += 3) {
        const [u, v, w] = [cloud.positions[p], cloud.positions[p + 1], cloud.positions[p + 2]];
        const scale = e[3] * u + e[7] * v + e[11] * w + e[15];
        if (scale <= 0) continue;
        const dx = (e[0] * u + e[4] * v + e[8] * w + e[12]) / scale - at[0];
        if (dx > reachX || dx < -reachX) continue;
        const dy = (e[1] * u + e[5] * v + e[9] * w + e[13]) / scale - at[1];
        if (dy > reachY || dy < -reachY) continue;
        const away = (dx / reachX) ** 2 + (dy / reachY) ** 2;
        if (away > 1) continue;
        // In front first, and of points at about the same depth the one nearest to the pointer.
        const depth = (e[2] * u + e[6] * v + e[10] * w + e[14]) / scale + 0.002 * away;
        if (best && depth >= best.depth) continue;
        if (cloud.isHidden(node.start + i)) continue;
        if (outside(cloud.place(node, i, world))) continue;
        best = { cloud, depth, row: node.start + i, position: world.clone() };
      }
    }
  }
  return best;
}

/** A picture of what is seen, with captions and the legend, as a file. */
function saveScreenshot(stage, overlay, legend) {
  stage.useRatio(stage.fullRatio);
  stage.draw(MAX_DRAWN);
  overlay.draw();
  const picture = document.createElement("canvas");
  const { width, height } = overlay.canvas;
  Object.assign(picture, { width, height });
  const context = picture.getContext("2d");
  context.fillStyle = stage.options.dark ? "#171b21" : "#fbfcfd";
  context.fillRect(0, 0, width, height);
  context.drawImage(stage.canvas, 0, 0);
  context.drawImage(overlay.canvas, 0, 0);
  drawLegend(context, legend, overlay);
  const link = document.createElement("a");
  link.download = `${manifest.title.replace(/[^\w.-]+/g, "_") || "pointup"}.png`;
  link.href = picture.toDataURL("image/png");
  link.click();
}

/** The legend in lines that end in the lower right corner. */
function drawLegend(context, { label, colors, low, high, items, lines }, { canvas, stage, ink }) {
  context.setTransform(stage.ratio, 0, 0, stage.ratio, 0, 0);
  Object.assign(context, { font: "12.5px system-ui, sans-serif", textAlign: "right" });
  let y = canvas.clientHeight - 20;
  let right = canvas.clientWidth - 18;
  const write = (text, more = 0) => {
    const { width } = context.measureText(text);
    // Further left is the scale bar.
    if (right - width - more < 160) [right, y] = [canvas.clientWidth - 18, y - 18];
    context.fillStyle = ink;
    context.fillText(text, right, y);
    right -= width + 12;
  };
  [...lines].reverse().forEach((text) => write(text));
  if (colors) {
    write(high, 240);
    for (let i = 0; i < 170; i++) {
      const at = 3 * Math.floor((i / 170) * 256);
      context.fillStyle = `rgb(${colors.slice(at, at + 3).join(",")})`;
      context.fillRect(right - 170 + i, y - 9, 1.5, 9);
    }
    right -= 182;
    write(low);
  }
  for (const [color, name] of [...(items ?? [])].reverse()) {
    write(name, 20);
    context.fillStyle = color;
    context.fillRect(right - 6, y - 10, 12, 12);
    right -= 20;
  }
  write(label);
}
