"use strict";
// Runs that can be stepped through.  What `report_events.py` wrote is all that is known here; nothing is fetched.

const ROW = 20, GAP = 3;      // of the memory map, pixels
const SEAT = 9, CURVE = 46;   // of the history: one place of the batch, and the memory above them
const TICKS = 400;            // positions of the slider when it stands for seconds
const COLORS = 8;

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const many = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
const rect = (kind, x, y, width, height, more = "") => width <= 0 || height <= 0 ? ""
  : `<rect class="${kind}" x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${width.toFixed(2)}" height="${height.toFixed(2)}"${more}/>`;
const common = (a, b) => b ? common(b, a % b) : a;

/** One engine's run: questions about its forwards. */
class Run {
  constructor(name, events) {
    Object.assign(this, events, {name});
    this.length = this.seconds.length;
    this.top = this.stays.reduce((top, [, start, , , pieces]) => Math.max(top, ...pieces.map((piece) => start + piece[3])), 0);
    this.shown = this.capacity;  // slots of the map
  }
  /** Leave out of the map what nobody ever needed, if that is more than half of it. */
  crop(top) {
    if (top < this.capacity / 2) this.shown = Math.max(top, 1);
  }
  color(who) { return this.who[who][1] % COLORS; }
  /** The forward that was running at a time; the last one once all is over. */
  forwardAt(time) {
    const next = this.seconds.findIndex((end) => end > time);
    return next < 0 ? this.length : next;
  }
  /** Who sat in the batch at a forward. */
  seated(forward) {
    return this.seats.filter(([, , first, last]) => first <= forward && forward <= last);
  }
  /** What lay in memory at a forward. */
  held(forward) {
    return this.stays.filter(([, , first, last]) => first <= forward && forward <= last).map(([who, start, , , pieces]) => {
      const [begin, used, growth, reserved] = pieces.findLast((piece) => piece[0] <= forward);
      return {who, start, used: used + growth * (forward - begin), reserved};
    });
  }
  /** Token slots in one row of the map: whole blocks, so that none is broken. */
  get rowLength() {
    const unit = this.stays.reduce((unit, [, start, , , pieces]) => common(unit, common(start, pieces[0][3])), this.shown);
    const rows = Math.min(12, Math.max(4, Math.round(Math.sqrt(this.shown / 24))));
    return unit * Math.ceil(this.shown / rows / unit);
  }
  words(forward) {
    const seated = this.seated(forward), prompts = seated.filter((seat) => seat[4] > 1).length;
    const [unit, name] = this.capacity * this.bytes_per_token < 4 * 2 ** 20 ? [2 ** 10, "KiB"] : [2 ** 20, "MiB"];
    const bytes = (slots) => (slots * this.bytes_per_token / unit).toFixed(1);
    const memory = this.capacity
      ? `${bytes(this.reserved[forward])} of ${bytes(this.capacity)} ${name} reserved, ${bytes(this.live[forward])} live`
      : "keeps no K/V";
    return `Forward ${forward + 1} of ${this.total}, ${this.seconds[forward].toFixed(2)} s: ${seated.length} of `
      + `${many(this.places, "place")} busy (${many(prompts, "prompt")}), ${this.waiting[forward]} waiting, `
      + `${this.ends.filter(([at]) => at < forward).length} ended; ${memory}.`;
  }
}

/** The pictures of one run, in an element of its own. */
class Board {
  constructor(run, onPick) {
    this.run = run;
    this.forward = 0;
    this.element = document.createElement("section");
    this.element.className = "board";
    const cropped = run.shown < run.capacity ? `<small>The first ${run.shown.toLocaleString("en")} of `
      + `${run.capacity.toLocaleString("en")} slots: nobody needed more.</small>` : "";
    this.element.innerHTML = `<h4>${escaped(run.name)}</h4><p></p><svg class="map" role="img"></svg>${cropped}`
      + '<svg class="history" role="img"></svg><details><summary>This step as a table</summary><div class="scroll"></div></details>';
    [this.words, this.map, this.history, this.table] = ["p", ".map", ".history", "details"].map((s) => this.element.querySelector(s));
    this.map.toggleAttribute("hidden", !run.capacity);
    this.table.addEventListener("toggle", () => this.fillTable());
    this.history.addEventListener("pointerdown", (event) => {
      const box = this.history.getBoundingClientRect();
      onPick(run, Math.floor((event.clientX - box.left) / box.width * run.length));
    });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }
  get width() { return this.element.clientWidth - 24; }

  /** Everything anew, at the width that there is. */
  draw() {
    if (!this.run.length) this.words.textContent = "No forwards.";
    if (this.width <= 0 || !this.run.length) return;
    this.drawHistory();
    this.show(this.forward);
  }
  show(forward) {
    const run = this.run, over = forward >= run.length;
    this.forward = forward;
    const shown = Math.min(forward, run.length - 1);
    if (shown < 0 || !this.cursor) return;  // drawn once it has a width
    this.words.textContent = run.words(shown) + (over ? " All have ended." : "");
    if (run.capacity) this.drawMap(shown);
    this.cursor.setAttribute("x", (shown / run.length * this.width).toFixed(2));
    this.fillTable();
  }
  drawMap(forward) {
    const run = this.run, length = run.rowLength, scale = this.width / length;
    const rows = Math.ceil(run.shown / length), height = rows * (ROW + GAP);
    const stretch = (kind, from, to) => {
      let drawn = "";
      for (let at = from; at < to;) {
        const row = Math.floor(at / length), end = Math.min(to, (row + 1) * length);
        drawn += rect(kind, (at - row * length) * scale, row * (ROW + GAP), (end - at) * scale, ROW);
        at = end;
      }
      return drawn;
    };
    const held = run.held(forward);
    const names = held.map(({who, start, used, reserved}) => {
      const left = start % length, wide = Math.min(reserved, length - left), name = run.who[who][0];
      if (wide * scale < 7 * name.length + 5) return "";
      const ground = used > wide / 2 ? `on${run.color(who)}` : "";  // else it stands on the hatch
      return `<text class="in ${ground}" x="${((left + wide / 2) * scale).toFixed(1)}" `
        + `y="${Math.floor(start / length) * (ROW + GAP) + 14}">${escaped(name)}</text>`;
    });
    this.map.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.map.setAttribute("aria-label", `KV memory, the first ${run.shown} of ${run.capacity} token slots. ${run.words(forward)}`);
    this.map.innerHTML = stretch("free", 0, run.shown) + held.map(({who, start, used, reserved}) => {
      const color = run.color(who);
      return stretch(`h${color} edge`, start + used, start + reserved) + stretch(`r${color} edge`, start, start + used);
    }).join("") + names.join("");
  }
  drawHistory() {
    const run = this.run, scale = this.width / run.length, top = run.capacity ? CURVE + 8 : 0;
    const height = top + run.places * SEAT;
    const curve = (kind, slots) => {
      const y = (count) => (CURVE * (1 - count / run.shown)).toFixed(1);
      const path = slots.map((count, at) => `H${(at * scale).toFixed(1)}V${y(count)}H${((at + 1) * scale).toFixed(1)}`);
      return `<path class="${kind}" d="M0 ${CURVE}${path.join("")}V${CURVE}Z"/>`;
    };
    const memory = run.capacity
      ? rect("free", 0, 0, this.width, CURVE) + curve("reserved", run.reserved) + curve("live", run.live) : "";
    const seats = run.seats.map(([who, row, first, last, tokens]) => {
      const inset = tokens > 1 ? .5 : 1.5, width = (last - first + 1) * scale;
      const edge = tokens > 1 && width >= 3 ? " prompt" : "";  // thinner ones would be nothing but edge
      return rect(`r${run.color(who)}${edge}`, first * scale, top + row * SEAT + inset, width, SEAT - 2 * inset);
    });
    this.history.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.history.setAttribute("aria-label", `${run.name}: ${many(run.length, "forward")} from left to right; `
      + `${run.capacity ? "above, KV memory reserved and live; below, " : ""}one row per place of the batch. ${this.summary()}`);
    this.history.innerHTML = memory + rect("idle", 0, top, this.width, run.places * SEAT) + seats.join("")
      + rect("cursor", 0, 0, Math.max(scale, 2), height);
    this.cursor = this.history.querySelector(".cursor");
  }
  summary() {
    const run = this.run, busy = run.seats.reduce((sum, [, , first, last]) => sum + last - first + 1, 0);
    return `${Math.round(100 * busy / (run.places * run.length || 1))} percent of the places are busy.`;
  }
  fillTable() {
    if (!this.table.open || !this.run.length) return;
    const run = this.run, forward = Math.min(this.forward, run.length - 1), rows = new Map();
    const row = (who) => rows.get(who) ?? rows.set(who, {place: "", tokens: 0, used: 0, reserved: 0}).get(who);
    for (const [who, place, , , tokens] of run.seated(forward)) Object.assign(row(who), {place, tokens});
    for (const {who, used, reserved} of run.held(forward)) {
      row(who).used += used;
      row(who).reserved += reserved;
    }
    const head = ["request", "place", "tokens computed", "slots reserved", "slots live"];
    this.table.querySelector("div").innerHTML = `<table><thead><tr>${head.map((h) => `<th scope="col">${h}</th>`).join("")}</tr></thead><tbody>`
      + [...rows].map(([who, r]) => `<tr><th scope="row">${escaped(run.who[who][0])}</th><td>${r.place}</td><td>${r.tokens}</td>`
        + `<td>${r.reserved}</td><td>${r.used}</td></tr>`).join("") + "</tbody></table>";
  }
}

/** Several runs under one slider. */
class Player {
  constructor(element) {
    const runs = Object.entries(JSON.parse(element.querySelector("script").textContent)).map(([name, e]) => new Run(name, e));
    for (const run of runs) run.crop(Math.max(...runs.filter((other) => other.capacity === run.capacity).map(({top}) => top)));
    const shown = runs.some((run) => run.capacity) ? runs.filter((run) => run.capacity) : runs;
    element.insertAdjacentHTML("beforeend", `<div class="controls"><button type="button" class="back" aria-label="One step back">‹</button>
      <button type="button" class="play">Play</button><button type="button" class="on" aria-label="One step on">›</button>
      <input type="range" min="0" step="1" aria-label="Step"><output></output></div>
      <fieldset class="choices" aria-label="What is shown">${runs.map((run, n) => `<label><input type="checkbox" name="${n}"
        ${shown.includes(run) ? "checked" : ""}>${escaped(run.name)}</label>`).join("")}
      <label><input type="checkbox" class="clock">all at the same second</label></fieldset>
      <ul class="keys"><li>${Player.key("r0")}holds a token's K/V</li><li>${Player.key("h0")}reserved: empty, or its request has ended</li>
      <li>${Player.key("free")}free</li><li>${Player.key("r0 prompt")}several tokens at once (prompt)</li>
      <li>${Player.key("idle")}idle place</li><li>${Player.key("reserved")}whole run: reserved</li>
      <li>${Player.key("live")}whole run: live</li></ul>
      <div class="boards"></div>`);
    const find = (selector) => element.querySelector(selector);
    [this.slider, this.output, this.button, this.clock] = ["[type=range]", "output", ".play", ".clock"].map(find);
    this.boards = runs.map((run) => new Board(run, (run, forward) => this.pick(run, forward)));
    find(".boards").append(...this.boards.map((board) => board.element));
    find(".back").onclick = () => this.go(this.position - 1);
    find(".on").onclick = () => this.go(this.position + 1);
    this.button.onclick = () => this.timer ? this.stop() : this.play();
    this.slider.oninput = () => this.go(this.slider.valueAsNumber);
    find(".choices").onchange = (event) => this.choose(event.target);
    this.boxes = runs.map((run, n) => find(`[name="${n}"]`));
    this.choose(null);
    this.go(Math.floor(this.last / 3));
  }
  static key(kind) { return `<svg viewBox="0 0 22 14" aria-hidden="true"><rect class="${kind}" x="1" y="1" width="20" height="12"/></svg>`; }

  get position() { return this.slider.valueAsNumber; }
  get last() { return Number(this.slider.max); }
  get shown() { return this.boards.filter((board, n) => this.boxes[n].checked); }

  /** The time that a position of the slider stands for, when it goes by the clock. */
  time(position) {
    return position / TICKS * Math.max(...this.shown.map(({run}) => run.seconds.at(-1) ?? 0));
  }
  choose(box) {
    const time = box === this.clock && this.clock.checked ? this.shown[0]?.run.seconds[this.position] : null;
    this.boards.forEach((board, n) => board.element.toggleAttribute("hidden", !this.boxes[n].checked));
    this.slider.max = this.clock.checked ? TICKS : Math.max(0, ...this.shown.map(({run}) => run.length - 1));
    this.go(time ? Math.round(time / this.time(1)) : this.position);
  }
  go(position) {
    this.slider.value = position;  // the browser keeps it between its ends
    const at = this.position, words = this.clock.checked ? `${this.time(at).toFixed(2)} s` : `forward ${at + 1} of ${this.last + 1}`;
    this.output.textContent = words;
    this.slider.setAttribute("aria-valuetext", words);
    for (const board of this.shown) board.show(this.clock.checked ? board.run.forwardAt(this.time(at)) : at);
  }
  pick(run, forward) {
    this.stop();
    this.go(this.clock.checked ? Math.round(run.seconds[forward] / this.time(1)) : forward);
  }
  play() {
    if (this.position >= this.last) this.go(0);
    const stride = Math.max(1, Math.round(this.last / 150));
    this.button.textContent = "Pause";
    this.timer = setInterval(() => {
      this.go(this.position + stride);
      if (this.position >= this.last) this.stop();
    }, 120);
  }
  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.button.textContent = "Play";
  }
}

const theme = document.getElementById("theme"), root = document.documentElement;
theme.hidden = false;
theme.onclick = () => {
  const dark = getComputedStyle(root).colorScheme.trim() === "dark"
    || (!root.style.colorScheme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.style.colorScheme = dark ? "light" : "dark";
};
document.querySelectorAll(".player").forEach((element) => new Player(element));
