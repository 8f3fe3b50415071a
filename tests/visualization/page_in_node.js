// Runs the scripts of the viewer in Node.js: all of them, with a document and a graphics card that
// do nothing. Reads a list of pages in JSON: {page, scripts, manifest, blocks, hash, webgl, hide, script}, where
// `page` is the folder of the scripts and `hide` lists names that are not known. Prints in JSON what the `script`
// of each page, the body of an async function, returns.
"use strict";
const fs = require("fs");
const vm = require("vm");

/** An object whose unknown properties are functions that do nothing and return such an object. */
function nothing(known = {}) {
  return new Proxy(known, {
    get: (target, name) => (name in target || typeof name === "symbol" ? target[name] : () => nothing()),
  });
}

class Element {
  constructor() {
    Object.assign(this, { style: {}, dataset: {}, children: [], clientWidth: 400, clientHeight: 300, textContent: "", value: "" });
    this.classList = nothing({ toggle: () => false });
    this.attributes = {};
  }
  get ownerDocument() { return this; }
  get parentElement() { return (this.parent ??= new Element()); }
  get firstElementChild() { return (this.first ??= new Element()); }
  get previousElementSibling() { return (this.previous ??= new Element()); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener() {}
  removeEventListener() {}
  getRootNode() { return this; }
  remove() { this.removed = true; }
  getContext(kind) {
    if (kind !== "2d") return null; // no WebGL
    return nothing({ createImageData: (width) => ({ data: new Uint8ClampedArray(4 * width) }) });
  }
}

const scripts = {};
const scriptOf = (path) => (scripts[path] ??= new vm.Script(fs.readFileSync(path, "utf8")));

async function resultOf(asked) {
  const elements = { manifest: { textContent: JSON.stringify(asked.manifest) } };
  asked.blocks.forEach((text, i) => (elements[`block${i}`] = { textContent: text }));
  const listeners = {};
  const context = {
    console: { log() {}, warn() {}, error() {} }, performance, setTimeout: (run) => void run(), clearTimeout() {}, requestAnimationFrame() {},
    Blob, Response, DecompressionStream, atob, innerWidth: 1000, devicePixelRatio: 1, navigator: {},
    ResizeObserver: class { observe() {} disconnect() {} },
    location: { protocol: "file:", hash: asked.hash, href: `file:///view.html${asked.hash}` },
    history: { replaceState: (_, __, address) => (context.location.hash = address.replace(/^[^#]*/, "")) },
    addEventListener: (name, listen) => (listeners[name] = listen),
    document: {
      body: new Element(), addEventListener() {}, getElementById: (id) => (elements[id] ??= new Element()),
      createElement: () => new Element(), createElementNS: () => new Element(),
    },
    listeners,
  };
  for (const name of asked.hide) delete context[name];
  Object.assign(context, { window: context, self: context, globalThis: context });
  vm.createContext(context);
  const run = (name) => scriptOf(`${asked.page}/${name}`).runInContext(context);
  run("vendor/three.min.js");
  for (const name of asked.scripts) {
    // In place of a graphics card.
    if (name === "main.js" && asked.webgl) {
      context.renderer = nothing();
      vm.runInContext("Stage.renderer = renderer;", context);
    }
    run(name);
  }
  for (let i = 0; i < 200 && !context.document.body.dataset.ready && !elements.loading?.first?.textContent; i++) {
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
  return (await vm.runInContext(`(async () => { ${asked.script} })()`, context)) ?? null;
}

// Errors at the start are stated on the page, which `script` looks at.
process.on("unhandledRejection", () => {});
async function main() {
  const results = [];
  for (const asked of JSON.parse(fs.readFileSync(0, "utf8"))) results.push(await resultOf(asked));
  process.stdout.write(JSON.stringify(results));
}
main().catch((error) => { process.stderr.write(`${error.stack}\n`); process.exitCode = 1; });
