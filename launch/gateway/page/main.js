// Updates the page from the frames of the stream.

const HISTORY = 120; // samples of the curve, as many as the server keeps

let latest = null;
let cells = [];
let requests = { live: [], ended: [] };
const panels = new Panels();
const rows = new Rows(() => latest && draw());

function show(frame) {
  latest = frame;
  cells = frame.pages ? cellsOf(frame.pages.runs) : [];
  requests = asRequests(frame);
  showHead(frame);
  panels.update(frame, requests);
  rows.update(frame, requests);
  showWords(frame);
  draw();
  document.body.dataset.frames = String(Number(document.body.dataset.frames || 0) + 1);
}

function showHead(frame) {
  const silent = frame.silent_s === null ? "" : `no answer for ${frame.silent_s} s`;
  const words = silent || frame.trouble || (frame.status === "ok" ? "healthy" : frame.status);
  const end = { run: "", failed: ": a worker was given up" }[frame.mode] ?? ", stopping";
  setText(byId("status"), words + end);
  const isBad = frame.status === "unhealthy" || frame.mode === "failed";
  byId("status").dataset.tone = isBad ? "bad" : frame.status === "ok" && !silent && !end ? "good" : "wait";
  const { model, dtype, device, backend } = frame.model;
  const restarts = frame.restarts ? ` · ${frame.restarts} restarts` : "";
  setText(byId("model"), model ? `${model} · ${dtype} on ${device} (${backend})${restarts}` : "the model is being loaded");
  document.title = `${number(frame.token_rates.at(-1) || 0)} tok/s · Triptych`;
}

/** Describes the canvases in words: next to them, and in their labels. */
function showWords(frame) {
  const rate = number(frame.token_rates.at(-1) || 0);
  setText(byId("rate-now"), `${rate} tok/s`);
  setLabel(byId("rate"), `tokens per second, now ${rate}, at most ${number(Math.max(0, ...frame.token_rates))} in the last minute`);
  const steps = frame.steps;
  if (steps && steps.ms.length) {
    const mean = sum(steps.ms) / steps.ms.length;
    const words = `mean ${duration(mean)}, longest ${duration(Math.max(...steps.ms))}`;
    setText(byId("steps-now"), words);
    setLabel(byId("steps"), `the last ${steps.ms.length} steps: ${words}, ${sum(steps.prefill_tokens)} prefill tokens, ${sum(steps.decodes)} decodes`);
  }
  const pages = frame.pages;
  if (pages) {
    const words = `${pages.num_held} of ${pages.num_pages} held`;
    setText(byId("pages-now"), words);
    setLabel(byId("pages"), `page pool: ${words} by ${pages.held.length} requests, ${pages.num_cached} cached, ${pages.num_limbo} in limbo`);
  }
}

function draw() {
  drawRates(byId("rate"), latest.token_rates, HISTORY);
  if (latest.steps) drawSteps(byId("steps"), latest.steps, HISTORY);
  const request = requests.live.find(({ id }) => id === chosen.id); // an ended request has no pages
  drawPages(byId("pages"), cells, request ? request.slot : null);
}

function describeCell(event) {
  const index = cellAt(byId("pages"), event, cells.length);
  if (index < 0) return setText(byId("pages-note"), "");
  const size = latest.pages.pages_per_cell;
  const first = index * size + 1;
  const code = cells[index];
  const owner = requests.live.find(({ slot }) => slot === code - FIRST_OWNER);
  const what = ["free", "cached", "limbo", "shared"][code] ?? (owner ? owner.id : "ended");
  return setText(byId("pages-note"), `${size > 1 ? `pages ${first} to ${first + size - 1}` : `page ${first}`}: ${what}`);
}

function showLegend(names) {
  for (const name of names) {
    const entry = make("span", "", byId("legend"));
    make("i", `key ${name}`, entry);
    entry.append(name);
  }
}

const stream = new Stream({
  frame(frame) {
    if (!byId("legend").firstChild) showLegend(frame.stages);
    show(frame);
  },
  lost() {
    setText(byId("status"), "connection lost, trying again");
    byId("status").dataset.tone = "bad";
  },
  unauthorized() {
    const isWrong = sessionStorage.getItem(KEY) !== null;
    sessionStorage.removeItem(KEY);
    setText(byId("status"), "waiting for a key");
    setText(byId("key-error"), isWrong ? "The server rejected this key." : "");
    byId("key-dialog").showModal();
  },
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  byId("key-dialog").close();
  stream.adjust();
});
byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
byId("pause").addEventListener("click", () => {
  const isPaused = byId("pause").getAttribute("aria-pressed") !== "true";
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  stream.pause(isPaused);
});
byId("pages").addEventListener("mousemove", describeCell);
byId("pages").addEventListener("mouseleave", () => setText(byId("pages-note"), ""));
addEventListener("resize", () => latest && draw());
DARK.addEventListener("change", () => latest && draw());
stream.adjust();
