// Serves one model with onnxruntime-web in Node, for the backend in this folder.
//
// Frames on the socket are those of qdqspec/wire.py: the length of a JSON header (4 bytes, little-endian), the
// header, then the bytes of the tensors that its `arrays` lists as [name, dtype, shape].

import fs from "node:fs";
import net from "node:net";
import { createRequire } from "node:module";
import path from "node:path";

const [socketNumber, modules] = process.argv.slice(2);

// ---- the profile ----------------------------------------------------------------------------------------

// The wasm build prints its profile on standard output, line by line, with fs.writeSync.
let printed = null;
const writeSync = fs.writeSync;
fs.writeSync = (file, text, ...rest) => (file === 1 && printed ? printed.push(text) : writeSync(file, text, ...rest));

// ---- the optimized graph ------------------------------------------------------------------------------

// The wasm build has no file system: opening a file for writing gives descriptor 0, writing to that fails. Descriptor
// 0 is redirected to `written`. The two functions are recognized by their text, since names are minified; the version
// of the package is pinned, and `build` fails if nothing was written.
const WRITES = (f) => f.length === 4 && /10===/.test(String(f));
const CLOSES = (f) => f.length === 1 && /:52}$/.test(String(f));
let written = [];
const instantiate = WebAssembly.instantiate;
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
    written.push(Buffer.from(new Uint8Array(memory.buffer, start, length)));
    total += length;
  }
  view.setUint32(result >>> 0, total, true);
  return 0;
}

const ort = createRequire(path.join(modules, "index.js"))("onnxruntime-web");
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "fatal";

// ---- tensors ------------------------------------------------------------------------------------------

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: globalThis.Float16Array ?? Uint16Array, bool: Uint8Array,
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
  int64: BigInt64Array, uint64: BigUint64Array,
};

function tensorOf([name, type, shape], bytes) {
  if (!(type in ARRAYS)) throw new Error(`onnxruntime-web has no tensors of ${type}, which '${name}' has`);
  const copy = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength); // aligned
  return new ort.Tensor(type, new ARRAYS[type](copy), shape);
}

function bytesOf(tensor, name) {
  if (!(tensor.type in ARRAYS)) throw new Error(`output '${name}' is of ${tensor.type}, which cannot be transferred`);
  const data = tensor.data;
  return Buffer.from(data.buffer, data.byteOffset, data.byteLength);
}

// ---- requests -----------------------------------------------------------------------------------------

let model, session, options;
const bound = new Map(); // by profile: the inputs

const requests = {
  async build(header) {
    model = header.model;
    options = {
      executionProviders: ["wasm"],
      executionMode: "sequential",
      graphOptimizationLevel: header.optimization,
      externalData: header.external.map(([name, file]) => ({ path: name, data: file })),
      logSeverityLevel: 4,
    };
    written = [];
    session = await ort.InferenceSession.create(model, { ...options, optimizedModelFilePath: "optimized.onnx" });
    const graph = Buffer.concat(written);
    written = [];
    if (!graph.length) throw new Error(`onnxruntime-web ${ort.env.versions.web} wrote no optimized graph`);
    return [{}, [["optimized", "uint8", [graph.length]]], [graph]];
  },
  async run(_, feeds) {
    const outputs = await session.run(feeds);
    const names = session.outputNames;
    const arrays = names.map((name) => [name, outputs[name].type, outputs[name].dims]);
    return [{}, arrays, names.map((name) => bytesOf(outputs[name], name))];
  },
  async bind({ profile }, feeds) {
    bound.set(profile, feeds);
    await compileHotCode(feeds);
    return [{}];
  },
  async time({ runs, warmup, profile }) {
    const feeds = bound.get(profile);
    const wall = new Array(runs);
    const cpu = new Array(runs);
    for (let i = 0; i < warmup; i++) await session.run(feeds);
    globalThis.gc?.();
    for (let i = 0; i < runs; i++) {
      const startCpu = cpuMs();
      const start = performance.now();
      await session.run(feeds);
      wall[i] = performance.now() - start;
      cpu[i] = cpuMs() - startCpu;
    }
    return [{ wall, cpu }];
  },
  async layers({ runs, warmup, profile }) {
    const feeds = bound.get(profile);
    printed = [];
    try {
      const profiled = await ort.InferenceSession.create(model, { ...options, enableProfiling: true });
      for (let i = 0; i < warmup + runs; i++) await profiled.run(feeds);
      profiled.endProfiling();
      await profiled.release();
      return [{ profile: printed.join("") }];
    } finally {
      printed = null;
    }
  },
};

// V8 compiles wasm twice: at first without optimization, hot functions again on other threads (measured: 2.2 ms a run
// at first, .54 afterwards). Runs until those threads are idle.
const BATCH_MS = 300;
const LONGEST_MS = 20000;
const IDLE = 0.02; // of the elapsed time

async function compileHotCode(feeds) {
  const deadline = performance.now() + LONGEST_MS;
  let busy;
  do {
    const before = otherThreadsMs();
    const start = performance.now();
    for (let i = 0; i < 2 || performance.now() - start < BATCH_MS; i++) await session.run(feeds);
    busy = (otherThreadsMs() - before) / (performance.now() - start);
  } while (!(busy < IDLE) && performance.now() < deadline);
}

// Processor time of this thread in milliseconds. Node has it from 23.9 on; before, that of the process is taken, whose
// other threads compile, and have ended that when runs are timed (--single-threaded-gc: none collects garbage).
function cpuMs() {
  const used = process.threadCpuUsage ? process.threadCpuUsage() : process.cpuUsage();
  return (used.user + used.system) / 1e3;
}

// NaN if the system does not report the processor time of threads.
function otherThreadsMs() {
  const all = process.cpuUsage();
  const total = (all.user + all.system) / 1e3;
  if (process.threadCpuUsage) return total - cpuMs();
  try {
    return total - Number(fs.readFileSync("/proc/thread-self/schedstat", "ascii").split(" ")[0]) / 1e6;
  } catch {
    return NaN;
  }
}

// ---- frames -------------------------------------------------------------------------------------------

const socket = new net.Socket({ fd: Number(socketNumber) });
let waiting = []; // received and not yet read
let size = 0;
let wake = () => {};
socket.on("data", (chunk) => { waiting.push(chunk); size += chunk.length; wake(); });
for (const event of ["end", "close", "error"]) socket.on(event, () => process.exit(0));

async function exactly(length) {
  while (size < length) await new Promise((resolve) => { wake = resolve; });
  const all = waiting.length === 1 ? waiting[0] : Buffer.concat(waiting);
  waiting = all.length > length ? [all.subarray(length)] : [];
  size -= length;
  return all.subarray(0, length);
}

async function receive() {
  const header = JSON.parse((await exactly((await exactly(4)).readUInt32LE())).toString());
  const feeds = {};
  for (const array of header.arrays) {
    const [name, type, shape] = array;
    const bytes = (ARRAYS[type]?.BYTES_PER_ELEMENT ?? 1) * shape.reduce((a, b) => a * b, 1);
    feeds[name] = tensorOf(array, await exactly(bytes));
  }
  return [header, feeds];
}

function send(header, arrays = [], parts = []) {
  const text = Buffer.from(JSON.stringify({ ...header, arrays }));
  const length = Buffer.alloc(4);
  length.writeUInt32LE(text.length);
  for (const part of [length, text, ...parts]) socket.write(Buffer.from(part)); // copies: outputs may be reused
}

// An exception that reaches this place came out of wasm and leaves it undefined: the process ends, with the text in
// its log.
process.on("uncaughtException", (error) => { console.error(error?.stack ?? error); process.exit(70); });

send({ versions: { ...ort.env.versions, node: process.versions.node, v8: process.versions.v8 } });
for (;;) {
  const [header, feeds] = await receive();
  try {
    send(...(await requests[header.do](header, feeds)));
  } catch (error) {
    send({ error: String(error?.message ?? error) });
  }
}
