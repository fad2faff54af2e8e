// Starts a headless browser with page.html, and passes frames to it and its answers back.
//
// The page asks for a frame with each answer (POST next). All addresses begin with a random word: other programs of this
// machine can reach the port, but neither the model nor the results. The headers make the page cross-origin isolated,
// so that performance.now() has a resolution of 5 microseconds, not 100.

import { randomUUID } from "node:crypto";
import fs from "node:fs";
import http from "node:http";
import os from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";

import { filesOf, framed } from "./model.mjs";

const HEADERS = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cache-Control": "no-store",
};
const TYPES = { ".html": "text/html", ".mjs": "text/javascript", ".wasm": "application/wasm" };
const ARGUMENTS = ["--js-flags=--expose-gc", "--disable-gpu"];
const SPIN_MS = 50;
const SPINS = 100; // at most: under load a renderer that is starting takes seconds

export async function inBrowser(playwright, executable, modules, onClose) {
  const folders = [path.dirname(fileURLToPath(import.meta.url)), `${modules}/node_modules/onnxruntime-web/dist`];
  const word = randomUUID();
  let files = [];
  let thread = NaN; // of the page: the process id of its renderer
  let answered, asked; // wake up who waits for an answer, and for a frame
  let request = new Promise((resolve) => { asked = resolve; });

  const routes = {
    async next(message, response) {
      const chunks = [];
      for await (const chunk of message) chunks.push(chunk);
      answered?.(chunks);
      const parts = await request;
      request = new Promise((resolve) => { asked = resolve; });
      parts.forEach((part) => response.write(part));
      response.end();
    },
    others: (_, response) => response.end(String(othersMs(thread))),
  };
  const listener = http.createServer((message, response) => {
    const [, given, ...rest] = new URL(message.url, "http://localhost").pathname.split("/");
    const name = rest.join("/");
    for (const [key, value] of Object.entries(HEADERS)) response.setHeader(key, value);
    if (given !== word) return void response.writeHead(404).end();
    if (Object.hasOwn(routes, name)) return void routes[name](message, response);
    const places = folders.map((folder) => path.join(folder, rest.at(-1)));
    const file = /^files\/\d+$/.test(name) ? files[Number(rest[1])] : places.find((place) => fs.existsSync(place));
    if (!file) return void response.writeHead(404).end();
    response.setHeader("Content-Type", TYPES[path.extname(name)] ?? "application/octet-stream");
    response.setHeader("Content-Length", fs.statSync(file).size);
    fs.createReadStream(file).pipe(response);
  });
  await new Promise((resolve) => listener.listen(0, "127.0.0.1", resolve));

  // The path of a socket has 107 characters at most, and names of temporary folders are long: a short name of the same.
  if (process.platform === "linux") {
    process.chdir(os.tmpdir());
    process.env.TMPDIR = `/proc/${process.pid}/cwd`;
  }
  const browser = await playwright.chromium.launch({ executablePath: executable, args: ARGUMENTS });
  onClose(() => browser.close().finally(() => process.exit(0)));
  const page = await browser.newPage();
  const failed = (why) => { console.error(why); process.exit(70); };
  page.on("crash", () => failed("the page crashed"));
  page.on("pageerror", (error) => failed(error.stack ?? error));
  browser.on("disconnected", () => failed("the browser ended"));
  const ready = new Promise((resolve) => { answered = resolve; });
  await page.goto(`http://127.0.0.1:${listener.address().port}/${word}/page.html`);
  await ready;
  thread = await rendererOf(browser, page);

  async function answer(header, bytes) {
    if (header.do === "build") files = filesOf(header);
    const done = new Promise((resolve) => { answered = resolve; });
    const { arrays, ...rest } = header;
    asked(framed(rest, arrays, [bytes]));
    return done;
  }
  return { answer, thread: Number.isNaN(threadMs(thread, thread)) ? null : thread };
}

// The process of the page, among all renderers: the one that uses the processor while the page is busy. A spare renderer
// that is starting uses it too, so the page is busy again until all others are idle meanwhile.
async function rendererOf(browser, page) {
  const session = await browser.newBrowserCDPSession();
  for (let turn = 1; ; turn++) {
    const { processInfo } = await session.send("SystemInfo.getProcessInfo");
    const pids = processInfo.filter(({ type }) => type === "renderer").map(({ id }) => id);
    const before = pids.map((pid) => threadMs(pid, pid));
    await page.evaluate((ms) => { for (const end = performance.now() + ms; performance.now() < end; ); }, SPIN_MS);
    const used = pids.map((pid, i) => threadMs(pid, pid) - before[i] || 0);
    const [most, next] = [...used, 0].sort((a, b) => b - a);
    if (most > 4 * next || turn === SPINS) return pids[used.indexOf(most)];
  }
}

// Processor time of a thread in milliseconds; NaN where the system does not report it.
function threadMs(pid, thread) {
  try {
    return Number(fs.readFileSync(`/proc/${pid}/task/${thread}/schedstat`, "ascii").split(" ")[0]) / 1e6;
  } catch {
    return NaN;
  }
}

function othersMs(pid) {
  try {
    const others = fs.readdirSync(`/proc/${pid}/task`).filter((thread) => Number(thread) !== pid);
    return others.reduce((sum, thread) => sum + (threadMs(pid, thread) || 0), 0);
  } catch {
    return NaN;
  }
}
