"use strict";
// Where a scene is seen from: a camera in perspective and one in parallel projection.

class Viewpoint {
  constructor(canvas, scene) {
    Object.assign(this, { canvas, scene });
    this.radius = Math.max(new THREE.Vector3(...scene.high).sub(new THREE.Vector3(...scene.low)).length() / 2, 1e-6);
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
    const { camera, controls, radius } = this;
    const distance = camera.position.distanceTo(controls.target);
    const middle = camera.position.length(); // the scene is centred near 0
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

  /** Look at everything from an azimuth and elevation in degrees, with the panels arranged such
   * that it is drawn as large as possible. */
  look(azimuth, elevation) {
    const { low, high } = this.scene;
    const target = low.map((x, i) => (x + high[i]) / 2);
    this.pose = { target, distance: this.radius, azimuth, elevation };
    this.camera.updateMatrixWorld();
    const axes = [0, 1, 2].map((i) => new THREE.Vector3().setFromMatrixColumn(this.camera.matrixWorld, i));
    const corners = [...Array(8).keys()].map((bits) => {
      const corner = new THREE.Vector3(...low.map((x, i) => ((bits >> i) & 1 ? high[i] : x) - target[i]));
      return axes.map((axis) => axis.dot(corner));
    });
    const tangent = Math.tan(Math.PI / 8);
    const fits = this.clouds.map((_, i) => {
      this.columns = i + 1;
      const { width, height } = this.layout()[0];
      const distances = corners.map(([right, up, near]) =>
        Math.max(Math.abs(up), (Math.abs(right) * height) / width) / tangent + (this.camera.isPerspectiveCamera ? near : 0));
      const empty = (i + 1) * Math.ceil(this.clouds.length / (i + 1)) - this.clouds.length;
      return { columns: i + 1, distance: Math.max(...distances), height, empty };
    });
    // The largest one has the least length for each pixel; of equal ones, that with the fewest empty
    // panels, and then that with most columns.
    const best = fits.reduce((a, b) => {
      const share = b.distance / b.height / (a.distance / a.height);
      return share < 0.99 || (share <= 1.01 && b.empty <= a.empty) ? b : a;
    });
    this.pose = { target, distance: 1.06 * best.distance, azimuth, elevation, columns: best.columns };
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
