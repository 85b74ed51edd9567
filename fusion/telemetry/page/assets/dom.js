"use strict";
// Elements, numbers and colours. Every text becomes a text node, so data is never parsed as HTML.

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "style") for (const [property, text] of Object.entries(value)) made.style.setProperty(property, text);
    else if (typeof value === "function") made.addEventListener(key, value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A `div` of a class. */
function box(name, ...children) {
  return element("div", { class: name }, ...children);
}

function span(...children) {
  return element("span", {}, ...children);
}

function quiet(text) {
  return element("p", { class: "quiet" }, text);
}

function section(id, title, ...children) {
  return element("section", { id }, element("h2", {}, title), ...children);
}

/** A table in a box that scrolls sideways, so that the page itself never does. The first cell of a row is its name. */
function table(header, rows) {
  const cells = (tag, row) => row.map((cell, index) => element(index ? tag : "th", {}, cell));
  const head = element("thead", {}, element("tr", {}, ...cells("th", header)));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row))));
  return element("div", { class: "scroll", tabindex: "0" }, element("table", {}, head, body));
}

function swatch(colour) {
  return element("span", { class: "swatch", style: { background: colour } });
}

function seconds(value) {
  if (value < 9.995) return value.toFixed(2);
  return value < 999.95 ? value.toFixed(1) : value.toFixed(0);
}

function duration(value) {
  if (value < 9.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} m`;
}

function bytes(count) {
  if (!count) return "0";
  let [value, unit] = [count, ""];
  for (const next of "KMGTP") {
    if (value < 999.5) break;
    [value, unit] = [value / 1024, next];
  }
  if (!unit) return `${value} B`;
  return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}iB`;
}

function percent(share, digits = 0) {
  return `${(100 * share).toFixed(digits)}%`;
}

/** A number of an axis: short, without an exponent unless it would be long. */
function tick(value) {
  if (value === null || value === 0) return String(value ?? "");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const RUN_COLOURS = ["#2f6fde", "#e07b1f", "#2a9d5c", "#c23b5a", "#8458c9", "#11929e", "#a3722c", "#767f8f"];

function runColour(index) {
  return RUN_COLOURS[index % RUN_COLOURS.length];
}

const KIND_COLOURS = {
  train: "#2f6fde",
  optimizer: "#7aa5f0",
  decode: "#2a9d5c",
  prefill: "#86c99f",
  gen: "#b4d9a8",
  put: "#d0c14a",
  reference: "#8458c9",
  reward_model: "#b68ee0",
  switch: "#e07b1f",
  prepare: "#8a6d4d",
  save: "#c99a6b",
  restore: "#c99a6b",
  restart: "#c23b5a",
  wait_data: "rgba(128, 136, 150, 0.4)",
  wait_weights: "rgba(128, 136, 150, 0.6)",
  idle: "rgba(128, 136, 150, 0.15)",
};
const OTHER_COLOURS = ["#11929e", "#d05a9a", "#5d7f2e", "#4b5d8c", "#b0563b"];
const assigned = new Map();

/** The colour of a kind of work; a part such as `switch/kv` has that of the whole. */
function kindColour(kind) {
  const main = kind.split("/")[0];
  if (Object.hasOwn(KIND_COLOURS, main)) return KIND_COLOURS[main];
  if (!assigned.has(main)) assigned.set(main, OTHER_COLOURS[assigned.size % OTHER_COLOURS.length]);
  return assigned.get(main);
}

/** A `details` element that is open again after a reload, if it was. */
function remembered(key, attributes, ...children) {
  const made = element("details", attributes, ...children);
  made.addEventListener("toggle", () => view.set(`open/${key}`, made.open));
  made.open = view.values[`open/${key}`] ?? false;
  return made;
}

/** What a reader has set (smoothing, filter, …). A page that reloads itself keeps it for as long as its tab is open. */
const view = {
  values: {},
  restore() {
    try {
      this.values = JSON.parse(sessionStorage.getItem(location.pathname)) ?? {};
    } catch {
      this.values = {}; // no storage for files in this browser: the page works with its defaults
    }
  },
  set(name, value) {
    this.values[name] = value;
    try {
      sessionStorage.setItem(location.pathname, JSON.stringify(this.values));
    } catch {
      // as above
    }
  },
};
