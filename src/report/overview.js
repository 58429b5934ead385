// Overview: how the runs did, and what there is to know before reading on.

/** First and last value of a metric, the last smoothed as the curves are. */
function ends(run, name) {
  const ys = (column(run, name) || []).filter((y) => y !== null);
  if (!ys.length) return null;
  return { first: ys[0], last: smoothed(ys, weightOf(name)).at(-1) };
}

function tile(label, value, note, name) {
  return el("div", { class: "tile" }, el("span", { class: "label" }, label), el("span", { class: "value" }, value), note && el("span", { class: "note" }, note));
}

function peakTile(run) {
  const { measured_peak_bytes: measured, predicted_peak_bytes: predicted } = run.summary || {};
  if (!measured) return run.plan ? tile("Peak memory", bytes(run.plan.peak_bytes), "predicted") : null;
  const share = predicted ? `, ${percent(measured / predicted)} of the predicted ${bytes(predicted)}` : "";
  return tile("Peak memory", bytes(measured), `measured${share}`);
}

function tiles(run) {
  const found = [];
  for (const [name, label, note, format] of HEADLINES.slice(0, 7)) {
    const own = ends(run, headlineName(name));
    if (own) found.push(tile(label, format(own.last), `from ${format(own.first)}; ${note}`));
  }
  found.push(peakTile(run));
  const step = mean(column(run, "timing_s/step"));
  if (step !== null) found.push(tile("Time of a step", seconds(step), run.summary ? `${seconds(run.summary.seconds)} in all, ${short(run.summary.tokens_per_second)} tokens/s` : "mean"));
  return el("div", { class: "tiles" }, found);
}

function mean(ys) {
  const known = (ys || []).filter((y) => y !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function runTable() {
  const heads = HEADLINES.slice(0, 7).filter(([name]) => RUNS.some((run) => ends(run, headlineName(name))));
  const rows = RUNS.map((run, at) => {
    const values = heads.map(([name, , , format]) => { const own = ends(run, headlineName(name)); return own ? format(own.last) : "–"; });
    const steps = run.metrics.steps.at(-1);
    return [el("span", null, swatch(runColour(at), runDash(at)), " ", run.name), steps === undefined ? "–" : integer(steps), ...values, run.summary ? bytes(run.summary.measured_peak_bytes) : "–", seconds(mean(column(run, "timing_s/step")))];
  });
  return table(["Run", "Steps", ...heads.map(([, label]) => label), "Peak memory", "Time of a step"], rows, "The runs at their ends, smoothed as the curves are");
}

function notes() {
  const items = RUNS.flatMap((run) => run.notes.map((note) => el("li", null, RUNS.length > 1 ? `${run.name}: ` : "", note)));
  return items.length ? el("details", { class: "notes" }, el("summary", null, plural(items.length, "note") + " on what is missing"), el("ul", null, items)) : null;
}

function viewOverview(view) {
  view.append(RUNS.length > 1 ? runTable() : tiles(RUNS[0]));
  const controls = el("div", { class: "controls" }, curveControls());
  const heads = HEADLINES.filter(([name]) => RUNS.some((run) => column(run, headlineName(name))));
  if (heads.length) {
    const grid = el("div", { class: "grid wide" }, heads.map(([name, label, note, format]) => curveChart(headlineName(name), label, `${note} (${headlineName(name)})`, format, 220)));
    view.append(controls, runLegend() || "", grid);
  } else {
    view.append(absent(noteOf(RUNS[0], "metrics.jsonl")));
  }
  view.append(notes() || "");
}
