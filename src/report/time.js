// Where a step's time goes, and how rewards spread.

const TIMED = "timing_s/";

function phasesTimed(run) {
  const names = Object.keys(run.metrics.columns).filter((name) => name.startsWith(TIMED) && name !== TIMED + "step");
  const order = Object.keys(PHASE_COLOURS);
  const place = (name) => { const at = order.indexOf(name); return at < 0 ? order.length : at; };
  return names.map((name) => name.slice(TIMED.length)).sort((a, b) => place(a) - place(b));
}

/** Sums of neighbouring steps, so that a column is at least two pixels wide. */
function bucketed(xs, columns, most) {
  const each = Math.ceil(xs.length / most);
  if (each <= 1) return { xs, columns, each: 1 };
  const starts = xs.filter((_, at) => at % each === 0);
  const means = columns.map((ys) => starts.map((_, at) => mean(ys.slice(at * each, (at + 1) * each)) || 0));
  return { xs: starts, columns: means, each };
}

/** Stacked areas of columns. */
function stacked(xs, columns, colours, flat) {
  let below = xs.map(() => 0);
  return columns.map((ys, at) => {
    const above = below.map((low, x) => low + (ys[x] || 0));
    const area = { xs, lows: below, highs: above, colour: colours[at], edge: "var(--page)", flat };
    below = above;
    return area;
  });
}

function viewTime(view) {
  const run = RUNS[STATE.run];
  const redraw = () => { view.replaceChildren(); viewTime(view); };
  const choice = runChoice(redraw);
  if (choice) view.append(el("div", { class: "controls" }, choice));
  const phases = phasesTimed(run);
  if (!phases.length) { view.append(absent(noteOf(run, "metrics.jsonl"))); return; }
  const at = run.metrics.steps.map((step, index) => index).filter((index) => run.metrics.steps[index] > 0);
  const steps = at.map((index) => run.metrics.steps[index]);
  const columns = phases.map((name) => at.map((index) => column(run, TIMED + name)[index] || 0));
  const total = columns.map((ys) => ys.reduce((a, b) => a + b, 0));
  const all = total.reduce((a, b) => a + b, 0) || 1;
  const said = (name) => (PHASE_WORDS[name] ? `${name}: ${PHASE_WORDS[name]}` : name);
  view.append(legend(phases.map((name) => [block(phaseColour(name)), said(name)])));
  view.append(chart("Seconds of each step by phase", () => {
    const shown = bucketed(steps, columns, 400);
    return {
      height: 280, areas: stacked(shown.xs, shown.columns, phases.map(phaseColour), true), lines: [],
      x: { label: shown.each > 1 ? `step (means of ${shown.each})` : "step", format: short, whole: true, range: steps.length ? [steps[0], steps.at(-1) + 1] : null },
      y: { format: seconds, zero: true, room: 64 },
      cursor: {
        xs: shown.xs, middle: shown.each / 2,
        tell: (index) => ({
          heading: shown.each > 1 ? `steps from ${shown.xs[index]}` : `step ${shown.xs[index]}`,
          rows: phases.map((name, p) => [block(phaseColour(name)), name, `${exact(Number(shown.columns[p][index].toPrecision(6)))} s`]).reverse(),
        }),
      },
    };
  }, "Validation (testing) runs in some steps only."));
  const rows = phases.map((name, p) => [el("span", null, block(phaseColour(name)), " ", name), PHASE_WORDS[name] || "", seconds(total[p] / Math.max(1, steps.length)), seconds(Math.max(...columns[p])), percent(total[p] / all)]);
  view.append(table(["Phase", "What it does", "Mean of a step", "Longest", "Share"], rows, "Time by phase, over all steps"));
  view.append(plannedTime(run) || "");
  const rates = ["perf/throughput", "rollout/decode_tokens_per_second", "rollout/prefill_tokens_per_second", "rollout/slot_occupancy"].filter((name) => column(run, name));
  view.append(el("div", { class: "grid wide" }, rates.map((name) => curveChart(name, name))));
}

// Which phases of a run each estimate of the plan is of.
const ESTIMATED = {
  rollout: ["gen", "gen_max"], score: ["old_log_prob", "ref"], reward: ["reward"], values: ["values"],
  "backward and optimizer": ["update_actor"], "critic's backward and optimizer": ["update_critic"],
};

function plannedTime(run) {
  if (!run.plan || !run.plan.seconds) return null;
  const said = run.plan.seconds;
  const predicted = {
    ...said, "backward and optimizer": (said.backward || 0) + (said.optimizer || 0),
    "critic's backward and optimizer": (said.critic_backward || 0) + (said.critic_optimizer || 0),
  };
  const rows = Object.entries(ESTIMATED).map(([name, phases]) => {
    const measured = phases.map((phase) => mean(column(run, TIMED + phase))).filter((value) => value !== null);
    return measured.length && predicted[name] > 0 ? [name, phases.join(", "), seconds(Math.abs(predicted[name])), seconds(measured.reduce((a, b) => a + b, 0))] : null;
  }).filter(Boolean);
  const from = { assumed: "assumed, not measured: run firebrick devices --measure" }[run.plan.profile] || run.plan.profile;
  return rows.length ? table(["The plan's part", "Phases", "Predicted", "Measured"], rows, `Time of a step as the plan predicted it (device profile: ${from})`) : null;
}

// From dark to light and through blue to yellow, as cividis: read by any colour vision and in grey.
const RAMP = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];

function ramp(share) {
  const at = Math.max(0, Math.min(1, share)) * (RAMP.length - 1), low = Math.floor(at), high = Math.min(low + 1, RAMP.length - 1);
  const part = (text, c) => parseInt(text.slice(1 + 2 * c, 3 + 2 * c), 16);
  return `rgb(${[0, 1, 2].map((c) => Math.round(part(RAMP[low], c) + (part(RAMP[high], c) - part(RAMP[low], c)) * (at - low))).join(",")})`;
}

function viewRewards(view) {
  const run = RUNS[STATE.run], found = run.rewards;
  const choice = runChoice(() => { view.replaceChildren(); viewRewards(view); });
  if (choice) view.append(el("div", { class: "controls" }, choice));
  if (!found || !found.steps.length) { view.append(absent(noteOf(run, "samples.jsonl"))); return; }
  const rows = found.bounds ? found.values.length - 1 : found.values.length;
  const named = (row) => (found.bounds ? `${short(found.values[row])} to ${short(found.values[row + 1])}` : exact(found.values[row]));
  const colours = Array.from({ length: rows }, (_, row) => ramp(rows > 1 ? row / (rows - 1) : 1));
  const sums = found.counts.map((counts) => counts.reduce((a, b) => a + b, 0) || 1);
  const columns = colours.map((_, row) => found.counts.map((counts, at) => counts[row] / sums[at]));
  const all = sums.reduce((a, b) => a + b, 0);
  const each = found.steps_each, more = each > 1 ? `steps, ${each} together` : "step";
  const order = Array.from({ length: rows }, (_, row) => rows - 1 - row);
  view.append(el("p", null, `Rewards of all ${integer(all)} samples, as shares of each step. Dark is the least reward, bright the most.`));
  view.append(legend((found.bounds ? [0, rows >> 1, rows - 1] : [...colours.keys()]).map((row) => [block(colours[row]), named(row)])));
  view.append(chart("Rewards by step (share of samples)", () => ({
    height: 320, lines: [], areas: stacked(found.steps, columns, colours, true).map((area) => ({ ...area, edge: null })),
    x: { label: more, format: short, whole: true, range: [found.steps[0], found.steps.at(-1) + each] },
    y: { format: percent, range: [0, 1] },
    cursor: {
      xs: found.steps, middle: each / 2,
      tell: (at) => ({
        heading: each > 1 ? `${each} steps from ${found.steps[at]}` : `step ${found.steps[at]}`,
        rows: order.filter((row) => found.counts[at][row]).map((row) => [block(colours[row]), named(row), `${integer(found.counts[at][row])} (${percent(columns[row][at])})`]),
      }),
    },
  })));
  const parts = Object.keys(run.metrics.columns).filter((name) => /^reward\/.*\/mean$|^critic\/score\/mean$|^critic\/advantages\//.test(name));
  view.append(el("h3", null, "Parts of the reward, and advantages"), el("div", { class: "grid wide" }, parts.map((name) => curveChart(name, name))));
}
