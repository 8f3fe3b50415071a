"use strict";
// Draws clouds into the panels of the canvas, with one camera for all of them.

const TARGET_SECONDS = 1 / 30;
const POINTS_PER_PIXEL = 1.5;
const MAX_DRAWN = 6e6;
// In motion, slow machines draw fewer pixels: shares of the resolution at rest.
const SCALES = [1, 0.7, 0.5, 0.35];

function makeRenderer(canvas) {
  try {
    return new THREE.WebGLRenderer({ canvas, antialias: false, preserveDrawingBuffer: true });
  } catch (error) {
    throw new Error(`It needs WebGL 2, which this browser lacks or has switched off (${error.message})`, { cause: error });
  }
}

class Stage extends Viewpoint {
  constructor(canvas, scene) {
    super(canvas, scene);
    Object.assign(this, { clouds: [], budget: 5e5, coarse: 0, panels: [], listeners: [] });
    this.renderer = Stage.renderer ??= makeRenderer(canvas);
    this.renderer.autoClear = false;
    this.options = { size: 1, shading: 0.5, dark: true, mode: "side", share: 0.5, turning: false };
    this.clip = { low: [...scene.low], high: [...scene.high], on: false, angle: 0, place: 0, thickness: 1 };
    this.targets = [this.makeTarget(), this.makeTarget()];
    this.makeScreen();
    this.frameTimes = [];
    this.lastMove = 0;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(canvas.parentElement);
    this.resize();
  }

  /** Give the memory of the graphics card back, before another scene opens. */
  dispose() {
    this.closed = true;
    this.controls.dispose();
    this.observer.disconnect();
    for (const target of this.targets) target.dispose();
    for (const material of Object.values(this.programs)) material.dispose();
    this.screen.geometry.dispose();
    for (const cloud of this.clouds) {
      cloud.nodes.forEach((node) => node.mesh.geometry.dispose());
      cloud.table.dispose();
      cloud.material.dispose();
    }
  }

  makeTarget() {
    const target = new THREE.WebGLRenderTarget(4, 4, { magFilter: THREE.NearestFilter, minFilter: THREE.NearestFilter });
    target.depthTexture = new THREE.DepthTexture(4, 4, THREE.UnsignedIntType);
    return target;
  }

  /** A triangle over the whole panel, and what its programs have in common. */
  makeScreen() {
    const [a, b] = this.targets;
    this.shared = Object.fromEntries(Object.entries({
      colorA: a.texture, depthA: a.depthTexture, colorB: b.texture, depthB: b.depthTexture, share: 0,
      strength: 0, near: 0.1, far: 1, reach: 1, step: 1, sky: new THREE.Color(), ground: new THREE.Color(),
    }).map(([name, value]) => [name, { value }]));
    this.programs = {};
    const geometry = new THREE.BufferGeometry();
    geometry.setAttribute("position", new THREE.BufferAttribute(new Float32Array([-1, -1, 0, 3, -1, 0, -1, 3, 0]), 3));
    this.screen = new THREE.Mesh(geometry);
    this.screen.frustumCulled = false;
    this.screenScene = new THREE.Scene();
    this.screenScene.add(this.screen);
  }

  program(mode, taps, perspective) {
    return (this.programs[[mode, taps, perspective]] ??= new THREE.RawShaderMaterial({
      glslVersion: THREE.GLSL3, vertexShader: SCREEN_VERTEX, fragmentShader: SCREEN_FRAGMENT,
      depthTest: false, depthWrite: false, blending: THREE.NoBlending, uniforms: this.shared,
      defines: { MODE: mode, TAPS: taps, PERSPECTIVE: perspective },
    }));
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas.parentElement;
    this.fullRatio = Math.min(window.devicePixelRatio || 1, 2);
    this.ratio = 0;
    this.renderer.setSize(Math.max(clientWidth, 1), Math.max(clientHeight, 1), false);
    this.useRatio(this.fullRatio);
    this.invalidate();
  }

  /** Draw with this many pixels for each CSS pixel. */
  useRatio(ratio) {
    if (ratio === this.ratio) return;
    this.ratio = ratio;
    this.renderer.setPixelRatio(ratio);
  }

  /** The panels, in CSS pixels from the upper left corner, and the groups of clouds in them. */
  layout() {
    const shown = this.clouds.filter((cloud) => cloud.visible);
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const { mode, share } = this.options;
    const whole = { x: 0, y: 0, width, height };
    if (mode === "side" && shown.length > 1) {
      const columns = Math.min(this.columns || shown.length, shown.length);
      const [across, along] = [width / columns, height / Math.ceil(shown.length / columns)];
      return shown.map((cloud, i) => ({
        x: (i % columns) * across, y: Math.floor(i / columns) * along, width: across, height: along, groups: [[cloud]], blend: 0,
      }));
    }
    if ((mode === "fade" || mode === "swipe") && shown.length > 1) {
      // The slider passes through all clouds: with three of them, the second is in its middle.
      const along = share * (shown.length - 1);
      const first = Math.min(Math.floor(along), shown.length - 2);
      const pair = mode === "fade" ? [[shown[first]], [shown[first + 1]]] : [[shown.at(-1)], [shown[0]]];
      return [{ ...whole, groups: pair, blend: mode === "fade" ? 1 : 2, share: mode === "fade" ? along - first : share }];
    }
    return [{ ...whole, groups: [shown], blend: 0 }];
  }

  moved() {
    this.lastMove = performance.now();
    this.invalidate();
  }

  invalidate() {
    if (this.requested) return;
    this.requested = true;
    requestAnimationFrame((now) => this.frame(now));
  }

  frame(now) {
    this.requested = false;
    if (this.closed) return;
    const moving = this.options.turning || now - this.lastMove < 200;
    if (this.options.turning) this.turn(0.6 * Math.min((now - (this.lastFrame ?? now)) / 1000, 0.1));
    if (moving && this.wasMoving) this.adapt((now - this.lastFrame) / 1000);
    this.wasMoving = moving;
    this.lastFrame = now;
    this.resting = moving ? this.budget : Math.min(2 * (this.resting ?? this.budget), MAX_DRAWN);
    this.useRatio(this.fullRatio * (moving ? SCALES[this.coarse] : 1));
    this.fits = this.draw(this.resting, !moving);
    for (const listener of this.listeners) listener(moving);
    if (moving || (!this.fits && this.resting < MAX_DRAWN)) this.invalidate();
  }

  /** Fit the numbers of points and of pixels in motion to the time that frames take. */
  adapt(seconds) {
    if (seconds <= 0) return;
    this.frameTimes.push(seconds);
    if (this.frameTimes.length > 20) this.frameTimes.shift();
    const factor = Math.min(Math.max(TARGET_SECONDS / seconds, 0.7), 1.1);
    this.budget = Math.min(Math.max(this.budget * factor, 1e5), MAX_DRAWN);
    const recent = this.frameTimes.slice(-4).reduce((sum, time) => sum + time, 0) / 4;
    const next = recent > 2 * TARGET_SECONDS && this.budget < 3e5 ? 1 : recent < TARGET_SECONDS / 1.5 && this.budget > 1e6 ? -1 : 0;
    if (this.frameTimes.length < 4 || !next || !SCALES[this.coarse + next]) return;
    this.coarse += next;
    this.frameTimes = [];
  }

  get framesPerSecond() {
    const total = this.frameTimes.reduce((sum, time) => sum + time, 0);
    return total ? this.frameTimes.length / total : 0;
  }

  draw(budget, fine = true) {
    this.fine = fine;
    this.panels = this.layout();
    this.renderer.setRenderTarget(null);
    // Where the panels leave a gap, the colour of the page; drawn points differ from it by their depth.
    this.renderer.setClearColor(this.options.dark ? "#12161b" : "#eef0f3");
    this.renderer.clear();
    let fits = true;
    const shown = this.panels.flatMap((panel) => panel.groups.flat());
    for (const panel of this.panels) {
      this.aim(panel);
      const share = panel.groups.flat().length / Math.max(shown.length, 1);
      fits = this.choose(panel.groups.flat(), budget * share) && fits;
      panel.groups.forEach((group, i) => this.drawGroup(group, this.targets[i], panel));
      this.compose(panel);
    }
    return fits;
  }

  /** How many points of each node are drawn: as many as its pixels need, within the budget. */
  choose(clouds, budget) {
    const { camera } = this;
    const frustum = new THREE.Frustum().setFromProjectionMatrix(
      new THREE.Matrix4().multiplyMatrices(camera.projectionMatrix, camera.matrixWorldInverse));
    const slice = this.slice();
    let wanted = 0;
    for (const cloud of clouds) {
      for (const node of cloud.nodes) {
        node.wanted = 0;
        if (!frustum.intersectsSphere(node.sphere) || !this.mayShow(node, slice)) continue;
        const distance = Math.max(camera.position.distanceTo(node.center) - node.sphere.radius, camera.near);
        const scale = this.ratio * (camera.isPerspectiveCamera ? this.zoom / distance : this.zoom);
        const sides = [node.size.x, node.size.y, node.size.z].sort((a, b) => b - a);
        const pixels = sides[0] * scale * Math.max(sides[1] * scale, 1); // a line has no area
        // In a cross-section a few of a node's points are inside it; all are needed.
        node.wanted = this.clip.on ? node.count : Math.min(node.count, Math.ceil(POINTS_PER_PIXEL * pixels) + 16);
        wanted += node.wanted;
      }
    }
    const part = Math.min(1, budget / Math.max(wanted, 1));
    for (const cloud of clouds) {
      cloud.drawn = 0;
      for (const node of cloud.nodes) {
        node.drawn = Math.ceil(node.wanted * part);
        node.mesh.visible = node.drawn > 0;
        node.mesh.geometry.setDrawRange(0, node.drawn);
        node.grow = node.drawn ? Math.min(Math.sqrt(node.count / node.drawn), 4) : 1;
        cloud.drawn += node.drawn;
      }
    }
    return part >= 1;
  }

  /** Normal and position of the cross-section; its half thickness is huge when it is off. */
  slice() {
    const { on, angle, place, thickness } = this.clip;
    const [sin, cos] = [Math.sin((angle * Math.PI) / 180), Math.cos((angle * Math.PI) / 180)];
    const normal = this.scene.up === "z" ? [-sin, cos, 0] : [sin, 0, cos];
    return { normal: new THREE.Vector3(...normal), place, half: on ? thickness / 2 : 1e30 };
  }

  /** The clipping box; a side at the end of the scene is far away, as stored points are rounded. */
  box() {
    const { clip, scene } = this;
    return {
      low: clip.low.map((x, i) => (x <= scene.low[i] ? -1e30 : x)),
      high: clip.high.map((x, i) => (x >= scene.high[i] ? 1e30 : x)),
    };
  }

  mayShow(node, { normal, place, half }) {
    const { low, high } = this.box();
    const axes = ["x", "y", "z"];
    if (axes.some((axis, i) => node.low[axis] > high[i] || node.low[axis] + node.size[axis] < low[i])) return false;
    return Math.abs(normal.dot(node.center) - place) <= half + node.sphere.radius;
  }

  drawGroup(clouds, target, { width, height }) {
    const [columns, rows] = [Math.max(1, Math.round(width * this.ratio)), Math.max(1, Math.round(height * this.ratio))];
    if (target.width !== columns || target.height !== rows) target.setSize(columns, rows);
    this.renderer.setRenderTarget(target);
    this.renderer.clear();
    const { normal, place, half } = this.slice();
    const { low, high } = this.box();
    for (const cloud of clouds) {
      const { uniforms } = cloud.material;
      uniforms.size.value = 1.1 * cloud.layer.spacing * this.options.size;
      uniforms.zoom.value = this.zoom * this.ratio;
      uniforms.smallest.value = 1.5 * this.ratio * Math.sqrt(this.options.size);
      uniforms.perspective.value = Boolean(this.camera.isPerspectiveCamera);
      uniforms.boxLow.value.set(...low);
      uniforms.boxHigh.value.set(...high);
      uniforms.slice.value.set(normal.x, normal.y, normal.z, place);
      uniforms.sliceHalf.value = half;
      this.renderer.render(cloud.group, this.camera);
    }
  }

  compose(panel) {
    const uniforms = this.shared;
    const { shading, dark } = this.options;
    const taps = shading > 0 ? (this.fine ? 16 : 4) : 0;
    this.screen.material = this.program(panel.blend, taps, Number(this.camera.isPerspectiveCamera === true));
    uniforms.share.value = panel.share ?? 0;
    uniforms.strength.value = shading * 2;
    uniforms.step.value = this.ratio;
    uniforms.near.value = this.camera.near;
    uniforms.far.value = this.camera.far;
    // In parallel projection, depths are relative to the height of the view.
    uniforms.reach.value = this.zoom / panel.height;
    const [sky, ground] = dark ? ["#20262e", "#12161b"] : ["#ffffff", "#eef0f3"];
    uniforms.sky.value.set(sky).convertLinearToSRGB();
    uniforms.ground.value.set(ground).convertLinearToSRGB();
    this.renderer.setRenderTarget(null);
    const bottom = this.canvas.clientHeight - panel.y - panel.height;
    this.renderer.setViewport(panel.x, bottom, panel.width, panel.height);
    this.renderer.setScissor(panel.x, bottom, panel.width, panel.height);
    this.renderer.setScissorTest(true);
    this.renderer.render(this.screenScene, this.camera);
    this.renderer.setScissorTest(false);
    this.renderer.setViewport(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
  }
}
