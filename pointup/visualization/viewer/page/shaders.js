"use strict";
// Programs of the graphics card: drawing of points, and shading of the drawn picture by depth.

const KINDS = { flat: 0, height: 1, scalar: 2, category: 3, rgb: 4 };

const POINT_VERTEX = `precision highp float; precision highp int;
in vec3 position;      // 0 to 1 within the bounding box of the octree node
in vec4 value;         // 0 to 1: a scalar (0: none), a category / 255, or a colour
uniform mat4 modelMatrix, viewMatrix, projectionMatrix;
uniform int up;
uniform vec2 range;    // of heights, or of scalars from 0 to 1
uniform float limit;   // largest scalar that is drawn, from 0 to 1
uniform vec3 flatColor; // of points without a value, too
uniform sampler2D table;
uniform float size;    // of a point, in the unit of the coordinates
uniform float zoom;    // pixels for each unit, at distance 1 in perspective
uniform float smallest, grow;
uniform bool perspective;
uniform vec3 boxLow, boxHigh;
uniform vec4 slice;    // normal and position of a cross-section
uniform float sliceHalf;
out vec3 shown;
out float pixels;

void main() {
  vec4 world = modelMatrix * vec4(position, 1.0);
  vec4 seen = viewMatrix * world;
  gl_Position = projectionMatrix * seen;
#if KIND == ${KINDS.rgb}
  vec4 color = vec4(value.rgb, 1.0);
#elif KIND == ${KINDS.category}
  vec4 color = texelFetch(table, ivec2(int(value.x * 255.0 + 0.5), 0), 0);
#elif KIND == ${KINDS.flat}
  vec4 color = vec4(flatColor, 1.0);
#else
  float share = KIND == ${KINDS.height} ? world[up] : value.x;
  float level = clamp((share - range.x) / (range.y - range.x), 0.0, 1.0);
  vec4 color = texelFetch(table, ivec2(int(level * 255.0 + 0.5), 0), 0);
  if (KIND == ${KINDS.scalar} && value.x == 0.0) color = vec4(flatColor, 1.0);
  if (KIND == ${KINDS.scalar} && value.x > limit) color.a = 0.0;
#endif
  shown = color.rgb;
  bool outside = any(lessThan(world.xyz, boxLow)) || any(greaterThan(world.xyz, boxHigh))
    || abs(dot(world.xyz, slice.xyz) - slice.w) > sliceHalf || color.a < 0.5;
  if (outside) gl_Position = vec4(2.0, 2.0, 2.0, 1.0);
  pixels = clamp(size * grow * zoom / (perspective ? max(-seen.z, 1e-9) : 1.0), smallest, 48.0);
  gl_PointSize = pixels;
}`;

const POINT_FRAGMENT = `precision mediump float;
in vec3 shown;
in float pixels;
out vec4 result;
void main() {
  if (pixels > 3.5) {
    vec2 place = gl_PointCoord - 0.5;
    if (dot(place, place) > 0.25) discard;
  }
  result = vec4(shown, 1.0);
}`;

const SCREEN_VERTEX = `precision highp float;
in vec3 position;
out vec2 place;
void main() {
  place = position.xy * 0.5 + 0.5;
  gl_Position = vec4(position.xy, 0.0, 1.0);
}`;

// Eye-dome lighting: a pixel is darker the more the pixels around it are nearer to the viewer.
// Boucheny 2009, "Visualisation scientifique de grands volumes de donnees".
// MODE 0: A alone, 1: A fades into B, 2: B left of the divider, A right of it. TAPS: how many pixels
// around each are looked at. Both are fixed when the program is compiled, because software renderers
// compute all branches of a program.
const SCREEN_FRAGMENT = `precision highp float; precision highp int;
in vec2 place;
uniform sampler2D colorA, depthA, colorB, depthB;
uniform float share, strength, near, far, reach, step;
uniform vec3 sky, ground;
out vec4 result;

float distanceOf(sampler2D depths, ivec2 at) {
  float depth = texelFetch(depths, clamp(at, ivec2(0), textureSize(depths, 0) - 1), 0).x;
#if PERSPECTIVE
  return depth < 1.0 ? log2(near * far / (far - depth * (far - near))) : 1e9;
#else
  return depth < 1.0 ? depth * (far - near) * reach : 1e9;
#endif
}

float obscurance(sampler2D depths, float here, ivec2 at, vec2 offset) {
  float sum = 0.0;
  for (int i = 0; i < 4; i++) {
    sum += clamp(here - distanceOf(depths, at + ivec2(round(offset * step))), 0.0, 0.25);
    offset = vec2(-offset.y, offset.x);
  }
  return sum / 4.0;
}

vec3 lit(sampler2D colors, sampler2D depths) {
  ivec2 at = ivec2(place * vec2(textureSize(colors, 0)));
  vec3 color = texelFetch(colors, at, 0).rgb;
  float here = distanceOf(depths, at);
#if TAPS == 16
  float dark = 0.5 * (obscurance(depths, here, at, vec2(1.5, 0.0)) + obscurance(depths, here, at, vec2(1.0, 1.0)))
    + 0.25 * (obscurance(depths, here, at, vec2(4.5, 0.0)) + obscurance(depths, here, at, vec2(3.0, 3.0)));
  color *= exp(-strength * 60.0 * dark);
#elif TAPS == 4
  color *= exp(-strength * 80.0 * obscurance(depths, here, at, vec2(1.5, 0.0)));
#endif
  return here < 1e8 ? color : mix(ground, sky, place.y);
}

void main() {
#if MODE == 0
  result = vec4(lit(colorA, depthA), 1.0);
#elif MODE == 1
  result = vec4(mix(lit(colorA, depthA), lit(colorB, depthB), share), 1.0);
#else
  result = vec4(place.x < share ? lit(colorB, depthB) : lit(colorA, depthA), 1.0);
#endif
}`;
