// Curves: every metric of every step, all runs over each other.

// What tells how a run does; the loss of a policy gradient does not.
const HEADLINES = [
  ["critic/score/mean", "Reward", "mean of the step's samples", short],
  ["val-core", "Validation", "mean reward on held-out prompts", short],
  ["val/loss", "Validation loss", "nats a token on held-out examples", short],
  ["response_length/clip_ratio", "Truncated", "share of completions that ended at the length limit", percent],
  ["frac_reward_zero_std", "Groups without spread", "share of groups whose rewards are all equal, which teach nothing", percent],
  ["actor/entropy", "Entropy", "nats a token", short],
  ["training/rollout_probs_diff_mean", "Sampler and trainer apart", "mean difference of a token's probability", short],
  ["actor/grad_norm", "Gradient norm", "before clipping", short],
  ["response_length/mean", "Response length", "tokens", short],
];

/** The run's metric that a headline means. */
function headlineName(name) {
  if (name !== "val-core") return name;
  const all = RUNS.flatMap((run) => Object.keys(run.metrics.columns));
  const core = all.filter((other) => other.startsWith("val-core/"));
  return core.find((other) => other.endsWith("/reward")) || core[0] || name;
}

function column(run, name) { return run.metrics.columns[name] || null; }

function metricNames() {
  return [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics.columns)))].sort();
}

/** The unit of a metric, as far as its name tells. */
function unitOf(name) {
  if (name.startsWith("timing_s/") || name === "perf/time_per_step") return "s";
  if (name.startsWith("timing_per_token_ms/")) return "ms/token";
  if (name.endsWith("_gb")) return "GiB";
  if (name.endsWith("tokens_per_second") || name === "perf/throughput") return "tokens/s";
  if (name.endsWith("_bytes")) return "bytes";
  if (/length\/(mean|max|min)$|tokens$|token_budget$|largest_micro_batch$/.test(name)) return "tokens";
  if (/entropy$|ppo_kl$|kl_loss$|val\/loss$/.test(name)) return "nats";
  return "";
}

/** Exponential mean without the bias of its start, as TensorBoard's; values that are missing stay missing. */
function smoothed(ys, weight) {
  if (!weight) return ys;
  let mean = 0, total = 0;
  return ys.map((y) => {
    if (y === null) return null;
    mean = mean * weight + y * (1 - weight);
    total = total * weight + (1 - weight);
    return mean / total;
  });
}

function smoothing() {
  if (STATE.smooth !== null) return STATE.smooth;
  const longest = Math.max(0, ...RUNS.map((run) => run.metrics.steps.length));
  return longest > 60 ? 0.9 : longest > 20 ? 0.6 : 0;
}

/** The weight for a metric: unless it was chosen, one with few values, as a validation's, is shown as it is. */
function weightOf(name) {
  if (STATE.smooth !== null) return STATE.smooth;
  if (!COUNTS.has(name)) COUNTS.set(name, Math.max(0, ...RUNS.map((run) => (column(run, name) || []).filter((y) => y !== null).length)));
  return COUNTS.get(name) <= 60 ? 0 : smoothing();
}
const COUNTS = new Map();

/** What stands along the x axis: steps, or what had passed or been processed by them. */
const AXES = {
  step: { label: "step", format: short, of: (run) => run.metrics.steps },
  time: { label: "time of training steps", format: seconds, of: (run) => sums(run, "timing_s/step") },
  tokens: { label: "tokens sampled and trained on", format: short, of: (run) => sums(run, "perf/total_num_tokens") },
};

function sums(run, name) {
  let sum = 0;
  return (column(run, name) || run.metrics.steps.map(() => null)).map((value) => (sum += value || 0));
}

/** A run's points of a metric, those without a value left out. */
function points(run, name) {
  const ys = column(run, name);
  if (!ys) return null;
  const all = AXES[STATE.axis].of(run), xs = [], values = [];
  ys.forEach((y, at) => { if (y !== null) { xs.push(all[at]); values.push(y); } });
  return xs.length ? { xs, ys: values, smooth: smoothed(values, weightOf(name)) } : null;
}

/** Runs that repeat each other, by the first of them; only where there are several. */
function repeated() {
  const sets = new Map();
  RUNS.forEach((run, at) => { if (!STATE.hidden.has(at)) sets.set(run.repeats, [...(sets.get(run.repeats) || []), at]); });
  return [...sets].filter(([, members]) => members.length > 1);
}

/** Mean and range of several runs where all of them have a value. */
function meanAndRange(members, name) {
  const all = members.map((at) => points(RUNS[at], name)).filter(Boolean);
  if (all.length < 2 || STATE.axis !== "step") return null;
  const values = new Map();
  for (const { xs, smooth } of all) xs.forEach((x, at) => values.set(x, [...(values.get(x) || []), smooth[at]]));
  const xs = [...values.keys()].filter((x) => values.get(x).length === all.length).sort((a, b) => a - b);
  const of = (pick) => xs.map((x) => pick(values.get(x)));
  return {
    xs, runs: all.length, mean: of((v) => v.reduce((a, b) => a + b, 0) / v.length),
    lows: of((v) => Math.min(...v)), highs: of((v) => Math.max(...v)),
  };
}

/** Lines and areas of a metric. */
function curve(name) {
  const lines = [], areas = [], told = [];
  const sets = STATE.repeats ? repeated() : [];
  const inSet = new Set();
  for (const [first, members] of sets) {
    const range = meanAndRange(members, name);
    if (!range || !range.xs.length) continue;
    members.forEach((at) => inSet.add(at));
    areas.push({ xs: range.xs, lows: range.lows, highs: range.highs, colour: runColour(first), opacity: 0.18 });
    lines.push({ xs: range.xs, ys: range.mean, colour: runColour(first), width: 2.4 });
    told.push({ first, range });
  }
  RUNS.forEach((run, at) => {
    const own = STATE.hidden.has(at) ? null : points(run, name);
    if (!own) return;
    const set = inSet.has(at), colour = runColour(at), dash = runDash(at);
    if (own.smooth !== own.ys && !set) lines.push({ xs: own.xs, ys: own.ys, colour, opacity: 0.22, width: 1 });
    lines.push({ xs: own.xs, ys: own.smooth, colour, dash, opacity: set ? 0.45 : 1, width: set ? 1 : 1.8 });
  });
  return { lines, areas, told };
}

function tellCurve(name, xs, told, format) {
  return (at) => {
    const rows = [];
    for (const { first, range } of told) {
      const here = range.xs.indexOf(xs[at]);
      if (here >= 0) rows.push([swatch(runColour(first)), `mean of ${range.runs} seeds`, `${exact(Number(range.mean[here].toPrecision(6)))} (${exact(Number(range.lows[here].toPrecision(6)))} to ${exact(Number(range.highs[here].toPrecision(6)))})`]);
    }
    RUNS.forEach((run, index) => {
      const own = STATE.hidden.has(index) ? null : points(run, name);
      if (!own) return;
      const near = nearest(own.xs, xs[at]);
      if (STATE.axis === "step" && own.xs[near] !== xs[at]) return;
      const mean = own.smooth !== own.ys ? `, smoothed ${exact(Number(own.smooth[near].toPrecision(6)))}` : "";
      rows.push([swatch(runColour(index), runDash(index)), run.name, exact(own.ys[near]) + mean]);
    });
    const axis = AXES[STATE.axis];
    return { heading: `${axis.label} ${STATE.axis === "step" ? xs[at] : axis.format(xs[at])}`, rows };
  };
}

function curveChart(name, title, note, format, height) {
  const unit = unitOf(name);
  const text = unit ? `${title} (${unit})` : title;
  return chart(text, () => {
    const { lines, areas, told } = curve(name);
    const all = [...new Set(RUNS.flatMap((run, at) => (STATE.hidden.has(at) ? [] : (points(run, name) || { xs: [] }).xs)))].sort((a, b) => a - b);
    const axis = AXES[STATE.axis];
    return {
      height: height || 190, lines, areas,
      x: { label: axis.label, format: axis.format, whole: STATE.axis === "step" },
      y: { format: unit === "bytes" ? bytes : format || short, bytes: unit === "bytes", log: STATE.log, room: unit === "bytes" ? 72 : 56 },
      cursor: { xs: all, tell: tellCurve(name, all, told, format) },
    };
  }, note);
}

/** The runs' names as a legend whose entries hide and show them. */
function runLegend() {
  if (RUNS.length < 2) return null;
  const item = (run, at) => el("button", {
    type: "button", class: "run", "aria-pressed": String(!STATE.hidden.has(at)), title: "Hide or show this run",
    onclick: (event) => {
      if (!STATE.hidden.delete(at)) STATE.hidden.add(at);
      event.currentTarget.setAttribute("aria-pressed", String(!STATE.hidden.has(at)));
      redrawCharts();
    },
  }, swatch(runColour(at), runDash(at)), " ", run.name);
  const sets = repeated().map(([first, members]) => el("span", { class: "seeds" }, block(runColour(first)), ` mean and range of ${members.length} seeds: ${members.map((at) => RUNS[at].name).join(", ")}`));
  return el("div", { class: "runs", role: "group", "aria-label": "Runs" }, RUNS.map(item), STATE.repeats ? sets : null);
}

function curveControls() {
  const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: smoothing(), "aria-label": "Smoothing" });
  const shown = el("output", null, smoothing().toFixed(2));
  slider.addEventListener("input", () => { STATE.smooth = Number(slider.value); shown.textContent = STATE.smooth.toFixed(2); redrawCharts(); });
  const log = el("input", { type: "checkbox", checked: STATE.log, onchange: () => { STATE.log = log.checked; redrawCharts(); } });
  const axis = select([["step", "steps"], ["time", "time"], ["tokens", "tokens"]], STATE.axis, (value) => { STATE.axis = value; redrawCharts(); });
  const parts = [labelled("Smoothing", el("span", { class: "slider" }, slider, shown)), labelled("Along", axis), labelled("Logarithmic", log)];
  if (repeated().length) {
    const box = el("input", { type: "checkbox", checked: STATE.repeats, onchange: () => { STATE.repeats = box.checked; redrawCharts(); } });
    parts.push(labelled("Mean and range of seeds", box));
  }
  return parts;
}

function viewCurves(view) {
  const names = metricNames();
  if (!names.length) { view.append(absent(noteOf(RUNS[0], "metrics.jsonl"))); return; }
  const search = el("input", { type: "search", class: "search", placeholder: "Find a metric ( / )", "aria-label": "Find a metric" });
  view.append(el("div", { class: "controls" }, search, curveControls()), runLegend() || "");
  const groups = new Map();
  for (const name of names) groups.set(name.split("/")[0], [...(groups.get(name.split("/")[0]) || []), name]);
  const cards = [];
  for (const [group, members] of groups) {
    const grid = el("div", { class: "grid" });
    for (const name of members) {
      const card = curveChart(name, name);
      cards.push([name, card]);
      grid.append(card);
    }
    view.append(el("details", { open: true }, el("summary", null, `${group} (${members.length})`), grid));
  }
  const none = absent("No metric has this name.");
  none.hidden = true;
  view.append(none);
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/);
    let count = 0;
    for (const [name, card] of cards) {
      card.hidden = !words.every((word) => name.toLowerCase().includes(word));
      count += card.hidden ? 0 : 1;
    }
    for (const part of view.querySelectorAll("details")) part.hidden = !part.querySelector("figure:not([hidden])");
    none.hidden = count > 0;
  });
}
