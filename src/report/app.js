// The page: views and how to move between them, theme, print, keyboard.

const VIEWS = [
  ["overview", "Overview", viewOverview], ["curves", "Curves", viewCurves], ["rewards", "Rewards", viewRewards],
  ["samples", "Samples", viewSamples], ["memory", "Memory", viewMemory], ["time", "Time", viewTime],
  ["plan", "Plan", viewPlan], ["settings", "Settings", viewSettings],
];
const sections = new Map();

/** Builds a view when it is first needed. Run and smoothing are chosen for all views, so others are built anew. */
function build(name, anew) {
  const own = sections.get(name);
  if (own.built && !anew) return own.section;
  const body = own.section.querySelector(".view");
  body.replaceChildren();
  own.view(body);
  own.built = true;
  own.run = STATE.run;
  return own.section;
}

function show(name) {
  if (!sections.has(name)) name = "overview";
  STATE.view = name;
  TIP.hidden = true;
  for (const [other, own] of sections) own.section.hidden = other !== name;
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.hash === "#" + name) { link.setAttribute("aria-current", "page"); link.scrollIntoView({ block: "nearest", inline: "nearest" }); }
    else link.removeAttribute("aria-current");
  }
  const shared = name === "overview" || name === "curves";
  build(name, shared || sections.get(name).run !== STATE.run);
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  try { if (theme) localStorage.setItem("firebrick-theme", theme); else localStorage.removeItem("firebrick-theme"); } catch { /* a file may have no storage */ }
  repaint();
}

/** Draws what shows colours again: legends and swatches too. */
function repaint() {
  repaintLabel();
  for (const own of sections.values()) own.built = false;
  if (STATE.view) build(STATE.view, true);
}

function search(event) {
  const box = sections.get(STATE.view).section.querySelector("input[type=search]");
  if (!box) { show("samples"); location.hash = "samples"; }
  const found = box || sections.get("samples").section.querySelector("input[type=search]");
  if (found) { event.preventDefault(); found.focus(); found.select(); }
}

function keyboard(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (event.key === "Escape" && typing) { event.target.blur(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") search(event);
  else if (/^[1-9]$/.test(event.key) && VIEWS[Number(event.key) - 1]) location.hash = VIEWS[Number(event.key) - 1][0];
}

function start() {
  const names = RUNS.map((run) => run.name).join(", ");
  document.title = `${names} – Firebrick report`;
  document.getElementById("title").replaceChildren(el("span", { class: "brand" }, "Firebrick"), " ", el("span", { class: "name" }, names));
  const nav = document.getElementById("nav"), main = document.getElementById("main");
  VIEWS.forEach(([name, title, view], at) => {
    nav.append(el("a", { href: "#" + name, title: `${title} (key ${at + 1})` }, title));
    const section = el("section", { id: "view-" + name, "aria-labelledby": "title-" + name, hidden: true }, el("h2", { id: "title-" + name }, title), el("div", { class: "view" }));
    sections.set(name, { section, view, built: false });
    main.append(section);
  });
  document.getElementById("foot").textContent = `Written by firebrick report ${DATA.program}. Keys: 1 to ${VIEWS.length} change the view, / searches, arrow keys move the cursor of a chart that has the focus.`;
  document.getElementById("theme").addEventListener("click", () => setTheme(dark() ? "light" : "dark"));
  document.getElementById("print").addEventListener("click", () => print());
  try { const theme = localStorage.getItem("firebrick-theme"); if (theme) document.documentElement.dataset.theme = theme; } catch { /* as above */ }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  addEventListener("hashchange", () => { show(location.hash.slice(1)); scrollTo(0, 0); });
  addEventListener("keydown", keyboard);
  addEventListener("scroll", () => { TIP.hidden = true; }, { passive: true });
  // all of a view's charts are drawn for paper, seen or not
  addEventListener("beforeprint", () => { for (const own of CHARTS) if (own.figure.isConnected && !own.state.drawn) own.draw(); });
  show(location.hash.slice(1));
  repaintLabel();
}

function repaintLabel() { document.getElementById("theme").textContent = dark() ? "Light" : "Dark"; }

start();
