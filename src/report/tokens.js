// Tokens: completions token by token, coloured by log-prob, advantage or mismatch. Every colour has an underline of its own too: its
// thickness is the size, dashes stand for numbers below zero.

const PROBABILITIES = [0.9, 0.5, 0.1, 0.01];
const DIFFERENCES = [1e-4, 1e-3, 1e-2, 1e-1];
const SHARES = [0, 0.25, 0.5, 0.75];

/** A mode: its name, a token's level (none, 0 to 4, below zero for negative numbers) and what levels mean. */
const TOKEN_MODES = {
  logp: {
    name: "log-prob",
    level: (own, at) => (own.sampler[at] === null ? null : PROBABILITIES.filter((bound) => Math.exp(own.sampler[at]) < bound).length),
    legend: () => PROBABILITIES.concat(0).map((bound, at) => [at, at === 0 ? `probability ${bound} and more` : bound ? `${bound} to ${PROBABILITIES[at - 1]}` : `below ${PROBABILITIES[at - 1]}`]),
  },
  advantage: {
    name: "advantage",
    level: (own, at, most) => signed(advantageOf(own, at), SHARES.map((share) => share * most)),
    legend: (most) => both(SHARES, (low, high) => (high === undefined ? `beyond ${short(low * most)}` : `${short(low * most)} to ${short(high * most)}`)),
  },
  mismatch: {
    name: "mismatch",
    level: (own, at) => (own.mismatch ? signed(own.mismatch[at], DIFFERENCES) : null),
    legend: () => both(DIFFERENCES, (low, high) => (high === undefined ? `beyond ${low}` : `${low} to ${high}`)),
    about: "The trainer's probability of the token less the sampler's.",
  },
};

function advantageOf(own, at) { return Array.isArray(own.advantage) ? own.advantage[at] : own.advantage; }

function signed(value, bounds) {
  return value === null || value === undefined ? null : Math.sign(value) * bounds.filter((bound) => Math.abs(value) > bound).length;
}

/** Levels below zero, zero and above it, with what they mean. */
function both(bounds, text) {
  const sizes = bounds.map((low, at) => text(low, bounds[at + 1]));
  const below = sizes.map((size, at) => [-1 - at, "− " + size]).reverse();
  return [...below, [0, bounds[0] ? `within ${bounds[0]}` : "0"], ...sizes.map((size, at) => [at + 1, "+ " + size])];
}

/** The largest advantage of a run's tokens, by size. */
function largestAdvantage(samples) {
  let most = 0;
  for (const group of samples.groups) for (const sample of group.samples) if (sample.by_token) {
    for (const value of [sample.by_token.advantage].flat()) most = Math.max(most, Math.abs(value || 0));
  }
  return most;
}

function tokenClass(level) { return level === null ? "tok" : `tok l${Math.abs(level)}${level < 0 ? " minus" : ""}`; }

function tokenLegend(mode, most, samples) {
  const own = TOKEN_MODES[mode];
  const known = samples.groups.some((group) => group.samples.some((sample) => sample.by_token && (mode !== "mismatch" || sample.by_token.mismatch)));
  if (!known) return absent("The run has no log-probs of the trainer (update.old_log_probs: sampler), so that there is no mismatch to show.");
  const items = own.legend(most).map(([level, text]) => [el("span", { class: tokenClass(level) + " key" + (mode === "logp" ? " alone" : ""), "aria-hidden": "true" }, "abc"), text]);
  items.push([el("span", { class: "tok masked", "aria-hidden": "true" }, "abc"), "not trained on"]);
  return el("div", { class: "tokenlegend" }, legend(items), own.about && el("p", { class: "note" }, own.about),
    el("p", { class: "note how" }, "Point at a token, or go to a completion with Tab and through its tokens with the arrow keys."));
}

/** A piece of text so that each token can be seen: those of no characters and line ends too. */
function tokenText(piece, words) {
  if (piece === "") return el("span", { class: "unseen", title: "begins a character that a later token ends" }, "◦");
  return piece.split(/(\n)/).map((part) => (part === "\n" ? [el("span", { class: "unseen lf" }, "LF"), "\n"] : shownText(part, words)));
}

/** Everything known of a token, in words. */
function tokenWords(own, at) {
  const both = (name, logp) => (logp === null ? `${name} unknown` : `${name} ${short(logp)} (probability ${short(Math.exp(logp))})`);
  return [
    `token ${at + 1} of ${own.pieces.length + own.left_out}`, both("sampler's log-prob", own.sampler[at]),
    own.trainer && both("trainer's", own.trainer[at]), own.mismatch && `mismatch ${short(own.mismatch[at])}`,
    `advantage ${short(advantageOf(own, at))}`, own.masked.includes(at) ? "not trained on" : null,
  ].filter(Boolean).join(", ");
}

let TOKEN_BOXES = 0;

/** A completion token by token: a list in which one token is the current one. */
function tokenBox(own, mode, most, words, label) {
  const name = `tokens-${TOKEN_BOXES++}`, masked = new Set(own.masked);
  const tokens = own.pieces.map((piece, at) => el("span", {
    class: tokenClass(TOKEN_MODES[mode].level(own, at, most)) + (masked.has(at) ? " masked" : ""), id: `${name}-${at}`, role: "option", "aria-selected": "false", "data-at": String(at),
  }, tokenText(piece, words)));
  const said = el("p", { class: "tokensaid", role: "status" });
  const box = el("div", { class: "text tokens" + (mode === "logp" ? " alone" : ""), dir: "auto", tabindex: "0", role: "listbox", "aria-label": `${label}, token by token` }, tokens);
  if (own.left_out) box.append(el("span", { class: "cut", role: "presentation" }, ` … ${plural(own.left_out, "more token")} ${own.left_out === 1 ? "is" : "are"} not in this report`));
  let current = null;
  const go = (at) => {
    if (!tokens.length) return;
    if (current !== null) { tokens[current].setAttribute("aria-selected", "false"); tokens[current].classList.remove("here"); }
    current = Math.max(0, Math.min(tokens.length - 1, at));
    tokens[current].setAttribute("aria-selected", "true");
    tokens[current].classList.add("here");
    tokens[current].scrollIntoView({ block: "nearest" });
    box.setAttribute("aria-activedescendant", tokens[current].id);
    said.textContent = tokenWords(own, current);
  };
  const moves = { ArrowRight: 1, ArrowDown: 10, PageDown: 50, ArrowLeft: -1, ArrowUp: -10, PageUp: -50, Home: -Infinity, End: Infinity };
  box.addEventListener("keydown", (event) => {
    if (!(event.key in moves)) return;
    event.preventDefault();
    go(current === null ? (event.key === "End" ? Infinity : 0) : current + moves[event.key]);
  });
  const point = (event) => { const token = event.target.closest("[data-at]"); if (token) go(Number(token.dataset.at)); };
  box.addEventListener("pointerover", point);
  box.addEventListener("click", point);
  return el("div", null, box, said);
}
