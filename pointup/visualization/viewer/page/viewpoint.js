"use strict";
// Where a scene is seen from: a camera in perspective and one in parallel projection.

class Viewpoint {
  constructor(canvas, scene) {
    Object.assign(this, { canvas, scene });
    const [low, high] = [scene.low, scene.high].map((end) => new THREE.Vector3(...end));
    this.middle = low.clone().add(high).divideScalar(2);
    this.radius = low.distanceTo(high) / 2 || 1; // of a single point, 1
    this.up = scene.up === "z" ? new THREE.Vector3(0, 0, 1) : new THREE.Vector3(0, 1, 0);
    this.perspective = new THREE.PerspectiveCamera(45, 1);
    this.orthographic = new THREE.OrthographicCamera();
    for (const camera of [this.perspective, this.orthographic]) camera.up.copy(this.up);
    this.camera = this.perspective;
    this.controls = new THREE.OrbitControls(this.camera, canvas);
    Object.assign(this.controls, { enableDamping: false, screenSpacePanning: true, maxPolarAngle: Math.PI });
    this.controls.addEventListener("change", () => this.moved());
  }

  /** Camera for a panel; its near and far plane enclose the whole scene. */
  aim({ width, height }) {
    const { camera, controls, middle: centre, radius } = this;
    const distance = camera.position.distanceTo(controls.target);
    const middle = camera.position.distanceTo(centre);
    if (camera.isPerspectiveCamera) {
      camera.aspect = width / height;
      camera.near = Math.max(middle - 1.5 * radius, distance / 100);
    } else {
      const half = distance * Math.tan(Math.PI / 8);
      Object.assign(camera, { top: half, bottom: -half, right: (half * width) / height, left: (-half * width) / height });
      camera.near = middle - 2.5 * radius;
    }
    camera.far = middle + 2.5 * radius;
    camera.updateProjectionMatrix();
    camera.updateMatrixWorld();
    this.zoom = camera.isPerspectiveCamera
      ? height / (2 * Math.tan(Math.PI / 8)) : (height * camera.zoom) / (camera.top - camera.bottom);
  }

  /** Where the camera looks from: azimuth and elevation in degrees, distance, target. */
  get pose() {
    const offset = this.camera.position.clone().sub(this.controls.target);
    const distance = offset.length() / (this.camera.zoom || 1);
    const [east, north, upwards] = this.scene.up === "z" ? [offset.x, offset.y, offset.z] : [offset.x, -offset.z, offset.y];
    return {
      target: this.controls.target.toArray(), distance, columns: this.columns,
      azimuth: (Math.atan2(east, -north) * 180) / Math.PI,
      elevation: (Math.asin(Math.min(Math.max(upwards / offset.length(), -1), 1)) * 180) / Math.PI,
    };
  }

  set pose({ target, distance, azimuth, elevation, columns = 0 }) {
    this.columns = columns;
    const [a, e] = [(azimuth * Math.PI) / 180, (Math.min(Math.max(elevation, -89.99), 89.99) * Math.PI) / 180];
    const [east, north, upwards] = [Math.sin(a) * Math.cos(e), -Math.cos(a) * Math.cos(e), Math.sin(e)];
    const offset = this.scene.up === "z" ? [east, north, upwards] : [east, upwards, -north];
    this.controls.target.set(...target);
    this.camera.zoom = 1;
    this.camera.position.set(...target).add(new THREE.Vector3(...offset).multiplyScalar(distance));
    this.controls.update();
    this.moved();
  }

  /** Look at everything from an azimuth and elevation in degrees. Without them, obliquely: at a
   * survey from its longer side, and from the height that fills the panels better. */
  look(azimuth, elevation) {
    const [east, north] = this.scene.high.map((x, i) => x - this.scene.low[i]);
    const side = north > east ? 110 : 20;
    const oblique = this.scene.up === "z" ? [[side, 15], [side, 45]] : [[25, 20]];
    const views = azimuth === undefined ? oblique : [[azimuth, elevation]];
    this.pose = views.map((view) => this.fitted(...view)).reduce((a, b) => (b.filled > a.filled ? b : a)).pose;
  }

  /** A pose from a direction and an arrangement of the panels such that the points are drawn as large
   * as possible, below the captions, and the share of the canvas that they span. */
  fitted(azimuth, elevation) {
    const { middle } = this;
    this.pose = { target: middle.toArray(), distance: this.radius, azimuth, elevation };
    this.camera.updateMatrixWorld();
    const axes = [0, 1, 2].map((i) => new THREE.Vector3().setFromMatrixColumn(this.camera.matrixWorld, i));
    const places = this.clouds.flatMap((cloud) => cloud.sample(2000))
      .map((point) => axes.map((axis) => axis.dot(point) - axis.dot(middle)));
    const depth = this.camera.isPerspectiveCamera ? 1 : 0;
    const tangent = Math.tan(Math.PI / 8);
    const fits = this.clouds.map((_, i) => {
      this.columns = i + 1;
      const { width, height } = this.layout()[0];
      // Tangents of the angles from the line of sight to the edges, without a margin and the captions.
      const edge = (size, margin) => (tangent * Math.max(size - 2 * margin, 0.4 * size)) / height;
      const [right, left, up, down] = [edge(width, 18), edge(width, 18), edge(height, 54), edge(height, 14)];
      const spans = [[0, right, left], [1, up, down]].map(([axis, above, below]) => {
        const high = Math.max(...places.map((place) => place[axis] + above * depth * place[2]));
        const low = Math.min(...places.map((place) => place[axis] - below * depth * place[2]));
        return { high, low, above, below, distance: (high - low) / (above + below) };
      });
      const distance = Math.max(...spans.map((span) => span.distance), 0.01 * this.radius);
      const target = middle.clone();
      spans.forEach(({ high, low, above, below }, axis) =>
        target.addScaledVector(axes[axis], (high - above * distance + low + below * distance) / 2));
      const empty = (i + 1) * Math.ceil(this.clouds.length / (i + 1)) - this.clouds.length;
      const filled = spans.reduce((share, span) => share * (span.distance / distance), width * height);
      return { pose: { target: target.toArray(), distance, azimuth, elevation, columns: i + 1 }, size: height / distance, empty, filled };
    });
    // The largest one; of equal ones, that with the fewest empty panels, and then that with most columns.
    return fits.reduce((a, b) => (b.size > 1.01 * a.size || (b.size >= 0.99 * a.size && b.empty <= a.empty) ? b : a));
  }

  useCamera(kind) {
    const pose = this.pose;
    this.camera = kind === "parallel" ? this.orthographic : this.perspective;
    this.controls.object = this.camera;
    this.pose = pose;
  }

  turn(angle) {
    const offset = this.camera.position.clone().sub(this.controls.target);
    offset.applyAxisAngle(this.up, angle);
    this.camera.position.copy(this.controls.target).add(offset);
    this.camera.lookAt(this.controls.target);
  }
}
