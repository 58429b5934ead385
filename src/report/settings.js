// The plan and what each technique saved; the configuration and how runs differ in it.

function viewPlan(view) {
  const run = RUNS[STATE.run], plan = run.plan;
  const choice = runChoice(() => { view.replaceChildren(); viewPlan(view); });
  if (choice) view.append(el("div", { class: "controls" }, choice));
  if (!plan) { view.append(absent(noteOf(run, "plan.json"))); return; }
  const budget = plan.budget_bytes ? `within a budget of ${bytes(plan.budget_bytes)}, ${percent(plan.margin)} of it left free` : "without a budget: the settings as they are written";
  view.append(el("div", { class: "tiles" },
    tile("Predicted peak", bytes(plan.peak_bytes), budget),
    run.summary && tile("Measured peak", bytes(run.summary.measured_peak_bytes), `${percent(run.summary.measured_peak_bytes / plan.peak_bytes)} of the prediction`),
    tile("On the host", bytes(plan.host_peak_bytes), "predicted peak"),
    run.summary && tile("Recoveries", integer(run.summary.replans), "times that memory ran out and a cheaper plan took over"),
    tile("Device", plan.device, run.summary ? run.summary.precision : "")));
  view.append(el("h3", null, "What each technique saves"));
  const decisions = (plan.decisions || []).map((own) => [own.what, el("code", null, own.settings), own.phase, bytes(own.saves_bytes), seconds(own.costs_seconds)]);
  view.append(decisions.length
    ? table(["Technique", "Settings", "Phase", "Saves", "Costs a step"], decisions, "Each by itself: what its phase would need more without it, and what a step would take less")
    : absent("The plan turned no technique on by itself: there was no budget to meet, or nothing had to be saved."));
  view.append(el("h3", null, "Predicted bytes by phase and category"), planBars(plan));
  if (run.summary && run.summary.memory.length) {
    const rows = run.summary.memory.map((own) => [own.phase, bytes(own.predicted_bytes), bytes(own.measured_bytes), percent(own.measured_bytes / Math.max(1, own.predicted_bytes))]);
    view.append(table(["Phase", "Predicted", "Measured", "Measured of predicted"], rows, "Predicted and measured"));
  }
  view.append(el("h3", null, "The plan as settings"), el("pre", { class: "text" }, (plan.settings || []).join("\n") || "all defaults"));
}

function planBars(plan) {
  const widest = Math.max(1, ...plan.phases.map((phase) => phase.total_bytes));
  const used = new Set(plan.phases.flatMap((phase) => Object.keys(phase.categories)));
  const items = ORDER.filter((name) => used.has(name)).map((name) => [block(holderColour(name)), name]);
  return el("div", { class: "bars" }, legend(items), plan.phases.map((phase) => el("div", { class: "barrow" },
    bar(phase.name, phase.categories, phase.total_bytes, widest), el("div", { class: "note" }, `at: ${phase.moment}`))));
}

function viewSettings(view) {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.settings)))].sort();
  const differs = (key) => new Set(RUNS.map((run) => run.settings[key])).size > 1;
  const different = keys.filter(differs);
  const search = el("input", { type: "search", class: "search", placeholder: "Find a setting ( / )", "aria-label": "Find a setting" });
  const value = (run, key) => { const own = run.settings[key]; return own === undefined ? el("em", null, "absent") : el("code", null, shownText(own, [])); };
  // a long key breaks where its parts meet
  const parts = (key) => key.split(/(?<=[._])/).flatMap((part) => [part, el("wbr", null)]);
  const rows = (list) => list.map((key) => [el("code", null, parts(key)), ...RUNS.map((run) => value(run, key))]);
  const header = ["Setting", ...RUNS.map((run) => run.name)];
  if (RUNS.length > 1) {
    view.append(el("h3", null, "Differences"), different.length ? table(header, rows(different), `${plural(different.length, "setting")} of ${integer(keys.length)} differ`) : absent("All settings are the same."));
    view.append(el("h3", null, "All settings"));
  }
  const holder = el("div", null);
  const draw = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = keys.filter((key) => words.every((word) => key.toLowerCase().includes(word) || RUNS.some((run) => (run.settings[key] || "").toLowerCase().includes(word))));
    holder.replaceChildren(found.length ? table(header, rows(found), plural(found.length, "setting")) : absent("No setting has this in its name or value."));
  };
  search.addEventListener("input", draw);
  view.append(el("div", { class: "controls" }, search), holder);
  draw();
}
