export {
  BufferAttribute, BufferGeometry, Box3, Clock, Color, DataTexture, DepthTexture, Float32BufferAttribute,
  LineSegments, LineBasicMaterial, LinearFilter, Matrix4, Mesh, NearestFilter, OrthographicCamera, PerspectiveCamera,
  PlaneGeometry, Points, RGBAFormat, RawShaderMaterial, Scene, Sphere, Frustum, UnsignedByteType, UnsignedIntType, Vector2, Vector3, Vector4,
  WebGLRenderTarget, WebGLRenderer, GLSL3, NoBlending, MOUSE, TOUCH, REVISION,
} from "three";
export { OrbitControls } from "three/examples/jsm/controls/OrbitControls.js";
