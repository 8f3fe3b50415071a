"use strict";
// Lines and words over the drawn points: captions, scale bar, measurements, the clipping box.

class Overlay {
  constructor(canvas, stage) {
    Object.assign(this, { canvas, stage, context: canvas.getContext("2d"), measured: [], picked: null });
  }

  draw() {
    const { stage, canvas, context } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    const ratio = stage.fullRatio;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.ink = stage.options.dark ? "#f2f5f8" : "#1d2228";
    this.halo = stage.options.dark ? "rgba(15,18,22,.75)" : "rgba(255,255,255,.8)";
    for (const panel of stage.panels) {
      stage.aim(panel);
      this.drawCaption(panel, width);
      if (stage.boxShown) this.drawBox(panel);
      this.drawMeasured(panel);
    }
    this.drawDividers();
    this.drawScaleBar(height);
  }

  /** Place of a scene point on the canvas in CSS pixels, or null behind the camera. */
  project(point, panel) {
    const seen = point.clone().project(this.stage.camera);
    if (seen.z > 1 || seen.z < -1) return null;
    return [panel.x + ((seen.x + 1) / 2) * panel.width, panel.y + ((1 - seen.y) / 2) * panel.height];
  }

  write(text, x, y, { size = 13, weight = 500, align = "left", faint = false, most = Infinity } = {}) {
    const { context } = this;
    context.font = `${weight} ${size}px system-ui, sans-serif`;
    while (text.length > 1 && context.measureText(text).width > most) text = `${text.replace("…", "").slice(0, -1)}…`;
    context.textAlign = align;
    context.lineWidth = 3;
    context.lineJoin = "round";
    context.strokeStyle = this.halo;
    context.strokeText(text, x, y);
    context.globalAlpha = faint ? 0.72 : 1;
    context.fillStyle = this.ink;
    context.fillText(text, x, y);
    context.globalAlpha = 1;
  }

  drawCaption(panel, width) {
    const [a, b] = panel.groups;
    const name = (group) => group.map((cloud) => cloud.layer.name).join(" + ");
    const top = panel.y + (width < 720 ? 26 : 30);
    // The button that brings the controls back lies in this corner.
    const hasButton = panel.x + panel.width > width - 1 && (document.body.classList.contains("folded") || innerWidth <= 720);
    const right = panel.x + panel.width - (hasButton ? 64 : 18);
    // A longer name would run into the next one.
    const most = b ? (right - panel.x - 100) / 2 : right - panel.x - 18;
    if (!b) {
      const total = a.reduce((sum, cloud) => sum + cloud.layer.total, 0);
      this.write(name(a), panel.x + 18, top, { size: 16, weight: 650, most });
      if (a.length) this.write(`${total.toLocaleString("en")} points`, panel.x + 18, top + 19, { faint: true });
      return;
    }
    const [before, after] = panel.blend === 2 ? [b, a] : [a, b];
    this.write(name(before), panel.x + 18, top, { size: 16, weight: 650, most });
    this.write(name(after), right, top, { size: 16, weight: 650, align: "right", most });
    if (panel.blend === 1) {
      const text = `${Math.round(100 * (1 - panel.share))} % / ${Math.round(100 * panel.share)} %`;
      this.write(text, panel.x + panel.width / 2, top, { faint: true, align: "center" });
    }
  }

  drawDividers() {
    const { context, stage } = this;
    context.fillStyle = stage.options.dark ? "rgba(255,255,255,.16)" : "rgba(0,0,0,.14)";
    for (const panel of stage.panels) {
      if (panel.y) context.fillRect(panel.x, Math.round(panel.y) - 0.5, panel.width, 1);
      if (panel.x) context.fillRect(Math.round(panel.x) - 0.5, panel.y, 1, panel.height);
    }
    const [panel] = stage.panels;
    if (panel?.blend === 2) {
      context.fillStyle = this.ink;
      context.fillRect(panel.x + panel.share * panel.width - 1, 0, 2, panel.height);
    }
  }

  /** A bar of a round length, true at the distance of the point that the camera turns about. */
  drawScaleBar(height) {
    const { stage, context } = this;
    const distance = stage.camera.position.distanceTo(stage.controls.target);
    const pixels = stage.camera.isPerspectiveCamera ? stage.zoom / distance : stage.zoom;
    const longest = 130 / pixels;
    const power = 10 ** Math.floor(Math.log10(longest));
    const length = [5, 2, 1].map((step) => step * power).find((step) => step <= longest) ?? power;
    const end = 18 + length * pixels;
    for (const [color, wide] of [[this.halo, 4], [this.ink, 1.5]]) {
      context.strokeStyle = color;
      context.lineWidth = wide;
      context.beginPath();
      context.moveTo(18, height - 22);
      context.lineTo(18, height - 16);
      context.lineTo(end, height - 16);
      context.lineTo(end, height - 22);
      context.stroke();
    }
    this.write(format(length, stage.scene.unit), 18, height - 26, { size: 12 });
  }

  drawBox(panel) {
    const { low, high } = this.stage.clip;
    const corner = (i) => new THREE.Vector3(i & 1 ? high[0] : low[0], i & 2 ? high[1] : low[1], i & 4 ? high[2] : low[2]);
    const corners = [...Array(8).keys()].map((i) => this.project(corner(i), panel));
    for (let i = 0; i < 8; i++) {
      for (const bit of [1, 2, 4]) if (!(i & bit)) this.line(corners[i], corners[i | bit], 1);
    }
  }

  line(from, to, width = 2, color = "#ffcf5c") {
    if (!from || !to) return;
    const { context } = this;
    context.strokeStyle = color;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(...from);
    context.lineTo(...to);
    context.stroke();
  }

  mark(place, color = "#ffcf5c") {
    if (!place) return;
    const { context } = this;
    context.beginPath();
    context.arc(...place, 5, 0, 7);
    context.fillStyle = color;
    context.fill();
    context.strokeStyle = "#14181d";
    context.lineWidth = 1.5;
    context.stroke();
  }

  drawMeasured(panel) {
    const { measured, stage } = this;
    const places = measured.map((point) => this.project(point, panel));
    for (let i = 1; i < places.length; i++) {
      this.line(places[i - 1], places[i]);
      if (!places[i - 1] || !places[i]) continue;
      const middle = [0, 1].map((axis) => (places[i - 1][axis] + places[i][axis]) / 2);
      const length = measured[i].distanceTo(measured[i - 1]);
      this.write(format(length, stage.scene.unit), middle[0] + 8, middle[1] - 8, { weight: 650 });
    }
    for (const place of places) this.mark(place);
    if (this.picked) this.mark(this.project(this.picked, panel), "#ffffff");
  }
}
