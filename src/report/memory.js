// Memory: who held what at every boundary, step by step, and what the plan predicted.

const NO_ACCOUNT = "in no account";
const ORDER = Object.keys(HOLDERS);

/** Columns of a timeline by category, both homes apart where they are two memories. */
function heldColumns(timeline) {
  const groups = new Map();
  for (const account of timeline.accounts) {
    const away = account.home === "host" && !timeline.unified;
    if (away) continue;
    const own = groups.get(account.category) || account.bytes.map(() => 0);
    groups.set(account.category, own.map((sum, at) => sum + account.bytes[at]));
  }
  const names = [...groups.keys()].sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  const columns = names.map((name) => groups.get(name));
  const rest = timeline.boundaries.in_use_bytes.map((used, at) => {
    if (used === null) return 0;
    return Math.max(0, used - columns.reduce((sum, ys) => sum + ys[at], 0));
  });
  if (rest.some((value) => value > 0)) { names.push(NO_ACCOUNT); columns.push(rest); }
  return { names, columns };
}

/** The prediction at each boundary: the largest of its phase's estimates; at an update the optimizer's. */
function predictedAt(timeline) {
  const { boundaries, phases, plans, places } = timeline;
  return boundaries.phase.map((phase, at) => {
    const plan = [...plans].reverse().find((plan) => plan.from <= at);
    if (!plan) return null;
    let names = phases[phase].estimates;
    if (places[boundaries.place[at]] === "update") names = names.filter((name) => name.endsWith("optimizer"));
    const totals = plan.phases.filter((estimate) => names.includes(estimate.name)).map((estimate) => estimate.total_bytes);
    return totals.length ? Math.max(...totals) : null;
  });
}

function placeWords(timeline, at) {
  const { boundaries, places } = timeline, place = places[boundaries.place[at]], segment = boundaries.segment[at];
  const what = { begin: "at its beginning", sample: "after a completion", head: "at the head", embedding: "embedding's gradient", out_of_memory: "out of memory", replanned: "under another plan", end: "at its end", update: "update" }[place] || place;
  if (segment === null) return what;
  return place === "update" ? `${what} of unit ${segment}` : `${what} of segment ${segment}`;
}

/** Boundaries of the chosen step and phase, or of all. */
function boundariesOf(timeline, { step, phase }) {
  const { boundaries } = timeline;
  const wanted = (at) => (step === "all" || String(boundaries.step[at]) === step) && (phase === "all" || String(boundaries.phase[at]) === phase);
  return boundaries.step.map((_, at) => at).filter(wanted);
}

function phaseBands(timeline, chosen, xs) {
  const bands = [];
  chosen.forEach((at, index) => {
    const name = timeline.phases[timeline.boundaries.phase[at]].name, step = timeline.boundaries.step[at];
    const last = bands.at(-1);
    const end = index + 1 < xs.length ? xs[index + 1] : xs[index] + (xs[index] - xs[index - 1] || 1);
    if (last && last.text === name && last.step === step) last.to = end;
    else bands.push({ from: xs[index], to: end, text: name, step, colour: phaseColour(name) });
  });
  return bands;
}

function timelineXs(timeline, chosen, axis) {
  if (axis === "boundary") return chosen.map((_, index) => index);
  let base = 0, last = 0, step = null;
  return chosen.map((at) => {
    if (timeline.boundaries.step[at] !== step) { base = last; step = timeline.boundaries.step[at]; }
    last = base + timeline.boundaries.seconds[at];
    return last;
  });
}

function timelineChart(timeline, view) {
  const held = heldColumns(timeline), predicted = predictedAt(timeline);
  return chart("Memory timeline", () => {
    const chosen = boundariesOf(timeline, view), pick = (ys) => chosen.map((at) => ys[at]);
    const xs = timelineXs(timeline, chosen, view.axis), columns = held.columns.map(pick);
    const lines = [
      { xs, ys: pick(timeline.boundaries.peak_bytes), colour: "var(--text)", dash: "2 3", width: 1.4, step: true },
      { xs, ys: pick(predicted), colour: "var(--alarm)", dash: "8 3", width: 2, step: true },
    ];
    return {
      height: 380, lines, areas: stacked(xs, columns, held.names.map(holderColour), true), bands: phaseBands(timeline, chosen, xs),
      x: { label: view.axis === "boundary" ? "boundary between segments" : "seconds of the steps shown", format: short, whole: view.axis === "boundary", range: xs.length > 1 ? [xs[0], xs.at(-1) + (xs.at(-1) - xs.at(-2))] : null },
      y: { format: bytes, bytes: true, zero: true, room: 72 },
      cursor: { xs, tell: (index) => tellBoundary(timeline, chosen[index], held, predicted) },
    };
  }, "A prediction is of its phase's peak, which may be between two boundaries. Each colour is a category; the strip above names the phase.");
}

function tellBoundary(timeline, at, held, predicted) {
  const { boundaries, phases } = timeline;
  const rows = held.names.map((name, c) => [block(holderColour(name)), name, held.columns[c][at]]).filter((row) => row[2] > 0).reverse();
  const in_use = boundaries.in_use_bytes[at];
  const told = rows.map(([mark, name, value]) => [mark, name, bytesExact(value)]);
  const own = [["", "in use", bytesExact(in_use)], ["", "peak since the phase began", bytesExact(boundaries.peak_bytes[at])], ["", "predicted peak", bytesExact(predicted[at])]];
  return { heading: `step ${boundaries.step[at]}, ${phases[boundaries.phase[at]].name}, ${placeWords(timeline, at)}, ${boundaries.seconds[at].toFixed(3)} s`, rows: [...told, ...own] };
}

function timelinePart(run, view) {
  const timeline = run.timeline;
  if (!timeline) return [el("h3", null, "Timeline"), absent(noteOf(run, "memory_timeline.json"))];
  const steps = [...new Set(timeline.boundaries.step)];
  const redraw = () => redrawCharts();
  const controls = el("div", { class: "controls" },
    labelled("Steps", select([["all", "all"], ...steps.map((step) => [String(step), `step ${step}`])], view.step, (value) => { view.step = value; redraw(); })),
    labelled("Phase", select([["all", "all"], ...timeline.phases.map((phase, at) => [String(at), phase.name])], view.phase, (value) => { view.phase = value; redraw(); })),
    labelled("Along", select([["boundary", "boundaries"], ["time", "time"]], view.axis, (value) => { view.axis = value; redraw(); })));
  const held = heldColumns(timeline);
  const marks = [...held.names.map((name) => [block(holderColour(name)), name]), [swatch("var(--alarm)", "8 3"), "predicted peak"], [swatch("var(--text)", "2 3"), "peak since the phase began"]];
  const thinned = timeline.boundaries_each > 1 ? el("p", { class: "note" }, `Of every ${timeline.boundaries_each} boundaries the one at which most was held is shown.`) : null;
  const { dropped, steps: had } = timeline.report;
  const missing = dropped ? el("p", { class: "note" }, `${plural(dropped, "earlier boundary", "earlier boundaries")} of step ${had[0]} are missing.`) : null;
  return [el("h3", null, "Timeline"), controls, legend(marks), timelineChart(timeline, view), thinned, missing, peakTables(timeline.report)].filter(Boolean);
}

function peakTables(report) {
  const peak = report.peak;
  if (!peak) return null;
  const share = (value) => (value === null ? "" : percent(value));
  const holders = peak.holders.map((holder) => [`${holder.category}, ${holder.home}, ${holder.model}`, bytes(holder.bytes), share(holder.share)]);
  if (peak.unaccounted_bytes !== null) holders.push([NO_ACCOUNT, bytes(peak.unaccounted_bytes), share(peak.unaccounted_bytes / peak.bytes)]);
  const categories = peak.categories.map((own) => [own.category, bytes(own.bytes), bytes(own.predicted_bytes), bytes(own.before_bytes)]);
  const below = [];
  const parts = [
    table(["Held at the peak", "Bytes", "Share"], holders, `The peak: ${bytes(peak.bytes)} in step ${peak.when.step}, ${peak.when.phase}`),
    table(["Category", "At the peak", "Predicted", "A step before"], categories, "By category, with the prediction"),
  ];
  if (report.live) {
    const rows = report.live.groups.map((group) => [allocatedBy(group), group.phase || "set-up", bytes(group.bytes), integer(group.count)]);
    below.push(table(["Allocated by", "In", "Bytes", "Count"], rows, `The largest of ${integer(report.live.count)} traced allocations that lived together, ${bytes(report.live.bytes)} in all`));
  }
  const error = report.error ? el("pre", { class: "error" }, report.error) : null;
  return el("div", null, error, el("div", { class: "tables" }, parts), below);
}

/** An account, or the program's own functions that a stack goes through, the innermost first. */
function allocatedBy(group) {
  if (group.account) return group.account.category;
  const own = group.stack.filter((name) => name.includes("firebrick"));
  return (own.length ? own : group.stack).slice(0, 4).map(functionName).join(" < ") || "unknown";
}

/** A function without its crate's prefix and its type parameters; of `<A as B>::f`, `A::f`. */
function functionName(name) {
  let whole = name, before;
  do {
    before = whole;
    whole = whole.replace(/<impl ([^<>]*)>/g, "$1").replace(/<([^<>]*?) as [^<>]*>/g, "$1").replace(/(?<=\w)<[^<>]*>|::<[^<>]*>/g, "");
  } while (whole !== before);
  return whole.replace(/[<>]/g, "").replace(/\bfirebrick_/g, "");
}

/** A phase's predicted estimate: the largest of those it has. */
function estimateOf(run, phase) {
  const own = ((run.plan && run.plan.phases) || []).filter((estimate) => phase.estimates.includes(estimate.name));
  return own.reduce((most, estimate) => (!most || estimate.total_bytes > most.total_bytes ? estimate : most), null);
}

function stepsPart(run) {
  if (!run.memory) return [el("h3", null, "Step by step"), absent(noteOf(run, "memory.jsonl"))];
  const { phases, source, steps_each: each } = run.memory;
  const value = (phase, at) => phase.peak_bytes[at] ?? phase.reserved_bytes[at];
  const counted = phases.some((phase) => phase.peak_bytes.some((own) => own !== null));
  const of = counted ? "Peak of each phase" : "Bytes reserved at the end of each phase";
  const steps = [...new Set(phases.flatMap((phase) => phase.steps))].sort((a, b) => a - b);
  const lines = () => phases.flatMap((phase) => {
    const estimate = estimateOf(run, phase), colour = phaseColour(phase.name);
    const own = { xs: phase.steps, ys: phase.steps.map((_, at) => value(phase, at)), colour, width: 1.8 };
    return estimate && steps.length > 1 ? [own, { xs: [steps[0], steps.at(-1)], ys: [estimate.total_bytes, estimate.total_bytes], colour, dash: "8 4", width: 1.2, opacity: 0.8 }] : [own];
  });
  const tell = (at) => ({
    heading: each > 1 ? `most in ${each} steps from ${steps[at]}` : `step ${steps[at]}`,
    rows: phases.map((phase) => { const here = phase.steps.indexOf(steps[at]); return here < 0 ? null : [block(phaseColour(phase.name)), phase.name, bytesExact(value(phase, here))]; }).filter(Boolean),
  });
  return [
    el("h3", null, "Step by step"),
    legend([...phases.map((phase) => [block(phaseColour(phase.name)), phase.name]), [swatch("var(--text)", "8 4"), "predicted, in the phase's colour"]]),
    chart(`${of} (${source})`, () => ({
      height: 280, lines: lines(), areas: [], x: { label: each > 1 ? `step (most of ${each})` : "step", format: short, whole: true },
      y: { format: bytes, bytes: true, zero: true, room: 72 }, cursor: { xs: steps, tell },
    })),
    el("h3", null, "By phase and category"), phaseBars(run, phases),
  ];
}

/** For each phase two bars: what the plan predicted by category, and the most that accounts held. */
function phaseBars(run, phases) {
  // the CPU's heap counts both homes
  const unified = run.memory.source === "counted_heap";
  const rows = phases.map((phase) => {
    const estimate = estimateOf(run, phase), held = {};
    for (const account of phase.accounts) {
      const own = Math.max(0, ...account.peak_bytes);
      if (account.home === "device" || unified) held[account.category] = (held[account.category] || 0) + own;
    }
    const most = Math.max(0, ...phase.peak_bytes.map((own) => own || 0)) || Math.max(0, ...phase.reserved_bytes);
    return { phase, estimate, held, most };
  });
  const widest = Math.max(1, ...rows.flatMap((row) => [row.estimate ? row.estimate.total_bytes : 0, row.most, Object.values(row.held).reduce((a, b) => a + b, 0)]));
  const used = new Set(rows.flatMap((row) => [...Object.keys(row.held), ...Object.keys((row.estimate || { categories: {} }).categories)]));
  const items = ORDER.filter((name) => used.has(name)).map((name) => [block(holderColour(name)), name]);
  return el("div", { class: "bars" }, legend([...items, [el("span", { class: "tick" }), "measured peak"]]), rows.map((row) => el("div", { class: "barrow" },
    el("h4", null, row.phase.name, el("span", { class: "note" }, ` ${PHASE_WORDS[row.phase.name] || ""}`)),
    row.estimate ? bar("predicted", row.estimate.categories, row.estimate.total_bytes, widest) : null,
    bar("accounts' peaks", row.held, row.most, widest, row.most))));
}

function bar(label, categories, total, widest, tick) {
  const names = ORDER.filter((name) => categories[name] > 0);
  const parts = names.map((name) => el("span", { class: "piece", title: `${name}: ${bytesExact(categories[name])}`, style: { width: `${(categories[name] / widest) * 100}%`, background: holderColour(name) } }));
  const mark = tick ? el("span", { class: "tick at", title: `measured peak: ${bytesExact(tick)}`, style: { left: `${Math.min(100, (tick / widest) * 100)}%` } }) : null;
  const said = `${label}: ${bytes(total)}; ${names.map((name) => `${name} ${bytes(categories[name])}`).join(", ")}`;
  return el("div", { class: "bar" }, el("span", { class: "barlabel" }, label), el("span", { class: "track", role: "img", "aria-label": said }, parts, mark), el("span", { class: "number" }, bytes(total)));
}

const MEMORY_VIEW = { step: "all", phase: "all", axis: "boundary" };

function viewMemory(view) {
  const run = RUNS[STATE.run];
  const choice = runChoice(() => { MEMORY_VIEW.step = MEMORY_VIEW.phase = "all"; view.replaceChildren(); viewMemory(view); });
  if (choice) view.append(el("div", { class: "controls" }, choice));
  view.append(...timelinePart(run, MEMORY_VIEW), ...stepsPart(run));
}
