// The memory as a grid: a cell for each block (or for so many slots of stage 2's slab), coloured by request.

// The colours of common/course/pictures/palette.py, in order of arrival; every second one carries dark text.
const COLORS = ["#2f7ebc", "#e0a83c", "#3b9c5e", "#d98cb3", "#7a4fa3", "#6cc5d9", "#b5472f", "#a3b84b"];
const INKS = ["#ffffff", "#24292f"];

let engine = null; // what the server said about it, see live_snapshot.py
let seen = null; // the newest snapshot
let chosen = null; // the sequence whose blocks are to stand out, if any

const numbers = new Map(); // request id -> 1, 2, 3, ... in order of arrival
const lastColor = new Map(); // block -> the colour it had when it was last held

function numberOf(request) {
  if (!numbers.has(request)) numbers.set(request, numbers.size + 1);
  return numbers.get(request);
}

/** Who holds memory: those that run, and beams that wait for the rest of their search. */
const holders = () => [...seen.running, ...seen.parked];
const everybody = () => [...holders(), ...seen.waiting];

const keyOf = (seq) => `${seq.request}/${seq.index}`;
const colorIndex = (request) => (numberOf(request) - 1) % COLORS.length;

/** A request's colour; its further answers (n, beams) are shades of it. */
function colorOf(seq) {
  const plain = COLORS[colorIndex(seq.request)];
  const shade = `${seq.index % 2 ? "white" : "black"} ${12 + 8 * (seq.index % 4)}%`;
  return seq.index ? `color-mix(in oklab, ${plain}, ${shade})` : plain;
}

/** "7" for a request's only answer, "7.2" for the second of several. */
function nameOf(seq) {
  const several = seq.index || everybody().some((other) => other.request === seq.request && other.index);
  return several ? `${numberOf(seq.request)}.${seq.index + 1}` : `${numberOf(seq.request)}`;
}

/** What each cell holds: {owners, share filled, logical number in the chosen sequence}; nothing for a free one. */
function heldCells() {
  return engine.memory === "slab" ? slabCells() : blockCells();
}

function blockCells() {
  const held = new Map();
  for (const seq of holders()) {
    seq.blocks.forEach((block, i) => {
      const filled = Math.min(1, Math.max(0, (seq.computed - i * engine.cell) / engine.cell));
      const cell = held.get(block) ?? { owners: [], filled: 0 };
      cell.owners.push(seq);
      cell.filled = Math.max(cell.filled, filled);
      if (keyOf(seq) === chosen) cell.logical = i;
      held.set(block, cell);
    });
  }
  return held;
}

/** A stretch begins and ends anywhere: a cell goes to whoever has most of it. */
function slabCells() {
  const held = new Map();
  for (const [request, index, start, reserved, used] of seen.stretches) {
    const end = start + reserved;
    for (let i = Math.floor(start / engine.cell); i * engine.cell < end; i++) {
      const from = Math.max(start, i * engine.cell);
      const size = Math.min(end, (i + 1) * engine.cell) - from;
      if (size <= (held.get(i)?.size ?? 0)) continue;
      const seq = { request, index };
      const ended = !seen.running.some((other) => keyOf(other) === keyOf(seq));
      const filled = Math.min(1, Math.max(0, (start + used - from) / size));
      held.set(i, { owners: [seq], filled, size, ended });
    }
  }
  return held;
}

/** How to paint a cell: {background, color, text, kind, title}. */
function paint(block, cell, isCached) {
  if (!cell) {
    if (!isCached) return { kind: "free", background: "", text: "", title: `block ${block}: free` };
    const pale = `color-mix(in srgb, ${lastColor.get(block) ?? "var(--faint)"} 26%, var(--cell))`;
    return { kind: "cached", background: pale, text: "", title: `block ${block}: cached` };
  }
  const colors = [...new Set(cell.owners.map(colorOf))].slice(0, 4);
  lastColor.set(block, colors[0]);
  const width = 100 / (2 * colors.length);
  const stripes = colors.map((color, i) => `${color} ${i * width}% ${(i + 1) * width}%`);
  const fill = colors.length > 1
    ? `repeating-linear-gradient(135deg, ${stripes.join(", ")})`
    : `linear-gradient(${colors[0]}, ${colors[0]})`;
  const full = 100 * cell.filled;
  const veil = `linear-gradient(90deg, transparent ${full}%, var(--veil) ${full}%)`;
  const names = cell.owners.map(nameOf);
  const several = names.length > 1;
  return {
    kind: several ? "shared" : cell.ended ? "ended" : "held",
    background: `${veil}, ${fill}`,
    color: INKS[colorIndex(cell.owners[0].request) % 2],
    text: cell.logical !== undefined ? `${cell.logical}` : several ? `${names.length}` : "",
    dim: chosen !== null && !cell.owners.some((seq) => keyOf(seq) === chosen),
    title: `${engine.memory === "slab" ? `slots ${block * engine.cell} on` : `block ${block}`}: `
      + `${several ? `${names.length} owners, ` : ""}request ${names.join(", ")}; ${Math.round(full)} % full`
      + `${cell.ended ? "; ended, kept until its batch is over" : ""}`,
  };
}

const painted = []; // per cell, what stands on the page

function drawGrid() {
  const grid = byId("grid");
  if (engine.memory === "none") return;
  const held = heldCells();
  const cached = new Set(seen.cached);
  for (let block = 0; block < engine.shown; block++) {
    const want = paint(block, held.get(block), cached.has(block));
    const mark = `${want.kind}|${want.background}|${want.text}|${want.dim}|${want.title}`;
    if (painted[block] === mark) continue;
    painted[block] = mark;
    const cell = grid.children[block];
    cell.className = want.dim ? `${want.kind} dim` : want.kind;
    cell.style.background = want.background;
    cell.style.color = want.color ?? "";
    cell.textContent = want.text;
    cell.title = want.title;
  }
  flashCopies();
  const shared = grid.getElementsByClassName("shared").length;
  const words = engine.memory === "slab" ? slabWords() : blockWords(held, cached, shared);
  byId("memory-words").textContent = words;
  grid.setAttribute("aria-label", words);
}

function blockWords(held, cached, shared) {
  const more = engine.shares ? `, ${shared} of them shared; ${cached.size} cached` : "";
  const hidden = engine.cells > engine.shown ? ` (the first ${engine.shown} are drawn)` : "";
  return `${held.size} of ${engine.cells} blocks held${more}${hidden}. A block is ${engine.cell} tokens.`;
}

function slabWords() {
  const { capacity, reserved, used } = seen;
  return `${reserved} of ${capacity} token slots reserved, ${used} of them hold a token. `
    + `A cell is ${engine.cell} slots.`;
}

let flashed = -1; // the step of the last copy that has been shown

/** Copy-on-write: both blocks light up, the new one longer. */
function flashCopies() {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  for (const [step, source, target] of seen.copied) {
    if (step <= flashed) continue;
    for (const [block, ms] of [[source, 500], [target, 1200]]) {
      const cell = byId("grid").children[block];
      if (!cell) continue;
      const ring = { outline: "3px solid var(--text)", outlineOffset: "-1px", zIndex: 1 };
      cell.animate([ring, { ...ring, outlineColor: calm ? "var(--text)" : "transparent" }], ms);
    }
    note(`block ${source} is copied to ${target}, to be written`);
  }
  flashed = Math.max(flashed, ...seen.copied.map(([step]) => step));
}

/** Cells as large as the room allows. */
function layOut() {
  const grid = byId("grid");
  if (!engine || engine.memory === "none") return;
  const room = Math.max(200, Math.min(440, innerHeight * 0.5));
  let size = 34;
  while (size > 7 && Math.ceil(engine.shown / Math.floor(grid.clientWidth / size)) * size > room) size--;
  grid.style.setProperty("--size", `${size}px`);
  grid.classList.toggle("tiny", size < 16);
}

function buildGrid() {
  const grid = byId("grid");
  painted.length = 0;
  if (engine.memory === "none") {
    grid.replaceChildren();
    byId("memory-words").textContent =
      "This stage keeps no K/V: for every token it computes all tokens before it again.";
    return;
  }
  grid.replaceChildren(...Array.from({ length: engine.shown }, () => document.createElement("div")));
  layOut();
}

addEventListener("resize", layOut);
