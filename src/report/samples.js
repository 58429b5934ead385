// Samples: the groups of the selection, side by side, with what the grader read and the gold answer.

const FILTERS = {
  all: ["All", () => true],
  truncated: ["Truncated", (group) => group.samples.some((sample) => sample.truncated)],
  no_spread: ["No spread", (group) => group.samples.length > 1 && new Set(group.samples.map((sample) => sample.reward)).size === 1],
  best: ["Best", (group) => group.tags.includes("best")],
  worst: ["Worst", (group) => group.tags.includes("worst")],
  tokens: ["With tokens", (group) => group.samples.some((sample) => sample.by_token)],
};
const TAG_WORDS = { end: "first or last", even: "evenly between", best: "best", worst: "worst", truncated: "most truncated", no_spread: "no spread", tokens: "tokens kept" };
const SORTS = {
  step: ["step", (a, b) => a.step - b.step || a.draw - b.draw],
  latest: ["latest first", (a, b) => b.step - a.step || a.draw - b.draw],
  best: ["reward, best first", (a, b) => groupMean(b) - groupMean(a)],
  worst: ["reward, worst first", (a, b) => groupMean(a) - groupMean(b)],
};
const PAGE = 12;
const LONG = 700;
const SAMPLES_VIEW = { filter: "all", sort: "step", search: "", count: PAGE, mode: "off", most: 0 };

function groupMean(group) { return mean(group.samples.map((sample) => sample.reward)) ?? -Infinity; }

/** All of a text that is there, for searching. */
function plain(text) { return Array.isArray(text) ? text[0] + " " + text[2] : text; }

// Characters that do something instead of being seen: control characters, and what turns the direction of a line.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff]/;
const CONTROLS = "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");
const UNSEEN_NAMES = { 0x200e: "LRM", 0x200f: "RLM", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0x061c: "ALM", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0xfeff: "BOM", 0x2028: "LS", 0x2029: "PS" };

/** A text as nodes: unseen characters by name, what is searched marked. Nothing of it is ever markup. */
function shownText(text, words) {
  const nodes = [];
  for (const part of text.split(new RegExp(`(${UNSEEN.source})`))) {
    if (part.length === 1 && UNSEEN.test(part)) {
      const code = part.charCodeAt(0);
      const name = UNSEEN_NAMES[code] || CONTROLS[code] || "U+" + code.toString(16).toUpperCase().padStart(4, "0");
      nodes.push(el("span", { class: "unseen", title: "U+" + code.toString(16).toUpperCase().padStart(4, "0") }, name));
    } else if (part) {
      nodes.push(...marked(part, words));
    }
  }
  return nodes;
}

function marked(text, words) {
  if (!words.length) return [text];
  const lower = text.toLowerCase(), found = [];
  if (lower.length !== text.length) return [text];
  let at = 0;
  while (at < text.length) {
    const hits = words.map((word) => [lower.indexOf(word, at), word]).filter(([where]) => where >= 0).sort((a, b) => a[0] - b[0]);
    if (!hits.length) break;
    const [where, word] = hits[0];
    if (where > at) found.push(text.slice(at, where));
    found.push(el("mark", null, text.slice(where, where + word.length)));
    at = where + word.length;
  }
  if (at < text.length) found.push(text.slice(at));
  return found;
}

/** A text in a box that opens where it is long. */
function textBox(text, words, label) {
  const whole = plain(text);
  const box = el("div", { class: "text", dir: "auto", "aria-label": label });
  const parts = () => (Array.isArray(text)
    ? [...shownText(text[0], words), el("span", { class: "cut" }, ` … ${integer(text[1])} characters are not in this report … `), ...shownText(text[2], words)]
    : shownText(text, words));
  if (whole === "") { box.append(el("span", { class: "empty" }, "(empty)")); return box; }
  box.append(...parts());
  if (whole.length <= LONG && whole.split("\n").length <= 14) return box;
  box.classList.add("folded");
  const button = el("button", {
    type: "button", class: "more", "aria-expanded": "false", onclick: () => {
      const folded = box.classList.toggle("folded");
      button.setAttribute("aria-expanded", String(!folded));
      button.textContent = folded ? `Show all ${integer(whole.length)} characters` : "Show less";
    },
  }, `Show all ${integer(whole.length)} characters`);
  return el("div", null, box, button);
}

function rewardColour(run, reward) {
  const values = run.rewards ? run.rewards.values : [0, 1];
  const low = values[0], high = values.at(-1);
  return ramp(high > low ? (reward - low) / (high - low) : 1);
}

function readRows(sample, group, words) {
  const gold = plain(group.answer).trim();
  return sample.read.map(([name, text]) => {
    const found = text === null ? null : plain(text).trim();
    const same = found !== null && found === gold;
    return el("div", { class: "read" },
      el("span", { class: "label" }, `${name} read`), " ",
      !found ? el("em", null, found === null ? "nothing" : "an empty text") : el("code", { dir: "auto" }, shownText(found.slice(0, 120), words), found.length > 120 ? "…" : ""),
      same ? el("span", { class: "same", title: "the gold answer, letter for letter" }, " = gold") : null);
  });
}

function sampleCard(run, group, sample, words) {
  const parts = sample.parts.length > 1 ? sample.parts.map(([name, value]) => `${name} ${exact(value)}`).join(", ") : null;
  return el("article", { class: "sample" },
    el("header", null,
      el("span", { class: "reward" }, el("span", { class: "dot", style: { background: rewardColour(run, sample.reward) } }), `reward ${exact(sample.reward)}`),
      el("span", { title: "advantage of its tokens" }, `adv. ${short(sample.advantage)}`),
      el("span", null, plural(sample.tokens, "token")),
      sample.truncated ? el("span", { class: "tag warn" }, "truncated") : null),
    sample.by_token && SAMPLES_VIEW.mode !== "off"
      ? tokenBox(sample.by_token, SAMPLES_VIEW.mode, SAMPLES_VIEW.most, words, `Completion ${sample.sample}`)
      : textBox(sample.text, words, `Completion ${sample.sample}`),
    readRows(sample, group, words),
    parts && el("div", { class: "read" }, el("span", { class: "label" }, "parts"), " ", parts));
}

function groupCard(run, group, words) {
  const rewards = group.samples.map((sample) => sample.reward);
  const facts = [];
  if (FILTERS.no_spread[1](group)) facts.push(el("span", { class: "tag" }, "no spread"));
  for (const tag of group.tags) if (tag === "best" || tag === "worst") facts.push(el("span", { class: "tag" }, TAG_WORDS[tag]));
  return el("section", { class: "group" },
    el("header", null, el("h3", null, `Step ${group.step}, prompt ${group.draw}`), el("span", null, `mean reward ${short(groupMean(group))}`),
      el("span", { class: "dots", "aria-hidden": "true" }, rewards.map((reward) => el("span", { class: "dot", style: { background: rewardColour(run, reward) } }))), facts),
    el("div", { class: "question" },
      el("div", null, el("span", { class: "label" }, "prompt"), textBox(group.prompt, words, "Prompt")),
      el("div", { class: "gold" }, el("span", { class: "label" }, "gold answer"), textBox(group.answer, words, "Gold answer"))),
    el("div", { class: "side" }, group.samples.map((sample) => sampleCard(run, group, sample, words))));
}

function matches(group, words) {
  if (!words.length) return true;
  const all = [group.prompt, group.answer, ...group.samples.map((sample) => sample.text)].map(plain).join("\n").toLowerCase();
  return words.every((word) => all.includes(word)) || words.join(" ") === `step ${group.step}`;
}

function statedSelection(samples) {
  const shown = samples.shown === samples.total
    ? `All ${plural(samples.total, "sample")} of ${plural(samples.total_groups, "group")}.`
    : `Shown ${integer(samples.shown)} of ${integer(samples.total)} samples, ${integer(samples.groups.length)} of ${integer(samples.total_groups)} groups: the first and the last, groups evenly between, the best, the worst, the most truncated, ${samples.total_with_tokens ? "some without spread, and some whose tokens were kept" : "and some without spread"}.`;
  const cut = samples.cut ? ` ${plural(samples.cut, "string")} longer than ${bytes(samples.longest_bytes)} ${samples.cut === 1 ? "is" : "are"} shortened in the middle.` : "";
  const all = ` Of all samples ${percent(samples.truncated / Math.max(1, samples.total))} are truncated; of all groups ${percent(samples.no_spread / Math.max(1, samples.total_groups))} have no spread.`;
  const tokens = samples.total_with_tokens ? ` Tokens were kept of ${plural(samples.total_with_tokens, "sample")}; ${samples.with_tokens === samples.total_with_tokens ? "all of them are" : `${integer(samples.with_tokens)} of them are`} in this report.` : "";
  return shown + all + cut + tokens;
}

function viewSamples(view) {
  const run = RUNS[STATE.run], samples = run.samples, own = SAMPLES_VIEW;
  const choice = runChoice(() => { view.replaceChildren(); viewSamples(view); });
  if (!samples) { view.append(choice ? el("div", { class: "controls" }, choice) : "", absent(noteOf(run, "samples.jsonl"))); return; }
  const search = el("input", { type: "search", class: "search", placeholder: "Search prompts and completions ( / )", value: own.search, "aria-label": "Search prompts and completions" });
  const list = el("div", { class: "groups" }), status = el("p", { class: "status", role: "status" });
  const filters = Object.entries(FILTERS).filter(([key]) => key !== "tokens" || samples.with_tokens).map(([key, [text, test]]) => el("button", {
    type: "button", class: "filter", "data-filter": key, "aria-pressed": String(own.filter === key), onclick: () => { own.filter = key; own.count = PAGE; draw(); },
  }, `${text} ${integer(samples.groups.filter(test).length)}`));
  const sort = select(Object.entries(SORTS).map(([key, [text]]) => [key, text]), own.sort, (value) => { own.sort = value; draw(); });
  const key = el("div");
  own.most = largestAdvantage(samples);
  if (!samples.with_tokens) { own.mode = "off"; if (own.filter === "tokens") own.filter = "all"; }
  const modes = [["off", "nothing"], ...Object.entries(TOKEN_MODES).map(([name, mode]) => [name, mode.name])];
  const colour = samples.with_tokens ? labelled("Colour tokens by", select(modes, own.mode, (value) => { own.mode = value; draw(); })) : null;
  const draw = () => {
    key.replaceChildren(own.mode === "off" ? "" : tokenLegend(own.mode, own.most, samples));
    const words = own.search.toLowerCase().split(/\s+/).filter(Boolean);
    const found = samples.groups.filter((group) => FILTERS[own.filter][1](group) && matches(group, words)).sort(SORTS[own.sort][1]);
    for (const button of filters) button.setAttribute("aria-pressed", String(button.dataset.filter === own.filter));
    status.textContent = `${plural(found.length, "group")} of ${integer(samples.groups.length)} in this report.`;
    const rest = found.length - own.count;
    list.replaceChildren(...found.slice(0, own.count).map((group) => groupCard(run, group, words)));
    if (rest > 0) list.append(el("button", { type: "button", class: "next", onclick: () => { own.count += PAGE; draw(); } }, `Show ${Math.min(PAGE, rest)} more of ${rest}`));
  };
  let waiting = 0;
  search.addEventListener("input", () => { own.search = search.value; own.count = PAGE; clearTimeout(waiting); waiting = setTimeout(draw, 120); });
  view.append(el("p", null, statedSelection(samples)), el("div", { class: "controls" }, choice, search, labelled("Sort by", sort), colour || ""), el("div", { class: "filters", role: "group", "aria-label": "Filter" }, filters), key, status, list);
  draw();
}
