"use strict";
// A layer on the graphics card: one mesh for each octree node, drawn in part.

class Cloud {
  constructor(layer, scene, color) {
    Object.assign(this, { layer, scene, color, columns: {}, drawn: 0, hidden: [] });
    this.group = new THREE.Scene();
    this.group.matrixWorldAutoUpdate = false;
    this.table = colorTable(new Uint8Array(256 * 4));
    this.material = new THREE.RawShaderMaterial({
      glslVersion: THREE.GLSL3,
      vertexShader: POINT_VERTEX,
      fragmentShader: POINT_FRAGMENT,
      blending: THREE.NoBlending,
      defines: { KIND: KINDS.flat },
      uniforms: Object.fromEntries(
        Object.entries({
          up: scene.up === "z" ? 2 : 1, range: new THREE.Vector2(0, 1), limit: 1, size: 1, zoom: 1,
          flatColor: new THREE.Color(color), table: this.table, smallest: 1.5, grow: 1,
          perspective: true, boxLow: new THREE.Vector3(), boxHigh: new THREE.Vector3(),
          slice: new THREE.Vector4(), sliceHalf: 1e30,
        }).map(([name, value]) => [name, { value }]),
      ),
    });
  }

  async load() {
    const positions = await readBlock(this.layer.positions);
    let start = 0;
    this.nodes = this.layer.nodes.map(([count, x, y, z, dx, dy, dz]) => {
      const geometry = new THREE.BufferGeometry();
      const own = positions.subarray(3 * start, 3 * (start + count));
      geometry.setAttribute("position", new THREE.BufferAttribute(own, 3, true));
      const mesh = new THREE.Points(geometry, this.material);
      mesh.frustumCulled = false;
      mesh.matrixAutoUpdate = false;
      mesh.matrix.makeScale(dx, dy, dz).setPosition(x, y, z);
      mesh.matrixWorld.copy(mesh.matrix);
      const node = { mesh, start, count, drawn: count, wanted: 0, grow: 1 };
      node.low = new THREE.Vector3(x, y, z);
      node.size = new THREE.Vector3(dx, dy, dz);
      node.center = node.low.clone().addScaledVector(node.size, 0.5);
      node.sphere = new THREE.Sphere(node.center, node.size.length() / 2);
      mesh.onBeforeRender = () => {
        this.material.uniforms.grow.value = node.grow;
        this.material.uniformsNeedUpdate = true;
      };
      this.group.add(mesh);
      start += count;
      return node;
    });
    this.positions = positions;
  }

  /** Colour by "height", "layer" or a channel; layers without it get a flat grey. Points of a
   * scalar above `limit` are not drawn. */
  async colorBy(name, range, colormap, hidden, limit, dark) {
    const uniforms = this.material.uniforms;
    const channel = this.scene.channels[name];
    this.hidden = channel?.kind === "category" && this.layer.columns[name] ? hidden : [];
    const missing = dark ? "#6d7681" : "#a7adb5";
    uniforms.flatColor.value.set(name === "layer" ? this.color : missing).convertLinearToSRGB();
    if (name === "height") {
      this.useKind("height");
      uniforms.range.value.set(...range);
      fillTable(this.table, manifest.colormaps[colormap]);
    } else if (name === "layer" || !this.layer.columns[name]) {
      this.useKind("flat");
    } else {
      await this.useColumn(name);
      this.useKind(channel.kind);
      if (channel.kind === "scalar") {
        const span = channel.high - channel.low;
        uniforms.range.value.set(...range.map((end) => (end - channel.low) / span));
        uniforms.limit.value = Math.min((limit - channel.low) / span, 1);
        fillTable(this.table, manifest.colormaps[colormap]);
      } else if (channel.kind === "category") {
        fillCategories(this.table, channel.categories, hidden);
      }
    }
  }

  useKind(kind) {
    if (this.material.defines.KIND === KINDS[kind]) return;
    this.material.defines.KIND = KINDS[kind];
    this.material.needsUpdate = true;
  }

  async useColumn(name) {
    if (this.used === name) return;
    this.columns[name] ??= await readBlock(this.layer.columns[name]);
    const { width } = this.layer.columns[name];
    for (const node of this.nodes) {
      const own = this.columns[name].subarray(width * node.start, width * (node.start + node.count));
      node.mesh.geometry.deleteAttribute("value");
      node.mesh.geometry.setAttribute("value", new THREE.BufferAttribute(own, width, true));
    }
    this.used = name;
  }

  /** Whether the point in a row is not drawn, because of its category or its value. */
  isHidden(row) {
    const kind = this.material.defines.KIND;
    if (kind === KINDS.category) return this.hidden.includes(this.columns[this.used][row]);
    return kind === KINDS.scalar && this.columns[this.used][row] / 65535 > this.material.uniforms.limit.value;
  }

  /** Position of a point of a node, in scene coordinates. */
  place(node, i, into) {
    const at = 3 * (node.start + i);
    into.set(this.positions[at], this.positions[at + 1], this.positions[at + 2]);
    return into.multiplyScalar(1 / 65535).multiply(node.size).add(node.low);
  }

  /** Positions of about `number` points, evenly spaced: the first ones of each node. */
  sample(number) {
    return this.nodes.flatMap((node) => {
      const taken = Math.min(Math.ceil((number * node.count) / this.layer.count), node.count);
      return Array.from({ length: taken }, (_, i) => this.place(node, i, new THREE.Vector3()));
    });
  }

  /** Values of a point in all channels, as text by label. */
  async describe(row) {
    const lines = [];
    for (const [name, column] of Object.entries(this.layer.columns)) {
      const values = (this.columns[name] ??= await readBlock(column));
      const channel = this.scene.channels[name];
      if (channel.kind === "scalar") {
        const span = channel.high - channel.low;
        const value = channel.low + (values[row] / 65535) * span;
        lines.push([channel.label, values[row] ? format(value, channel.unit, span) : "no value"]);
      } else if (channel.kind === "category") {
        const found = channel.categories.find(([value]) => value === values[row]);
        const title = found && found[1] !== String(found[0]) ? `${found[0]} ${found[1]}` : values[row];
        lines.push([channel.label, String(title)]);
      } else {
        lines.push([channel.label, Array.from(values.subarray(3 * row, 3 * row + 3)).join(", ")]);
      }
    }
    return lines;
  }
}

function colorTable(bytes) {
  const texture = new THREE.DataTexture(bytes, 256, 1, THREE.RGBAFormat, THREE.UnsignedByteType);
  texture.needsUpdate = true;
  return texture;
}

function fillTable(texture, colors) {
  const bytes = texture.image.data;
  for (let i = 0; i < 256; i++) {
    bytes.set([colors[3 * i], colors[3 * i + 1], colors[3 * i + 2], 255], 4 * i);
  }
  texture.needsUpdate = true;
}

function fillCategories(texture, categories, hidden) {
  const bytes = texture.image.data;
  categories.forEach(([value, name], number) => {
    const color = new THREE.Color(categoryColor(value, name, number)).convertLinearToSRGB();
    const parts = [color.r, color.g, color.b].map((part) => Math.round(255 * part));
    bytes.set([...parts, hidden.includes(value) ? 0 : 255], 4 * value);
  });
  texture.needsUpdate = true;
}

// Colours that people expect of these classes; all others come from the list.
const CLASS_COLORS = {
  ground: "#b08b5b", "low vegetation": "#b7d96b", "medium vegetation": "#6fbf4a", "high vegetation": "#2f9e56",
  building: "#e4684e", water: "#4a90d9", unclassified: "#a9b2bd", "never classified": "#8a939e", road: "#8c8fa3",
  bridge: "#d9a441", measured: "#8f9aa6", new: "#ff9d3c", "low noise": "#d858c8", "high noise": "#d858c8",
};
const COLORS = ["#4aa3df", "#ff9d3c", "#57c785", "#e4684e", "#b48ae0", "#e3c94b", "#5bd0d0", "#e38ab8"];

function categoryColor(value, name, number) {
  return CLASS_COLORS[name] ?? COLORS[number % COLORS.length];
}
