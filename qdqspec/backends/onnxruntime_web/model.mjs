// Serves one model with onnxruntime-web: what is the same in Node (worker.mjs) and in a page (page.html).
//
// Frames are those of qdqspec/_core/arrays.py: the length of a JSON header (4 bytes, little-endian), the header, then the bytes
// of the tensors that its `arrays` lists as [name, dtype, shape].

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: globalThis.Float16Array ?? Uint16Array, bool: Uint8Array,
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
  int64: BigInt64Array, uint64: BigUint64Array,
};

// ---- frames -------------------------------------------------------------------------------------------

export const bytesIn = ([, type, shape]) => (ARRAYS[type]?.BYTES_PER_ELEMENT ?? 1) * shape.reduce((a, b) => a * b, 1);
export const headerOf = (bytes) => JSON.parse(new TextDecoder().decode(bytes));
export const filesOf = (header) => [header.model, ...header.external.map(([, file]) => file)];

// The parts of a frame.
export function framed(header, arrays = [], parts = []) {
  const text = new TextEncoder().encode(JSON.stringify({ ...header, arrays }));
  const length = new Uint8Array(4);
  new DataView(length.buffer).setUint32(0, text.length, true);
  return [length, text, ...parts];
}

function tensorOf(ort, [name, type, shape], bytes) {
  if (!(type in ARRAYS)) throw new Error(`onnxruntime-web has no tensors of ${type}, which '${name}' has`);
  return new ort.Tensor(type, new ARRAYS[type](new Uint8Array(bytes).buffer), shape); // a copy is aligned
}

function bytesOf(tensor, name) {
  if (!(tensor.type in ARRAYS)) throw new Error(`output '${name}' is of ${tensor.type}, which cannot be transferred`);
  const data = tensor.data;
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
}

// ---- the optimized graph ------------------------------------------------------------------------------

// The wasm build has no file system: opening a file for writing gives descriptor 0, writing to that fails. Descriptor
// 0 is redirected to `written`. The two functions are recognized by their text, since names are minified; the version
// of the package is pinned, and `build` fails if nothing was written.
const WRITES = (f) => f.length === 4 && /10===/.test(String(f));
const CLOSES = (f) => f.length === 1 && /:52}$/.test(String(f));
let written = [];
const instantiate = WebAssembly.instantiate;
delete WebAssembly.instantiateStreaming; // pages would use it; instantiate is used instead
WebAssembly.instantiate = (source, imports) => {
  for (const group of Object.values(imports ?? {})) {
    const memory = Object.values(group).find((value) => value instanceof WebAssembly.Memory);
    for (const [name, value] of Object.entries(group)) {
      if (typeof value !== "function" || !memory) continue;
      if (CLOSES(value)) group[name] = (file) => (file === 0 ? 0 : value(file));
      if (WRITES(value)) group[name] = (file, ...rest) => (file === 0 ? keep(memory, ...rest) : value(file, ...rest));
    }
  }
  return instantiate(source, imports);
};

function keep(memory, vectors, count, result) {
  const view = new DataView(memory.buffer);
  let total = 0;
  for (let i = 0; i < count; i++) {
    const start = view.getUint32((vectors >>> 0) + 8 * i, true);
    const length = view.getUint32((vectors >>> 0) + 8 * i + 4, true);
    written.push(new Uint8Array(memory.buffer, start, length).slice());
    total += length;
  }
  view.setUint32(result >>> 0, total, true);
  return 0;
}

// ---- requests -----------------------------------------------------------------------------------------

// V8 compiles wasm twice: at first without optimization, hot functions again on other threads (measured: 2.2 ms a run
// at first, .54 afterwards). Runs until those threads are idle.
const BATCH_MS = 300;
const LONGEST_MS = 20000;
const IDLE = 0.02; // of the elapsed time

// A function that answers one frame: it takes the header and the bytes of the tensors, and returns the parts of a frame.
//
// `host` gives `source(number, path)`, what onnxruntime-web loads a file from; `cpuMs()`, the processor time of the thread
// that computes, and `otherThreadsMs()`, a promise of that of all others, both NaN if unknown; and `printed(list)`, which
// collects what wasm prints in a list, or no longer.
export function server(ort, host) {
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "fatal";
  let model, session, options;
  const bound = new Map(); // by profile: the inputs

  const requests = {
    async build(header) {
      model = host.source(0, header.model);
      const external = header.external.map(([name, file], i) => ({ path: name, data: host.source(i + 1, file) }));
      options = {
        executionProviders: ["wasm"],
        executionMode: "sequential",
        graphOptimizationLevel: header.optimization,
        externalData: external,
        logSeverityLevel: 4,
      };
      written = [];
      session = await ort.InferenceSession.create(model, { ...options, optimizedModelFilePath: "optimized.onnx" });
      const parts = written;
      written = [];
      const size = parts.reduce((sum, part) => sum + part.length, 0);
      if (!size) throw new Error(`onnxruntime-web ${ort.env.versions.web} wrote no optimized graph`);
      return framed({}, [["optimized", "uint8", [size]]], parts);
    },
    async run(_, feeds) {
      const outputs = await session.run(feeds);
      const names = session.outputNames;
      const arrays = names.map((name) => [name, outputs[name].type, outputs[name].dims]);
      return framed({}, arrays, names.map((name) => bytesOf(outputs[name], name)));
    },
    async bind({ profile }, feeds) {
      bound.set(profile, feeds);
      await compileHotCode(feeds);
      return framed({});
    },
    async time({ runs, warmup, profile }) {
      const feeds = bound.get(profile);
      const wall = new Array(runs);
      const cpu = new Array(runs);
      for (let i = 0; i < warmup; i++) await session.run(feeds);
      globalThis.gc?.();
      for (let i = 0; i < runs; i++) {
        const startCpu = host.cpuMs();
        const start = performance.now();
        await session.run(feeds);
        wall[i] = performance.now() - start;
        cpu[i] = host.cpuMs() - startCpu;
      }
      return framed({ wall, cpu: cpu.some(Number.isNaN) ? [] : cpu });
    },
    async layers({ runs, warmup, profile }) {
      const feeds = bound.get(profile);
      const lines = [];
      host.printed(lines);
      try {
        const profiled = await ort.InferenceSession.create(model, { ...options, enableProfiling: true });
        for (let i = 0; i < warmup + runs; i++) await profiled.run(feeds);
        profiled.endProfiling();
        await profiled.release();
        return framed({ profile: lines.join("") });
      } finally {
        host.printed(null);
      }
    },
  };

  async function compileHotCode(feeds) {
    const deadline = performance.now() + LONGEST_MS;
    let busy;
    do {
      const before = await host.otherThreadsMs();
      const start = performance.now();
      for (let i = 0; i < 2 || performance.now() - start < BATCH_MS; i++) await session.run(feeds);
      busy = ((await host.otherThreadsMs()) - before) / (performance.now() - start);
    } while (!(busy < IDLE) && performance.now() < deadline);
  }

  return async (header, bytes) => {
    try {
      const feeds = {};
      let start = 0;
      for (const array of header.arrays) {
        const end = start + bytesIn(array);
        feeds[array[0]] = tensorOf(ort, array, bytes.subarray(start, end));
        start = end;
      }
      return await requests[header.do](header, feeds);
    } catch (error) {
      return framed({ error: String(error?.message ?? error) });
    }
  };
}
