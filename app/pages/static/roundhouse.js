// Four small things around htmx: the badge of the live stream, messages beside the fields of refused
// forms, the theme, and charts that are drawn from the tables beside them.  Nothing here fetches; without it every page still reads.
// It is loaded before htmx, so as to hear of the stream's first connection.
"use strict";

// --- live ---------------------------------------------------------------------------------------

const badge = document.getElementById("stream");
let leaving = false;

function say(state) {
  if (badge.dataset.state === state) return;
  badge.dataset.state = state;
  badge.textContent = state;
}

addEventListener("pagehide", () => { leaving = true; });
badge.addEventListener("htmx:sse:after:connection", () => say("live"));
for (const trouble of ["htmx:sse:error", "htmx:sse:close"])
  badge.addEventListener(trouble, () => { if (!leaving) say("reconnecting"); });
badge.addEventListener("htmx:sse:before:connection", event => {
  if (event.detail.connection.attempt > 0 && !document.hidden) say("reconnecting");
});

// What changed is read out at most every five seconds.
const announcer = document.getElementById("announce");
let announced = document.querySelector("[data-announce]")?.textContent.trim();
let nextAnnouncement = 0;

function announce() {
  const words = document.querySelector("[data-announce]")?.textContent.trim();
  if (!words || words === announced || Date.now() < nextAnnouncement) return;
  announcer.textContent = announced = words;
  nextAnnouncement = Date.now() + 5000;
}

// --- refused forms ------------------------------------------------------------------------------

// A message stands beside the field that it names, until the field is changed. So long nothing is
// renewed: the page would take the message away.
const isHeld = () => [...document.querySelectorAll("#live .fault")].some(fault => fault.checkVisibility());
const sender = event => event.detail.ctx.sourceElement;

function forgive(field) {
  document.getElementById(field.getAttribute("aria-errormessage"))?.remove();
  field.removeAttribute("aria-invalid");
  field.removeAttribute("aria-errormessage");
}

function blame(form, fault) {
  // the innermost part of /budget/device_hours/cuda that is a field of the form
  const parts = fault.dataset.field.split("/").reverse();
  const named = parts.map(part => form.elements.namedItem(part)).find(found => found);
  const field = named instanceof RadioNodeList ? named[0].closest("fieldset") ?? named[0] : named;
  if (!field || field.type === "hidden") return;
  fault.id = `fault-${field.id || parts[0]}`;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-errormessage", fault.id);
  field.after(fault);
  field.closest("details")?.setAttribute("open", "");
}

function showFaults(form) {
  const alarm = document.querySelector("#told .alarm:has(.fault)");
  if (!alarm || !form) return;
  for (const fault of alarm.querySelectorAll(".fault")) blame(form, fault);
  if (!alarm.querySelector(".fault")) alarm.remove(); // every message has its place
  form.querySelector("[aria-invalid]")?.focus();
}

document.addEventListener("input", event => forgive(event.target.closest("fieldset[aria-invalid]") ?? event.target));
document.addEventListener("htmx:before:request", event => {
  if (sender(event).id === "live") { if (isHeld()) event.preventDefault(); }
  else sender(event).querySelectorAll("[aria-invalid]").forEach(forgive);
});
document.addEventListener("htmx:before:swap", event => {
  if (sender(event).id === "live" && isHeld()) event.preventDefault();
});

// --- theme --------------------------------------------------------------------------------------

const root = document.documentElement;
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";

document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* storage is switched off */ }
  draw(true);
});
systemDark.addEventListener("change", () => draw(true));

// --- charts -------------------------------------------------------------------------------------

const plots = new Map(); // element -> {chart, shape}

function read(table) {
  const heads = [...table.tHead.rows[0].cells].slice(1);
  const rows = [...table.tBodies[0].rows];
  return {
    names: heads.map(cell => cell.textContent),
    colours: heads.map(cell => cell.dataset.series),
    xs: rows.map(row => Number(row.cells[0].dataset.x)),
    ys: heads.map((_, i) => rows.map(row => {
      const cell = row.cells[i + 1], text = cell.dataset.value ?? cell.textContent;
      return text === "" ? null : Number(text);
    })),
  };
}

function stacked(ys) {
  const sums = ys[0].map(() => 0);
  return ys.map(line => line.map((y, i) => (sums[i] += y ?? 0)));
}

// How curves are drawn, as the reader chose it: on a logarithmic axis, and smoothed by a weight from 0 to 0.99.
const style = { log: false, weight: 0 };
try { Object.assign(style, JSON.parse(localStorage.getItem("curves"))); } catch { /* nothing was chosen, or storage is switched off */ }

// A mean that forgets, without the pull of its beginning (as TensorBoard draws it).
function smoothed(line) {
  let mean = 0, known = 0;
  return line.map(y => {
    if (y === null) return null;
    mean = style.weight * mean + (1 - style.weight) * y;
    known = style.weight * known + (1 - style.weight);
    return mean / known;
  });
}

function drawn(line) {
  const shown = style.weight ? smoothed(line) : line;
  return style.log ? shown.map(y => y > 0 ? y : null) : shown;
}

function offerStyle() {
  for (const tools of document.querySelectorAll(".curve-tools")) {
    const log = tools.querySelector("[name=log]"), weight = tools.querySelector("[name=weight]");
    log.checked = style.log;
    weight.value = style.weight;
    tools.hidden = false;
    tools.oninput = () => {
      Object.assign(style, { log: log.checked, weight: Number(weight.value) });
      try { localStorage.setItem("curves", JSON.stringify(style)); } catch { /* storage is switched off */ }
      draw(true);
    };
  }
}

function colour(name) {
  const probe = document.createElement("i");
  probe.className = name;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const FONT = "12px system-ui, sans-serif";
const title = label => ({ label, labelSize: 18, labelGap: 2, labelFont: FONT });
// The value at a place, or the last one before it: not every curve has a point at every step.
const reached = (line, index) => index === null ? null : line.slice(0, index + 1).findLast(y => y !== null);
const said = value => value === null || value === undefined ? "–" : String(Number(value.toPrecision(5)));

// Returns the space to keep free to the right of a chart: half of an axis's last label stands there.
const ruler = document.createElement("canvas").getContext("2d");
function halfLabel(text) {
  ruler.font = FONT;
  return Math.ceil(ruler.measureText(text).width / 2) + 4;
}

const WHOLE = Array.from({ length: 13 }, (_, n) => [1, 2, 5].map(first => first * 10 ** n)).flat();  // distances of steps on an axis

function options(table, data, width) {
  const stack = table.dataset.plot === "stack";
  const quiet = colour("quiet"), rule = isDark() ? "#343942" : "#e4e1da";
  const axis = { stroke: quiet, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, font: FONT };
  const dates = stack && data.xs.at(-1) - data.xs[0] > 2 * 86400;
  const time = (_, splits) => splits.map(at => new Date(at * 1000).toLocaleString([], dates ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit", hour12: false }));
  const paths = stack ? uPlot.paths.stepped({ align: 1 }) : undefined;
  return {
    width, height: 210,
    padding: [10, () => halfLabel(stack ? time(null, [data.xs.at(-1)])[0] : data.xs.at(-1).toLocaleString()), 0, 0],
    legend: { show: true },
    cursor: { y: false, points: { show: !stack }, ...(stack ? {} : { sync: { key: "curves" } }) },
    scales: { x: { time: stack }, y: stack ? { range: (_, __, max) => [0, Math.max(1, max * 1.05)] } : { distr: style.log ? 3 : 1 } },
    axes: [
      { ...axis, ...title(stack ? "time" : "step"), size: 34, ...(stack ? { values: time } : { incrs: WHOLE }) },
      { ...axis, ...title(table.dataset.y), size: 60, values: (_, splits) => splits.map(said) },
    ],
    // the topmost sum is drawn first, so that each lower one covers its own part
    series: [{ label: stack ? "time" : "step", value: stack ? (_, x) => x === null ? "–" : time(_, [x])[0] : (_, x) => x ?? "–" }, ...data.names.map((label, i) => {
      const stroke = colour(`series-${data.colours[i]}`);
      return { label, stroke, width: 1.5, paths, value: (_, __, at, index) => said(reached(data.own[at - 1], index)), points: { show: !stack && data.xs.length < 40, size: 5 }, fill: stack ? stroke : undefined, spanGaps: true };
    })],
  };
}

function chart(element, table, afresh) {
  const data = read(table);
  if (!data.xs.length) return;
  const stack = table.dataset.plot === "stack";
  const order = data.names.map((_, i) => i);
  if (stack) order.reverse();
  const pick = list => order.map(i => list[i]);
  const lines = stack ? stacked(data.ys) : data.ys.map(drawn);
  const columns = [data.xs, ...pick(lines)];
  const shown = { ...data, names: pick(data.names), colours: pick(data.colours), own: pick(data.ys) };
  const shape = JSON.stringify([shown.names, shown.colours]);
  const width = element.clientWidth;
  const known = plots.get(element);
  if (known && !afresh && known.shape === shape) {
    if (known.chart.width !== width) known.chart.setSize({ width, height: 210 });
    Object.assign(known.shown, shown); // what the legend tells
    known.chart.setData(columns);
    return;
  }
  known?.chart.destroy();
  const made = new uPlot(options(table, shown, width), columns, element);
  made.root.querySelector(".u-legend").setAttribute("role", "presentation");
  plots.set(element, { shape, shown, chart: made });
}

function draw(afresh = false) {
  offerStyle();
  for (const [element, { chart }] of plots) {
    if (element.isConnected) continue;
    chart.destroy();
    plots.delete(element);
  }
  for (const element of document.querySelectorAll(".plot")) {
    const table = document.getElementById(element.dataset.of);
    if (table) chart(element, table, afresh);
  }
}

let resized;
addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => draw());
});

// --- after each renewal -------------------------------------------------------------------------

const atEnd = log => log.scrollHeight - log.scrollTop - log.clientHeight < 8;
let follow = true;

function toEnd() {
  const log = document.querySelector("[data-follow]");
  if (log && follow) log.scrollTop = log.scrollHeight;
}

document.addEventListener("htmx:before:swap", () => {
  const log = document.querySelector("[data-follow]");
  follow = !log || atEnd(log);
});
document.addEventListener("htmx:after:swap", event => {
  if (sender(event).matches("form")) {
    showFaults(sender(event));
    document.getElementById("told").scrollIntoView({ block: "nearest" });
  }
  draw(); toEnd(); announce();
});
draw();
toEnd();

// Where the list of pages is wider than the screen, this one is in sight.
const here = document.querySelector(".top nav [aria-current]");
if (here) here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.offsetLeft - 48;

// --- keys ---------------------------------------------------------------------------------------

const shortcuts = document.getElementById("shortcuts"), useKeys = document.getElementById("use-keys");
try { useKeys.checked = localStorage.getItem("keys") !== "off"; } catch { /* storage is switched off */ }
useKeys.addEventListener("change", () => {
  try { localStorage.setItem("keys", useKeys.checked ? "on" : "off"); } catch { /* storage is switched off */ }
});

// Moves the focus to the link of the next row that has one, so that Enter opens it.
function step(by) {
  const links = [...document.querySelectorAll("#live tbody tr")].map(row => row.querySelector("a[href]")).filter(Boolean);
  const row = document.activeElement.closest("#live tbody tr");
  const at = links.findIndex(link => link.closest("tr") === row);
  const next = links[at < 0 ? (by > 0 ? 0 : links.length - 1) : Math.min(Math.max(at + by, 0), links.length - 1)];
  next?.focus();
  return Boolean(next);
}

const PRESSED = {
  "/": () => { const search = document.querySelector('#live input[type="search"]'); search?.focus(); return Boolean(search); },
  "j": () => step(1),
  "k": () => step(-1),
  "x": () => { const box = document.activeElement.closest("#live tbody tr")?.querySelector('input[type="checkbox"]'); box?.click(); return Boolean(box); },
  "?": () => { shortcuts.showModal(); return true; },
};

document.addEventListener("keydown", event => {
  const types = event.target.closest("input:not([type=checkbox]), textarea, select, [contenteditable], dialog");
  if (types || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key !== "?" && !useKeys.checked) return;
  if (PRESSED[event.key]?.()) event.preventDefault();
});
