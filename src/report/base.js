"use strict";
// Elements, numbers in words, colours and the state that the views share.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text, never markup. */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  return fill(node, attributes, children);
}

/** The same in SVG. */
function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  return fill(node, attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child);
  }
  return node;
}

/** Digits with thin grouping. */
function integer(value) {
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ",");
}

/** A number as short as reading it needs. */
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  if (size >= 1e4) return integer(value);
  return String(Number(value.toPrecision(4)));
}

/** All six digits. */
function exact(value) {
  return value === null || value === undefined ? "none" : String(value);
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0, rest = Math.abs(value);
  while (rest >= 1024 && unit < units.length - 1) { rest /= 1024; unit++; }
  const text = unit === 0 ? String(Math.round(rest)) : String(Number(rest.toPrecision(rest >= 1000 ? 4 : 3)));
  return (value < 0 ? "−" : "") + text + " " + units[unit];
}

/** Bytes rounded and to the byte. */
function bytesExact(value) {
  return value === null || value === undefined ? "not counted" : `${bytes(value)} (${integer(value)} B)`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return Number((value * 1e6).toPrecision(3)) + " µs";
  if (value < 1) return Number((value * 1e3).toPrecision(3)) + " ms";
  if (value < 120) return Number(value.toPrecision(3)) + " s";
  if (value < 7200) return (value / 60).toFixed(1) + " min";
  return (value / 3600).toFixed(1) + " h";
}

function percent(value) {
  if (value === null || value === undefined) return "–";
  // what smoothing leaves of a share that has long been 0
  if (value !== 0 && Math.abs(value) < 1e-5) return "below 0.001 %";
  return Number((value * 100).toPrecision(3)) + " %";
}

function plural(count, one, many) {
  return `${integer(count)} ${count === 1 ? one : many || one + "s"}`;
}

// Okabe and Ito's colours, which people with any colour vision tell apart; lighter on a dark page.
const RUN_COLOURS = [
  ["#0072b2", "#5ab4f0"], ["#d55e00", "#ff9248"], ["#009e73", "#3fcf9f"], ["#b0568c", "#e8a0cb"],
  ["#a87400", "#f0b93a"], ["#2b8ccb", "#9bd8ff"], ["#555555", "#bbbbbb"], ["#7a6a00", "#f0e442"],
];
const DASHES = [null, "7 3", "2 3", "9 3 2 3"];

// Paul Tol's muted colours for what holds memory, and for phases.
const HOLDERS = {
  parameters: ["#332288", "#8b7ff0"], master_weights: ["#6f5fc9", "#b9b1ff"], gradients: ["#cc6677", "#e88493"],
  moments: ["#44aa99", "#56c2b0"], kept_inputs: ["#ddcc77", "#d9c86e"], live_graph: ["#e8973a", "#f0a653"],
  attention: ["#882255", "#cf5d97"], head: ["#aa4499", "#d585c9"], kv_cache: ["#117733", "#4fb573"],
  reference: ["#88ccee", "#8fd0f2"], critic: ["#999933", "#c4c45a"], reward_model: ["#6699cc", "#7fb0e0"],
  buffers: ["#b5a58c", "#b5a58c"], communication: ["#661100", "#c0664f"], overhead: ["#9a9a9a", "#8a8a8a"],
  "in no account": ["#d0d0d0", "#5c6068"],
};
const PHASE_COLOURS = {
  gen: ["#117733", "#4fb573"], reward: ["#ddcc77", "#d9c86e"], gen_max: ["#66aa55", "#8fd07c"],
  reward_max: ["#b5a58c", "#b5a58c"], old_log_prob: ["#88ccee", "#8fd0f2"], ref: ["#6699cc", "#7fb0e0"],
  values: ["#999933", "#c4c45a"], adv: ["#aa4499", "#d585c9"], update_critic: ["#cc6677", "#e88493"],
  update_actor: ["#332288", "#8b7ff0"], testing: ["#44aa99", "#56c2b0"], testing_reward: ["#882255", "#cf5d97"],
  val_loss: ["#e8973a", "#f0a653"], warmup: ["#6f5fc9", "#b9b1ff"],
};
// What a phase does, for those who do not know verl's names.
const PHASE_WORDS = {
  gen: "sampling", reward: "rewards", gen_max: "greedy sampling", reward_max: "its rewards",
  old_log_prob: "old log-probs", ref: "reference log-probs", values: "values", adv: "advantages",
  update_critic: "critic's update", update_actor: "policy's update", testing: "validation",
  testing_reward: "validation's rewards", val_loss: "validation loss", warmup: "supervised warm-up",
};

const STATE = { view: null, run: 0, smooth: null, axis: "step", log: false, repeats: true, hidden: new Set() };

/** Whether the page is dark: as chosen, else as the system has it. */
function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function tone(pair) { return (pair || ["#777777", "#999999"])[dark() ? 1 : 0]; }
function runColour(index) { return tone(RUN_COLOURS[index % RUN_COLOURS.length]); }
function runDash(index) { return DASHES[Math.floor(index / RUN_COLOURS.length) % DASHES.length]; }
function holderColour(name) { return tone(HOLDERS[name]); }
function phaseColour(name) { return tone(PHASE_COLOURS[name]); }

/** A table; cells may be elements. Numbers stand right. On a narrow page each row of a wide one becomes a card. */
function table(header, rows, caption) {
  const numeric = header.map((_, c) => rows.length > 0 && rows.every((row) => /^[\d\s.,+\-−–%]/.test(String(row[c])) && typeof row[c] !== "object"));
  const cell = (tag, value, c, scope) => el(tag, { class: numeric[c] ? "number" : null, scope, "data-label": tag === "td" ? header[c] : null }, value);
  const length = (value) => (value && value.textContent !== undefined ? value.textContent : String(value)).length;
  const widths = header.map((name, c) => Math.max(name.length, ...rows.map((row) => length(row[c]))));
  const wide = widths.reduce((sum, own) => sum + own, 0) > 46;
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": caption || header.join(", ") },
    el("table", { class: wide ? "cards" : null },
      caption && el("caption", null, caption),
      el("thead", null, el("tr", null, header.map((name, c) => cell("th", name, c, "col")))),
      el("tbody", null, rows.map((row) => el("tr", null, row.map((value, c) => c === 0 ? cell("th", value, c, "row") : cell("td", value, c)))))));
}

function swatch(colour, dash) {
  const line = svg("line", { x1: 0, y1: 5, x2: 22, y2: 5, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash });
  return svg("svg", { width: 22, height: 10, class: "swatch", "aria-hidden": "true" }, line);
}

function block(colour) { return el("span", { class: "block", style: { background: colour }, "aria-hidden": "true" }); }

function legend(items) {
  return el("ul", { class: "legend" }, items.map(([mark, text]) => el("li", null, mark, " ", text)));
}

/** A control with its label. */
function labelled(text, control) { return el("label", { class: "control" }, el("span", null, text), control); }

function select(options, value, change) {
  const box = el("select", { onchange: () => change(box.value) },
    options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return box;
}

/** A run to choose where a view shows one at a time. */
function runChoice(redraw) {
  if (RUNS.length < 2) return null;
  const options = RUNS.map((run, at) => [String(at), run.name]);
  return labelled("Run", select(options, String(STATE.run), (value) => { STATE.run = Number(value); redraw(); }));
}

/** One line that says why something is not shown. */
function absent(text) { return el("p", { class: "absent" }, text); }

function noteOf(run, file) { return run.notes.find((note) => note.includes(file)) || `${file} has no data for this.`; }
