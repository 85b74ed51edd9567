// Where every card's time went: a table, and a strip per card that can be zoomed.

const AXIS = 20;

class Strips {
  constructor(cards, name, row = 18, label = 64) {
    [this.cards, this.key, this.row, this.label] = [cards, `strip/${name}`, row, label];
    this.strips = cards.strips.map((strip) => ({ ...strip, ends: runningSum(strip.us) }));
    [this.from, this.to] = view.values[this.key] ?? [0, cards.wall_us];
    this.dragged = null;
    this.canvas = element("canvas", {
      class: "strips",
      role: "img",
      "aria-label": "activities of every card over time; the table has the sums",
      mousemove: (event) => this.move(event),
      mouseleave: () => this.read(null),
      mousedown: (event) => (this.dragged = [this.time(event), this.time(event)]),
      dblclick: () => this.show(0, this.cards.wall_us),
    });
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    window.addEventListener("mouseup", () => this.release());
    this.readout = element("output", { class: "readout" });
    const button = (text, label, act) =>
      element("button", { type: "button", click: act, "aria-label": label, title: label }, text);
    const controls = box(
      "controls",
      button("+", "zoom in", () => this.zoom(0.5, (this.from + this.to) / 2)),
      button("−", "zoom out", () => this.zoom(2, (this.from + this.to) / 2)),
      button("←", "earlier", () => this.shift(-0.5)),
      button("→", "later", () => this.shift(0.5)),
      button("all", "show the whole run", () => this.show(0, this.cards.wall_us)),
      element("span", { class: "quiet" }, "drag to zoom, Ctrl and wheel, or the buttons"),
    );
    this.selected = element("span", { class: "selected" });
    this.box = box("strip-box", controls, box("drawing", this.canvas, this.selected), this.readout);
    nearby.observe(this.box);
    onScreen.set(this.box, () => this.draw());
    this.read(null);
  }

  get scale() {
    return (this.canvas.clientWidth - this.label) / (this.to - this.from);
  }

  time(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left - this.label;
    return Math.min(this.to, Math.max(this.from, this.from + x / this.scale));
  }

  show(from, to) {
    const length = Math.max(10, Math.min(to - from, this.cards.wall_us));
    this.from = Math.max(0, Math.min(from, this.cards.wall_us - length));
    this.to = this.from + length;
    view.set(this.key, length < this.cards.wall_us ? [this.from, this.to] : null);
    this.draw();
  }

  zoom(factor, around) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  shift(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  wheel(event) {
    if (!event.ctrlKey) return; // without Ctrl, the wheel scrolls the page
    event.preventDefault();
    this.zoom(Math.exp(event.deltaY / 300), this.time(event));
  }

  move(event) {
    if (this.dragged) {
      this.dragged[1] = this.time(event);
      this.mark();
    }
    this.read(event);
  }

  release() {
    if (!this.dragged) return;
    const [from, to] = this.dragged.sort((a, b) => a - b);
    this.dragged = null;
    this.mark();
    if ((to - from) * this.scale > 4) this.show(from, to);
  }

  /** Writes what the card under the pointer did at that time. */
  read(event) {
    if (!event) {
      const shown = this.cards.num_cards > this.strips.length ? `, ${this.strips.length} of ${this.cards.num_cards} cards` : "";
      const blur = this.cards.blur_us ? `; runs are shifted by up to ${(this.cards.blur_us / 1e6).toFixed(2)} s` : "";
      this.readout.textContent = `${seconds(this.from / 1e6)} s – ${seconds(this.to / 1e6)} s${shown}${blur}`;
      return;
    }
    const row = Math.floor((event.clientY - this.canvas.getBoundingClientRect().top) / this.row);
    const strip = this.strips[row];
    if (!strip) return;
    const at = firstAfter(strip.ends, this.time(event));
    if (at >= strip.us.length) return;
    const share = ([kind, part]) => this.cards.strip_kinds[kind] + (part < 1 ? ` ${percent(part)}` : "");
    const kind = partsOf(strip, at).map(share).join(", ");
    const begin = strip.ends[at] - strip.us[at];
    const length = (strip.us[at] / 1e6).toPrecision(3);
    this.readout.textContent = `${strip.card}: ${kind}, ${length} s from ${(begin / 1e6).toFixed(3)} s on`;
  }

  draw() {
    const [width, height] = [this.canvas.clientWidth, this.strips.length * this.row + AXIS];
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.setProperty("height", `${height}px`);
    [this.canvas.width, this.canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.fillStyle = themed("--text");
    this.strips.forEach((strip, row) => pen.fillText(strip.card.slice(0, this.label / 5.6), 0, (row + 0.5) * this.row));
    this.drawRuns(pen);
    this.drawAxis(pen, width, height);
    this.read(null);
  }

  /** Draws the visible runs kind by kind, as a change of colour costs more than a rectangle. */
  drawRuns(pen) {
    const rectangles = this.cards.strip_kinds.map(() => []);
    const scale = this.scale;
    this.strips.forEach((strip, row) => {
      for (let at = firstAfter(strip.ends, this.from); at < strip.us.length; at++) {
        const end = strip.ends[at];
        const begin = end - strip.us[at];
        if (begin >= this.to) break;
        const left = this.label + (Math.max(begin, this.from) - this.from) * scale;
        const right = this.label + (Math.min(end, this.to) - this.from) * scale;
        let bottom = (row + 1) * this.row - 1;
        for (const [kind, share] of partsOf(strip, at)) {
          const height = share * (this.row - 2);
          rectangles[kind].push(left, (bottom -= height), right - left, height);
        }
      }
    });
    rectangles.forEach((sides, kind) => {
      pen.fillStyle = kindColour(this.cards.strip_kinds[kind]);
      for (let at = 0; at < sides.length; at += 4) pen.fillRect(...sides.slice(at, at + 4));
    });
  }

  /** Marks the part that is dragged over, above the canvas. */
  mark() {
    const [from, to] = this.dragged ?? [this.from, this.from];
    const left = this.label + (Math.min(from, to) - this.from) * this.scale;
    this.selected.style.setProperty("left", `${left}px`);
    this.selected.style.setProperty("width", `${Math.abs(to - from) * this.scale}px`);
  }

  drawAxis(pen, width, height) {
    const step = niceStep((this.to - this.from) / 1e6 / Math.max(2, (width - this.label) / 90));
    pen.fillStyle = pen.strokeStyle = themed("--quiet");
    for (let time = Math.ceil(this.from / 1e6 / step) * step; time <= this.to / 1e6; time += step) {
      const x = this.label + (time * 1e6 - this.from) * this.scale;
      pen.fillRect(x, height - AXIS, 1, 4);
      pen.fillText(`${Number(time.toPrecision(6))} s`, Math.min(x, width - 42), height - AXIS / 2 + 2);
    }
    for (const start of this.cards.starts_us.filter((time) => time > this.from && time < this.to)) {
      pen.fillRect(this.label + (start - this.from) * this.scale, 0, 2, height - AXIS); // the run was resumed
    }
  }
}

/** Kinds of a run of a strip, each with its share of the cards; that of a single card is of one kind. */
function partsOf(strip, at) {
  return strip.parts ? strip.parts[at] : [[strip.kind[at], 1]];
}

function runningSum(lengths) {
  let total = 0;
  return Float64Array.from(lengths, (length) => (total += length));
}

/** The index of the first element of an ascending array above a value. */
function firstAfter(ascending, value) {
  let [low, high] = [0, ascending.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}

const strips = new Set();

function drawStrips() {
  for (const strip of strips) strip.draw();
}

function legendOf(cards) {
  const kinds = cards.kinds.map(({ kind }) => span(swatch(kindColour(kind)), kind));
  return element("p", { class: "legend" }, ...kinds);
}

/** A typical step of every run, on one axis of time: a lane is the mean over the cards that do the same. */
function typicalSection(typical) {
  if (!typical) return null;
  const drawn = new Strips(typical, "typical", 40, Math.min(260, 60 + 5.6 * Math.max(...typical.strips.map(({ card }) => card.length)) - 50));
  strips.add(drawn);
  const note = "From one update of the weights to the next, the median step of each run. A lane is the mean over its cards.";
  return section("typical", "A typical step", quiet(note), legendOf(typical), drawn.box);
}

function cardsOf(run) {
  const cards = run.cards;
  const drawn = new Strips(cards, run.name);
  strips.add(drawn);
  const rows = cards.kinds.map(({ kind, share }) => [
    span(swatch(kindColour(kind)), kind),
    percent(share, 1),
    ...cards.table.map((card) => seconds(card.seconds[kind] ?? 0)),
  ]);
  rows.push(["wall", "", ...cards.table.map((card) => seconds(card.wall_s))]);
  rows.push(["busy", "", ...cards.table.map((card) => percent(card.busy))]);
  const header = ["seconds", "share", ...cards.table.map(({ card }) => card)];
  return [legendOf(cards), drawn.box, table(header, rows)];
}
