// Serves one model with onnxruntime-web, in Node itself or in a browser that it starts, for the backend in this folder.
//
// Arguments: the number of the socket, the folder with the packages, and the path of the browser, if one is wanted.

import fs from "node:fs";
import net from "node:net";
import { createRequire } from "node:module";
import path from "node:path";

import { bytesIn, framed, headerOf, server } from "./model.mjs";

const [socketNumber, modules, browser] = process.argv.slice(2);
const require = createRequire(path.join(modules, "index.js"));

// ---- in Node ------------------------------------------------------------------------------------------

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

function inNode() {
  const ort = require("onnxruntime-web");
  // The wasm build prints its profile on standard output, line by line, with fs.writeSync.
  let lines = null;
  const write = fs.writeSync;
  fs.writeSync = (file, text, ...rest) => (file === 1 && lines ? lines.push(text) : write(file, text, ...rest));
  const host = { source: (_, file) => file, cpuMs, otherThreadsMs, printed: (list) => (lines = list) };
  return { answer: server(ort, host), thread: process.pid };
}

// ---- frames -------------------------------------------------------------------------------------------

// An exception that reaches this place came out of wasm and leaves it undefined, or out of the browser: the process
// ends, with the text in its log.
process.on("uncaughtException", (error) => { console.error(error?.stack ?? error); process.exit(70); });

const socket = new net.Socket({ fd: Number(socketNumber) });
let waiting = []; // received and not yet read
let size = 0;
let wake = () => {};
let close = () => process.exit(0);
socket.on("data", (chunk) => { waiting.push(chunk); size += chunk.length; wake(); });
for (const event of ["end", "close", "error"]) socket.on(event, () => close());

async function exactly(length) {
  while (size < length) await new Promise((resolve) => { wake = resolve; });
  const all = waiting.length === 1 ? waiting[0] : Buffer.concat(waiting);
  waiting = all.length > length ? [all.subarray(length)] : [];
  size -= length;
  return all.subarray(0, length);
}

const send = (parts) => parts.forEach((part) => socket.write(Buffer.from(part))); // copies: outputs may be reused

const { answer, thread } = browser
  ? await (await import("./browser.mjs")).inBrowser(require("playwright-core"), browser, modules, (end) => (close = end))
  : inNode();
send(framed({ thread }));
for (;;) {
  const header = headerOf(await exactly((await exactly(4)).readUInt32LE()));
  const bytes = await exactly(header.arrays.reduce((sum, array) => sum + bytesIn(array), 0));
  send(await answer(header, bytes));
}
