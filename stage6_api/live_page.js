// Everything around the grid: figures, places, queue, what happened; and the stream that feeds it all.

const MAX_PLACES = 32; // rows; of a larger batch the rest is counted
const MAX_NOTES = 60;
const WINDOW = 1.5; // seconds over which a rate is taken

const places = new Map(); // sequence -> its row, for as long as it runs
let before = null; // the snapshot before
let past = []; // moments that the rates are taken from, the newest last
const rates = Array(120).fill(0); // two a second

const roomFor = (promptTokens) => Math.max(1, (engine?.max_len ?? 1024) - promptTokens - 1);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function note(text) {
  const item = document.createElement("li");
  item.textContent = text;
  byId("log").prepend(item);
  while (byId("log").children.length > MAX_NOTES) byId("log").lastChild.remove();
}

/** A counter's growth per second of late, by the server's clock; a pause between requests does not count. */
function rateOf(counter) {
  const last = past.at(-1);
  if (!last || (last.idle && performance.now() - last.heard > 1000 * WINDOW)) return 0;
  const older = past.slice(0, -1);
  let from = Math.max(0, older.findLastIndex((entry) => entry.idle || entry.time <= last.time - WINDOW));
  if (older[from]?.idle && older[from + 1]) from++;
  const base = older[from];
  return base && last.time > base.time ? (last[counter] - base[counter]) / (last.time - base.time) : 0;
}

function drawTiles() {
  const { counts } = seen;
  const { emitted, computed } = counts;
  past.push({ time: seen.time, heard: performance.now(), idle: !holders().length, emitted, computed });
  past = past.slice(-300);
  byId("running").textContent = `${seen.running.length}/${engine.slots}`;
  byId("waiting").textContent = seen.num_waiting;
  byId("taken").textContent = seen.capacity ? `${Math.round((100 * seen.reserved) / seen.capacity)} %` : "none";
  byId("hits").textContent = counts.queries ? `${Math.round((100 * counts.hits) / counts.queries)} %` : "0 %";
  byId("copies").textContent = counts.copies;
  byId("preempted").textContent = counts.preemptions;
}

setInterval(() => {
  const words = (rate) => rate.toFixed(rate && rate < 10 ? 1 : 0);
  const rate = rateOf("emitted");
  byId("rate").textContent = words(rate);
  byId("computing").textContent = words(rateOf("computed"));
  rates.push(rate);
  rates.shift();
  const top = Math.max(10, ...rates);
  const points = rates.map((value, i) => `${i},${(29 - (27 * value) / top).toFixed(1)}`);
  byId("spark").firstElementChild.setAttribute("points", points.join(" "));
}, 500);

/** Rows keep their sequence for as long as it runs, so a place that falls idle is seen to. */
function assignPlaces() {
  const running = new Set(seen.running.map(keyOf));
  for (const key of [...places.keys()]) if (!running.has(key)) places.delete(key);
  const taken = new Set(places.values());
  let row = 0;
  for (const key of running) {
    if (places.has(key)) continue;
    while (taken.has(row)) row++;
    places.set(key, row);
    taken.add(row);
  }
}

function doing(seq) {
  if (seq.tokens === seq.prompt || seq.tokens - seq.computed > 1) return `read ${seq.computed} of ${seq.tokens}`;
  return `${plural(seq.tokens - seq.prompt, "token")} written`;
}

function drawPlaces() {
  assignPlaces();
  const rows = byId("slots").children;
  const longest = Math.max(64, ...seen.running.map((seq) => seq.tokens));
  const filled = new Set();
  for (const seq of seen.running) {
    const row = rows[places.get(keyOf(seq))];
    if (!row) continue;
    filled.add(row);
    fillRow(row, seq, longest);
  }
  const idle = !engine.continuous && seen.running.length ? "idle: batch goes on" : "idle";
  for (const row of rows) {
    if (filled.has(row)) continue;
    row.className = "idle";
    row.dataset.key = "";
    row.querySelector("b").textContent = "";
    row.querySelector("small").textContent = idle;
  }
  const hidden = seen.running.length - filled.size;
  byId("slots-title").textContent = `Batch: ${seen.running.length} of ${plural(engine.slots, "place")}`
    + (hidden > 0 ? ` (${hidden} not drawn)` : "");
}

function fillRow(row, seq, longest) {
  const key = keyOf(seq);
  row.className = key === chosen ? "busy chosen" : "busy";
  row.dataset.key = key;
  row.style.setProperty("--color", colorOf(seq));
  row.style.setProperty("--ink", INKS[colorIndex(seq.request) % 2]);
  row.style.setProperty("--prompt", `${(100 * seq.prompt) / longest}%`);
  row.style.setProperty("--cached", `${(100 * Math.min(seq.cached, seq.computed)) / longest}%`);
  row.style.setProperty("--computed", `${(100 * seq.computed) / longest}%`);
  row.querySelector("b").textContent = nameOf(seq);
  row.querySelector("small").textContent = doing(seq);
  row.firstElementChild.setAttribute("aria-pressed", key === chosen);
}

function drawQueue() {
  const chips = [...seen.parked, ...seen.waiting.slice(0, 40)].map((seq) => {
    const chip = document.createElement("li");
    const parked = seq.blocks.length > 0;
    chip.className = parked ? "parked" : "";
    chip.textContent = nameOf(seq);
    chip.style.background = colorOf(seq);
    chip.style.color = INKS[colorIndex(seq.request) % 2];
    const toRead = `${plural(seq.tokens, "token")} to read`;
    const why = parked ? "keeps its blocks until the other beams have caught up" : toRead;
    chip.title = `request ${nameOf(seq)}: ${why}`;
    return chip;
  });
  byId("queue").replaceChildren(...chips);
  const more = seen.num_waiting + seen.parked.length - chips.length;
  byId("queue-title").textContent = seen.num_waiting ? `Queue: ${seen.num_waiting} wait` : "Queue: empty";
  if (more > 0) byId("queue").append(`and ${more} more`);
}

/** What changed since the last snapshot, in words.  Steps between the two may have passed unseen. */
function noteChanges() {
  if (!before) return;
  const was = new Set([...before.running, ...before.parked].map(keyOf));
  const waited = new Set(before.waiting.map(keyOf));
  const live = new Set(everybody().map((seq) => seq.request));
  for (const seq of seen.running) {
    if (was.has(keyOf(seq)) || seq.index) continue;
    const size = `: ${plural(seq.prompt, "token")}`;
    const found = seq.cached ? `: ${seq.cached} of ${seq.prompt} tokens were cached` : size;
    const how = seq.preemptions ? "is back" : waited.has(keyOf(seq)) ? "leaves the queue" : "enters";
    note(`request ${numberOf(seq.request)} ${how}${found}`);
  }
  for (const seq of seen.waiting) {
    if (was.has(keyOf(seq))) note(`request ${nameOf(seq)} is preempted, its memory is taken`);
  }
  for (const request of new Set([...before.running, ...before.parked].map((seq) => seq.request))) {
    if (!live.has(request)) note(`request ${numberOf(request)} has ended`);
  }
}

function drawTables() {
  if (!byId("tables").open) return;
  const lines = holders().map((seq) => `request ${nameOf(seq)}: ${seq.blocks.join(" ") || "no blocks"}`);
  byId("tables").querySelector("pre").textContent = lines.join("\n") || "Nobody runs.";
}

function draw() {
  if (!engine || !seen) return;
  if (chosen && !holders().some((seq) => keyOf(seq) === chosen)) chosen = null;
  for (const seq of everybody()) numberOf(seq.request);
  drawGrid();
  drawPlaces();
  drawQueue();
  drawTables();
}

function takeStep(snapshot) {
  const first = seen === null;
  before = seen;
  seen = snapshot;
  if (first) flashed = Math.max(-1, ...seen.copied.map(([step]) => step));
  draw();
  drawTiles();
  noteChanges();
  if (performance.now() - moved > 1000) showPace(snapshot.pace);
}

function takeEngine(about) {
  engine = about;
  seen = before = null;
  past = [];
  places.clear();
  document.body.classList.toggle("sharing", engine.shares);
  byId("about").textContent = `${about.model} on ${about.stage}`;
  const titles = { blocks: "KV memory: the block pool", slab: "KV memory: one slab", none: "KV memory" };
  byId("memory-title").textContent = titles[about.memory];
  byId("tables").hidden = about.memory !== "blocks";
  const rows = Array.from({ length: Math.min(engine.slots, MAX_PLACES) }, () => {
    const row = document.createElement("li");
    row.innerHTML = '<button type="button"><b></b><span></span><small></small></button>';
    return row;
  });
  byId("slots").replaceChildren(...rows);
  buildGrid();
}

/** For whoever cannot see the picture: now and then, if it has changed. */
setInterval(() => {
  if (!seen || !engine) return;
  const words = `${seen.running.length} running, ${seen.num_waiting} waiting. ${byId("memory-words").textContent} `
    + `${byId("rate").textContent} tokens per second.`;
  if (words !== byId("words").textContent) byId("words").textContent = words;
}, 4000);

function choose(event) {
  const row = event.target.closest("#slots li");
  const key = row?.dataset.key || null;
  chosen = key === chosen ? null : key;
  draw();
}

byId("slots").addEventListener("click", choose);
byId("tables").addEventListener("toggle", () => seen && drawTables());

let moved = -Infinity; // when a hand was last at the slider
let sending = Promise.resolve();

function showPace(seconds) {
  byId("pace").value = seconds;
  byId("pace-words").textContent = Number(seconds) ? `${Number(seconds).toFixed(2)} s after each step` : "full speed";
}

byId("pace").addEventListener("input", () => {
  moved = performance.now();
  showPace(byId("pace").value);
  sending = sending.then(async () => {
    const seconds = Number(byId("pace").value);
    await call("live/pace", { body: { seconds } }).catch((error) => say(error.message));
  });
});

byId("theme").addEventListener("click", () => {
  const dark = byId("theme").textContent === "Dark";
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
  byId("theme").textContent = dark ? "Light" : "Dark";
});
if (matchMedia("(prefers-color-scheme: dark)").matches) byId("theme").textContent = "Light";

function showState(text, isOpen) {
  byId("state").textContent = text;
  document.body.classList.toggle("open", isOpen);
  byId("pace").disabled = !isOpen;
}

async function watch() {
  for (;;) {
    try {
      const stream = await call("live/events");
      showState("watching", true);
      for await (const { type, data } of events(stream)) {
        if (type === "engine") takeEngine(data);
        else takeStep(data);
      }
      showState("the stream has ended; trying again", false);
    } catch (error) {
      showState(error.status === 401 ? "waiting for the key" : `${error.message}; trying again`, false);
    }
    await haveKey;
    await pause(1.5);
  }
}

watch();
