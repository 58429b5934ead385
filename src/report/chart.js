// Charts: axes, lines, stacked areas, a cursor that mouse, finger and arrow keys move.

const CHARTS = new Set();
const TIP = document.getElementById("tip");

/** Round steps between two numbers. */
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) || power * 10;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

/** Round powers of two for bytes. */
function byteTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const step = 2 ** Math.ceil(Math.log2(Math.max(rough, 1)));
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
  return found;
}

function extent(columns) {
  let low = Infinity, high = -Infinity;
  for (const column of columns) for (const value of column) {
    if (value === null || value === undefined || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? null : [low, high];
}

function padded([low, high]) {
  if (low === 0 && high === 0) return [-0.05, 1];
  // what differs by rounding alone is constant
  const constant = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  const pad = constant ? Math.abs(high) * 0.1 : (high - low) * 0.06;
  return [low - pad, high + pad];
}

/** The index of the value nearest to `x` in an ascending column. */
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

/** A path through points; of more points than pixels, the lowest and highest of each pixel. */
function linePath(xs, ys, px, py, width) {
  let path = "", pen = false, column = null, low = 0, high = 0, last = 0;
  const dense = xs.length > 2 * width;
  const move = (x, y) => { path += (pen ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1); pen = true; };
  const flush = () => {
    if (column === null) return;
    move(column, low);
    if (high !== low) { move(column, high); move(column, last); }
    column = null;
  };
  for (let at = 0; at < xs.length; at++) {
    const value = ys[at];
    if (value === null || value === undefined || !Number.isFinite(value)) continue;
    const x = px(xs[at]), y = py(value);
    if (!dense) { move(x, y); continue; }
    const here = Math.round(x);
    if (here !== column) { flush(); column = here; low = high = y; }
    low = Math.min(low, y); high = Math.max(high, y); last = y;
  }
  flush();
  return path;
}

/** The area between two columns. `flat` keeps a value until the next x. */
function areaPath(xs, lows, highs, px, py, flat) {
  const up = [], down = [];
  for (let at = 0; at < xs.length; at++) {
    if (lows[at] === null || highs[at] === null) continue;
    const from = px(xs[at]), to = flat ? px(at + 1 < xs.length ? xs[at + 1] : xs[at] + (xs[at] - xs[at - 1] || 1)) : from;
    for (const x of flat ? [from, to] : [from]) {
      up.push(x.toFixed(1) + " " + py(highs[at]).toFixed(1));
      down.push(x.toFixed(1) + " " + py(lows[at]).toFixed(1));
    }
  }
  return up.length ? "M" + up.join("L") + "L" + down.reverse().join("L") + "Z" : "";
}

/**
 * A chart in a figure that draws itself when it is seen and whenever its width or the theme changes.
 * spec() gives {title, unit, height, x: {label, format, range?}, y: {format, range?, bytes?, log?}, lines, areas, bands, cursor}:
 *   lines  {xs, ys, colour, dash, width, opacity, step}
 *   areas  {xs, lows, highs, colour, opacity, flat}
 *   bands  {from, to, text, colour}: shaded parts of the x axis
 *   cursor {xs, tell(index)}: where the cursor can stand, and what it says there: [[mark, text, value]] below a heading
 */
function chart(title, spec, note) {
  const holder = el("div", { class: "plot", tabindex: "0", role: "img" });
  const heading = el("figcaption", null, title);
  const figure = el("figure", { class: "chart" }, heading, holder, note && el("p", { class: "note" }, note));
  const state = { at: null, drawn: null, width: 0, shown: false };
  const draw = () => {
    const width = Math.floor(holder.clientWidth);
    if (!width) return;
    state.width = width;
    if (!state.drawn) performance.mark("drawn");
    state.drawn = plot(holder, spec(), width, state);
    holder.setAttribute("aria-label", `${title}. ${state.drawn.summary} Arrow keys move the cursor.`);
  };
  const own = { figure, draw, state, hide: () => cursor(holder, state, null) };
  const observer = new IntersectionObserver((entries) => {
    state.shown = entries.some((entry) => entry.isIntersecting);
    if (state.shown && (!state.drawn || state.stale || holder.clientWidth !== state.width)) { state.stale = false; draw(); }
  }, { rootMargin: "600px" });
  observer.observe(holder);
  new ResizeObserver(() => { if (state.drawn && Math.abs(holder.clientWidth - state.width) > 1) draw(); }).observe(holder);
  holder.addEventListener("pointermove", (event) => point(holder, state, event));
  holder.addEventListener("pointerdown", (event) => point(holder, state, event));
  holder.addEventListener("pointerleave", () => cursor(holder, state, null));
  holder.addEventListener("blur", () => cursor(holder, state, null));
  holder.addEventListener("keydown", (event) => keys(holder, state, event));
  CHARTS.add(own);
  figure.redraw = () => { if (state.shown) draw(); else state.stale = true; };
  figure.draw = draw;
  return figure;
}

function redrawCharts() {
  for (const own of CHARTS) {
    if (!own.figure.isConnected) CHARTS.delete(own);
    else own.figure.redraw();
  }
}

function scales(spec, width, height, left) {
  const lines = spec.lines || [], areas = spec.areas || [];
  const xs = extent([...lines, ...areas].map((s) => s.xs)) || [0, 1];
  const [x0, x1] = spec.x.range || (xs[0] === xs[1] ? [xs[0] - 0.5, xs[1] + 0.5] : xs);
  const found = extent([...lines.map((s) => s.ys), ...areas.map((s) => s.highs), ...areas.map((s) => s.lows)]);
  let [y0, y1] = spec.y.range || (found ? padded(found) : [0, 1]);
  if (spec.y.zero) { y0 = 0; y1 = found && found[1] > 0 ? found[1] * 1.06 : 1; }
  const log = spec.y.log && found && found[1] > 0;
  const least = log ? lines.reduce((least, s) => s.ys.reduce((l, y) => (y > 0 && y < l ? y : l), least), Infinity) : 0;
  if (log) { y0 = Math.log10(least) - 0.05; y1 = Math.log10(found[1]) + 0.05; }
  const right = width - 8, top = 8 + (spec.bands ? 14 : 0), bottom = height - 34;
  const px = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (right - left);
  const py = (y) => bottom - (((log ? Math.log10(Math.max(y, least)) : y) - y0) / (y1 - y0 || 1)) * (bottom - top);
  return { x0, x1, y0, y1, px, py, left, right, top, bottom, log, empty: !found };
}

function plot(holder, spec, width, state) {
  const height = spec.height || 200;
  const s = scales(spec, width, height, spec.y.room || 54);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const band of spec.bands || []) root.append(bandOf(band, s));
  root.append(axes(spec, s, width, height));
  for (const area of spec.areas || []) {
    // thin areas would be all edge
    const edge = area.edge && area.xs.length < width / 8 ? area.edge : null;
    root.append(svg("path", { d: areaPath(area.xs, area.lows, area.highs, s.px, s.py, area.flat), fill: area.colour, "fill-opacity": area.opacity ?? 1, stroke: edge, "stroke-width": edge ? 0.6 : null }));
  }
  for (const line of spec.lines || []) {
    const d = line.step ? stepPath(line.xs, line.ys, s.px, s.py) : linePath(line.xs, line.ys, s.px, s.py, width);
    root.append(svg("path", { d, fill: "none", stroke: line.colour, "stroke-width": line.width || 1.6, "stroke-dasharray": line.dash, "stroke-opacity": line.opacity, "stroke-linejoin": "round" }));
    if (line.xs.length === 1 && line.ys[0] !== null) root.append(svg("circle", { cx: s.px(line.xs[0]), cy: s.py(line.ys[0]), r: 3, fill: line.colour }));
  }
  const pin = svg("line", { class: "pin", y1: s.top, y2: s.bottom, visibility: "hidden" });
  root.append(pin);
  if (s.empty) root.append(svg("text", { x: (s.left + s.right) / 2, y: (s.top + s.bottom) / 2, "text-anchor": "middle", class: "axis" }, "no values"));
  holder.replaceChildren(root);
  const told = spec.cursor && spec.cursor.xs.length ? `${plural(spec.cursor.xs.length, "place")} along ${spec.x.label}.` : "";
  return { s, pin, spec, summary: told };
}

function stepPath(xs, ys, px, py) {
  let path = "", pen = false;
  for (let at = 0; at < xs.length; at++) {
    if (ys[at] === null) { pen = false; continue; }
    const end = at + 1 < xs.length ? xs[at + 1] : xs[at] + (xs[at] - xs[at - 1] || 1);
    path += `${pen ? "L" : "M"}${px(xs[at]).toFixed(1)} ${py(ys[at]).toFixed(1)}L${px(end).toFixed(1)} ${py(ys[at]).toFixed(1)}`;
    pen = true;
  }
  return path;
}

function bandOf(band, s) {
  const from = Math.max(s.left, s.px(band.from)), to = Math.min(s.right, s.px(band.to));
  const wide = to - from;
  const parts = [svg("rect", { x: from, y: s.top - 14, width: Math.max(0, wide), height: 11, fill: band.colour, "fill-opacity": 0.42 })];
  parts.push(svg("line", { x1: from, x2: from, y1: s.top - 14, y2: s.bottom, class: "edge" }));
  if (wide > band.text.length * 6.2) parts.push(svg("text", { x: from + 3, y: s.top - 5, class: "band" }, band.text));
  return svg("g", null, parts);
}

function axes(spec, s, width, height) {
  const group = svg("g", { class: "axis" });
  const marks = s.log ? logTicks(s.y0, s.y1) : (spec.y.bytes ? byteTicks : ticks)(s.y0, s.y1, Math.max(3, height / 42));
  for (const value of marks) {
    const y = s.py(value);
    if (y < s.top - 1 || y > s.bottom + 1) continue;
    group.append(svg("line", { x1: s.left, x2: s.right, y1: y, y2: y, class: "grid" }));
    group.append(svg("text", { x: s.left - 6, y: y + 4, "text-anchor": "end" }, spec.y.format(value)));
  }
  const whole = spec.x.whole;
  for (const value of ticks(s.x0, s.x1, Math.max(2, width / 90))) {
    if (whole && !Number.isInteger(value)) continue;
    const x = s.px(value);
    if (x < s.left - 1 || x > s.right + 1) continue;
    const anchor = x > s.right - 16 ? "end" : "middle";
    group.append(svg("text", { x, y: s.bottom + 14, "text-anchor": anchor }, spec.x.format(value)));
  }
  group.append(svg("line", { x1: s.left, x2: s.right, y1: s.bottom, y2: s.bottom, class: "base" }));
  group.append(svg("text", { x: (s.left + s.right) / 2, y: height - 4, "text-anchor": "middle" }, spec.x.label));
  return group;
}

function logTicks(low, high) {
  const found = [];
  const several = high - low < 2;
  for (let power = Math.floor(low); power <= high; power++) for (const m of several ? [1, 2, 5] : [1]) found.push(m * 10 ** power);
  return found;
}

/** Puts the cursor at an index of its places, or takes it away. */
function cursor(holder, state, at, where) {
  const drawn = state.drawn;
  state.at = at;
  if (!drawn || !drawn.spec.cursor) return;
  if (at === null) {
    drawn.pin.setAttribute("visibility", "hidden");
    TIP.hidden = true;
    return;
  }
  const x = drawn.s.px(drawn.spec.cursor.xs[at] + (drawn.spec.cursor.middle || 0));
  drawn.pin.setAttribute("x1", x);
  drawn.pin.setAttribute("x2", x);
  drawn.pin.setAttribute("visibility", "visible");
  const { heading, rows } = drawn.spec.cursor.tell(at);
  TIP.replaceChildren(el("strong", null, heading), el("table", null, rows.map(([mark, text, value]) => el("tr", null, el("td", null, mark), el("th", { scope: "row" }, text), el("td", { class: "number" }, value)))));
  TIP.hidden = false;
  const box = holder.getBoundingClientRect(), size = TIP.getBoundingClientRect();
  const left = box.left + x + 14 + size.width > innerWidth ? box.left + x - size.width - 14 : box.left + x + 14;
  const top = Math.min(where ? where.clientY + 14 : box.top + 20, innerHeight - size.height - 8);
  TIP.style.left = `${Math.max(6, Math.min(left, innerWidth - size.width - 6))}px`;
  TIP.style.top = `${Math.max(6, top)}px`;
}

function point(holder, state, event) {
  const drawn = state.drawn;
  if (!drawn || !drawn.spec.cursor || !drawn.spec.cursor.xs.length) return;
  const s = drawn.s, x = event.clientX - holder.getBoundingClientRect().left;
  const value = s.x0 + ((x - s.left) / (s.right - s.left)) * (s.x1 - s.x0) - (drawn.spec.cursor.middle || 0);
  cursor(holder, state, nearest(drawn.spec.cursor.xs, value), event);
}

function keys(holder, state, event) {
  const drawn = state.drawn;
  if (!drawn || !drawn.spec.cursor) return;
  const last = drawn.spec.cursor.xs.length - 1, far = Math.max(1, Math.round(last / 20));
  const now = state.at === null ? (event.key === "ArrowLeft" ? last + 1 : -1) : state.at;
  const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - far, PageDown: now + far, Home: 0, End: last };
  if (event.key === "Escape") { cursor(holder, state, null); return; }
  if (!(event.key in moves) || last < 0) return;
  event.preventDefault();
  cursor(holder, state, Math.max(0, Math.min(last, moves[event.key])));
}
