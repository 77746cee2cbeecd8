// The live page of examples/openai_server.py: /state/stream drawn, and requests of one's own.
// Text of prompts and answers goes into the page as text nodes only.
"use strict";

const MAX_BARS = 8000; // stays that are remembered; the oldest go first
const MAX_STATES = 2000; // of one answer
const MAX_LANES = 128;
const CHART_S = 60; // of the small charts
const LAG_S = 0.2; // behind the server: frames come every 0.1 s
const SHOW_MS = 70; // between two states of an answer; faster ones are slowed down to be seen
const STAY_MS = 1500; // on an answer that has ended, before following another
const SILENT_S = 3; // without a frame: slow
const DEAD_S = 30; // without a frame: the connection is given up
const LOAD = { workers: 3, each: 20 }; // browsers have about six connections for a server

const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en");

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} s`;
}

function counted(number, what) {
  return `${whole.format(number)} ${what}${number === 1 ? "" : "s"}`;
}

function rate(value) {
  return value < 99.95 ? value.toFixed(1) : whole.format(Math.round(value));
}

function shortId(id) {
  const [name, choice] = id.split(/\.(?=\d+$)/);
  const tail = name.length > 10 ? `…${name.slice(-6)}` : name;
  return choice === undefined || choice === "0" ? tail : `${tail}.${choice}`;
}

let saying = 0;
function say(text, bad = false) {
  const line = $("said");
  line.toggleAttribute("data-bad", bad);
  line.textContent = text;
  clearTimeout(saying);
  if (!bad) saying = setTimeout(() => { line.textContent = ""; }, 8000);
}

// --- talking to the server ---------------------------------------------------------------------

let key = sessionStorage.getItem("key");

async function talk(path, { body, signal } = {}) {
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    throw signal?.aborted ? error : new Error("the server cannot be reached");
  }
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: the status has to do */ }
  if (response.status === 401) $("key-form").hidden = false;
  throw Object.assign(new Error(message), { status: response.status });
}

// The data of server-sent events. EventSource can neither POST nor send a key.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// --- what is known -----------------------------------------------------------------------------

// A stay of a request in a slot. Instants are seconds on the server's clock.
// {id, slot, from, to, phases: [[instant, phase]], blocks: [instant], numBlocks, steps, reason}
const bars = [];
const open = new Map(); // id -> its bar that has no end yet
const policies = []; // [instant, name], since the page was opened
const samples = []; // for the charts
let frame = null; // the last one
let run = null; // which server; another one starts everything anew
let numEvents = 0;
let offset = -Infinity; // server's clock minus ours
let arrivedAt = 0; // our clock, of the last frame
let connected = false;
let held = null; // the instant at which the picture is held, or null

const clock = () => performance.now() / 1000;

// The instant at the right edge.
function shownNow() {
  if (held !== null) return held;
  if (frame === null) return 0;
  if (!connected) return frame.now;
  return Math.min(clock() + offset - LAG_S, frame.now + 2);
}

function forget() {
  bars.length = policies.length = samples.length = numEvents = 0;
  open.clear();
  offset = -Infinity;
  held = null;
  $("hold").setAttribute("aria-pressed", "false");
}

function enter(id, slot, at) {
  leave(id, at, null);
  const bar = {
    id, slot, from: at, to: null, phases: [[at, "prefill"]], blocks: [], numBlocks: 0, steps: 0,
    reason: null,
  };
  bars.push(bar);
  open.set(id, bar);
  if (bars.length > MAX_BARS) bars.splice(0, MAX_BARS / 8);
  return bar;
}

function leave(id, at, reason) {
  const bar = open.get(id);
  if (bar === undefined) return;
  bar.to = at;
  bar.reason = reason;
  open.delete(id);
}

function happened([kind, at, id, value]) {
  const bar = open.get(id);
  if (kind === "join") enter(id, value, at);
  else if (kind === "end") leave(id, at, value);
  else if (kind === "preempt") leave(id, at, "preempted");
  else if (kind === "policy") {
    policies.push([at, id]);
    if (policies.length > 100) policies.shift();
  } else if (bar !== undefined && kind === "block") {
    while (bar.numBlocks < value) {
      bar.blocks.push(at);
      bar.numBlocks += 1;
    }
  } else if (bar !== undefined && kind === "phase") bar.phases.push([at, value]);
}

function take(news) {
  if (news.run !== run) {
    forget();
    run = news.run;
  }
  const fresh = Math.min(news.num_events - numEvents, news.events.length);
  if (fresh > 0) for (const event of news.events.slice(-fresh)) happened(event);
  numEvents = news.num_events;
  for (const row of news.slots) { // joins that were too long ago to be among the events
    if (row === null) continue;
    const bar = open.get(row.id) ?? enter(row.id, row.slot, row.admitted_at ?? news.now);
    bar.steps = row.steps;
    bar.numBlocks = Math.max(bar.numBlocks, row.blocks);
    if (bar.phases.at(-1)[1] !== row.phase) bar.phases.push([news.now, row.phase]);
    if (!seen.has(row.phase)) {
      seen.add(row.phase);
      drawLegend();
    }
  }
  for (const [id, bar] of open) if (news.slots[bar.slot]?.id !== id) leave(id, news.now, null);
  frame = news;
  arrivedAt = clock();
  offset = Math.max(news.now - arrivedAt, offset - 0.001);
  const refused = news.responses
    .filter((one) => one.path.startsWith("/v1/") && (one.status === 429 || one.status === 503))
    .reduce((sum, one) => sum + one.count, 0);
  samples.push({ at: news.now, refused, ...pick(news) });
  while (samples[0].at < news.now - CHART_S - 1) samples.shift();
}

function pick(news) {
  return {
    waiting: news.waiting, running: news.running, requests: news.requests_per_s,
    tokens: news.tokens_per_s, latency: news.latency_s, waited: news.waited_s,
  };
}

// --- the connection ----------------------------------------------------------------------------

let retryNow = () => {};
let giveUp = new AbortController();

async function follow() {
  for (let wait = 0.5; ; wait = Math.min(wait * 1.7, 8)) {
    let why = "";
    giveUp = new AbortController();
    try {
      const response = await talk("state/stream", { signal: giveUp.signal });
      for await (const data of events(response)) {
        let news;
        try {
          news = JSON.parse(data);
          if (news.slots) take(news);
        } catch (bug) {
          reportError(bug); // else it would pass for a lost connection
          throw bug;
        }
        if (news.error) break;
        if (news.over) {
          why = "The server is shutting down.";
          break;
        }
        if (!connected) {
          if (!$("lost").hidden) say("Connected again.");
          connected = true;
          wait = 0.5;
          $("lost").hidden = true;
          welcome();
        }
      }
    } catch (error) {
      if (error.status !== undefined) why = `The server says: ${error.message}.`;
    }
    connected = false;
    $("lost").hidden = false;
    await pause(wait, why || "The connection to the server is lost.");
  }
}

async function pause(wait, why) {
  const until = clock() + wait;
  let skipped = false;
  retryNow = () => { skipped = true; };
  setText($("lost-text"), `${why} What you see is old. Trying again every few seconds.`);
  while (clock() < until && !skipped) await new Promise((then) => setTimeout(then, 50));
}

$("retry").addEventListener("click", () => retryNow());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("key", key);
  $("key-form").hidden = true;
  retryNow();
});

// --- colours -----------------------------------------------------------------------------------

const COLOURS = ["ink", "muted", "line", "lane", "card", "accent", "prefill", "refresh", "reuse",
  "tick", "label", "on-prefill",
  "done", "eos", "length", "cancelled", "bad", "chosen", "p50", "p90", "p99"];
let colour = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  colour = Object.fromEntries(
    COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

const PHASES = { prefill: "prefill", refresh: "refresh", reuse: "reuse" };
const ENDS = {
  eos: "eos", length: "length", max_steps: "length", preempted: "refresh", cancelled: "cancelled",
  deadline: "bad", queue_timeout: "bad", error: "bad",
};

const seen = new Set(["prefill", "reuse"]);

function endColour(bar) {
  return colour[ENDS[bar.reason] ?? "cancelled"];
}

function drawLegend() {
  const item = (name, text, kind = "") => {
    const swatch = make("i", { className: kind });
    if (name) swatch.style.background = `var(--${name})`;
    return make("li", {}, swatch, text);
  };
  const byPhase = $("colour").value === "phase";
  const ends = [[byPhase ? "eos" : "done", "end of text"], ["length", "length"],
    ["cancelled", "cancelled"], ["bad", "deadline, error"]];
  $("legend").replaceChildren(
    ...(byPhase ? [...seen].map((name) => item(PHASES[name], name)) : [item("reuse", "runs")]),
    item("", "block done", "tick"),
    ...ends.map(([name, text]) => item(name, text, byPhase ? "cap" : "")),
  );
}

// --- the slots over time -----------------------------------------------------------------------

const GUTTER = 30;
const AXIS = 20;

function fit(canvas, height) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  const w = Math.round(width * ratio);
  const h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return [context, width];
}

function layout() {
  const lanes = Math.min(frame?.max_num_seqs ?? 16, MAX_LANES);
  const lane = Math.max(7, Math.min(22, Math.floor(520 / lanes)));
  const span = Number($("span").value);
  const now = shownNow();
  return { lanes, lane, span, now, left: now - span };
}

function drawGantt() {
  const { lanes, lane, span, now, left } = layout();
  const [c, width] = fit($("gantt"), lanes * lane + AXIS);
  const scale = (width - GUTTER) / span;
  const x = (at) => GUTTER + (at - left) * scale;
  const bottom = lanes * lane;

  c.fillStyle = colour.lane;
  for (let slot = 0; slot < lanes; slot++) c.fillRect(GUTTER, slot * lane + 1, width, lane - 2);
  c.textAlign = "right";
  c.fillStyle = colour.muted;
  const every = lane >= 13 ? 1 : 4;
  for (let slot = 0; slot < lanes; slot += every) {
    c.fillText(slot, GUTTER - 7, Math.max(7, (slot + 0.5) * lane));
  }
  drawAxis(c, x, now, span, width, bottom);
  if (frame === null) return;

  c.save();
  c.beginPath();
  c.rect(GUTTER, 0, width, bottom);
  c.clip();
  const byPhase = $("colour").value === "phase";
  for (const bar of bars) {
    const to = bar.to ?? now;
    if (to < left || bar.from > now || bar.slot >= lanes) continue;
    drawBar(c, bar, x, Math.min(to, now), lane, byPhase);
  }
  c.restore();
  drawPolicies(c, x, now, left, bottom);
}

function drawBar(c, bar, x, to, lane, byPhase) {
  const y = bar.slot * lane + 1;
  const height = lane - 2;
  const start = x(bar.from);
  const end = Math.max(x(to) - 1, start + 1);
  const over = bar.reason !== null && bar.to <= to; // as far as the picture goes
  if (byPhase || !over) {
    for (const [i, [at, phase]] of bar.phases.entries()) {
      const next = i + 1 < bar.phases.length ? x(bar.phases[i + 1][0]) : end;
      c.fillStyle = byPhase ? colour[PHASES[phase] ?? "cancelled"] : colour.reuse;
      c.fillRect(x(at), y, Math.min(next, end) - x(at), height);
    }
  } else {
    c.fillStyle = bar.reason === "eos" ? colour.done : endColour(bar);
    c.fillRect(start, y, end - start, height);
  }
  const fill = c.fillStyle; // of the last phase
  if (end - start > 4 * bar.blocks.length) { // else they would be all there is to see
    c.fillStyle = colour.tick;
    for (const at of bar.blocks) if (at < to) c.fillRect(x(at) - 0.5, y, 1, height);
  }
  if (over && byPhase) {
    const cap = Math.min(4, (end - start) / 3);
    c.fillStyle = colour.card;
    if (bar.reason !== "eos") c.fillRect(end - cap - 1, y, 1, height);
    c.fillStyle = endColour(bar);
    c.fillRect(end - cap, y, cap, height);
  }
  if (lane >= 13 && end - start > 64) {
    const text = over ? bar.reason.replaceAll("_", " ") : shortId(bar.id);
    const width = Math.min(c.measureText(text).width, end - start - 20);
    c.fillStyle = fill;
    c.fillRect(end - width - 12, y, width + 6, height); // no tick shows through, nor a phase
    c.fillStyle = colour[
      over && !byPhase ? "card" : byPhase && bar.phases.at(-1)[1] === "prefill" ? "on-prefill"
        : "label"];
    c.textAlign = "right";
    c.fillText(text, end - 9, y + height / 2 + 0.5, width);
  }
  if (bar.id === chosen?.id) {
    c.strokeStyle = colour.chosen;
    c.lineWidth = 2;
    c.strokeRect(start, y, Math.max(end - start, 3), height);
  }
}

function drawAxis(c, x, now, span, width, bottom) {
  const step = [0.2, 0.5, 1, 2, 5, 10, 20, 60].find((one) => one * (width / span) > 70) ?? 120;
  c.fillStyle = colour.line;
  c.textAlign = "center";
  for (let ago = 0; ago <= span; ago += step) {
    const at = Math.min(x(now - ago), width - 0.5);
    c.fillStyle = colour.line;
    c.fillRect(at, 0, 1, bottom + 4);
    c.fillStyle = colour.muted;
    if (ago === 0) {
      c.textAlign = "right";
      c.fillText("now", width - 1, bottom + 12);
      c.textAlign = "center";
    } else if (at > GUTTER + 16) {
      c.fillText(`−${span >= 120 ? `${ago / 60} min` : `${+ago.toFixed(1)} s`}`, at, bottom + 12);
    }
  }
}

function drawPolicies(c, x, now, left, bottom) {
  for (const [at, name] of policies) {
    if (at < left || at > now) continue;
    c.fillStyle = colour.ink;
    c.fillRect(x(at), 0, 1.5, bottom);
    const width = c.measureText(name).width + 10;
    const flip = x(at) + width > $("gantt").clientWidth;
    c.fillRect(flip ? x(at) - width : x(at), 0, width, 16);
    c.fillStyle = colour.card;
    c.textAlign = "left";
    c.fillText(name, (flip ? x(at) - width : x(at)) + 5, 8.5);
  }
}

function barAt(event) {
  const box = $("gantt").getBoundingClientRect();
  const { lane, span, now, left } = layout();
  const at = left + (event.clientX - box.left - GUTTER) / ((box.width - GUTTER) / span);
  const slack = 3 * span / box.width;
  const slot = Math.floor((event.clientY - box.top) / lane);
  let best = null;
  for (const bar of bars) {
    if (bar.slot !== slot || bar.from > at + slack || (bar.to ?? now) < at - slack) continue;
    if (best === null || bar.from <= at) best = bar;
  }
  return best;
}

function describe(bar) {
  const blocks = `${counted(bar.numBlocks, "block")} done`;
  const lasted = (bar.to ?? shownNow()) - bar.from;
  const end = bar.to === null ? "runs" : (bar.reason ?? "gone").replaceAll("_", " ");
  return `Slot ${bar.slot}: ${shortId(bar.id)}, ${seconds(lasted)}, ${blocks}, ${end}`;
}

const gantt = $("gantt");
gantt.addEventListener("pointermove", (event) => {
  const bar = barAt(event);
  gantt.title = bar === null ? "" : describe(bar);
});
gantt.addEventListener("click", (event) => {
  const bar = barAt(event);
  if (bar !== null) choose(bar);
});
gantt.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[
    event.key];
  if (step === undefined || bars.length === 0) return;
  event.preventDefault();
  const bar = neighbour(...step);
  if (bar !== undefined) choose(bar);
});

// The bar before or after the chosen one in its lane, or the one at its time in another lane.
function neighbour(along, across) {
  const { lanes } = layout();
  const here = bars.findLast((bar) => bar.id === chosen?.id) ?? bars.at(-1);
  if (here.id !== chosen?.id) return here;
  if (along !== 0) {
    const lane = bars.filter((bar) => bar.slot === here.slot);
    return lane[lane.indexOf(here) + along];
  }
  for (let slot = here.slot + across; slot >= 0 && slot < lanes; slot += across) {
    const lane = bars.filter((bar) => bar.slot === slot);
    if (lane.length) return lane.findLast((bar) => bar.from <= here.from) ?? lane[0];
  }
  return undefined;
}

$("hold").addEventListener("click", () => {
  held = held === null ? shownNow() : null;
  $("hold").setAttribute("aria-pressed", String(held !== null));
  setText($("hold"), held === null ? "Hold" : "Go on");
});
$("colour").addEventListener("change", drawLegend);

function drawTable() {
  if (!$("table-box").open || frame === null) return;
  const body = $("table");
  const count = Math.min(frame.max_num_seqs, MAX_LANES);
  while (body.rows.length > count) body.deleteRow(-1);
  while (body.rows.length < count) {
    const button = make("button", { type: "button" });
    button.addEventListener("click", () => {
      const bar = open.get(button.value);
      if (bar !== undefined) choose(bar);
    });
    const row = make("tr", {}, make("th", { scope: "row", textContent: body.rows.length }));
    row.append(make("td", {}, button), make("td"), make("td"), make("td"));
    body.append(row);
  }
  for (const [slot, row] of frame.slots.slice(0, count).entries()) {
    const [, name, phase, steps, blocks] = body.rows[slot].cells;
    const button = name.firstChild;
    button.value = row?.id ?? "";
    setText(button, row === null ? "–" : shortId(row.id));
    button.disabled = row === null && document.activeElement !== button;
    setText(phase, row?.phase ?? "free");
    setText(steps, row === null ? "" : String(row.steps));
    setText(blocks, row === null ? "" : `${row.blocks} of ${row.max_blocks}`);
  }
}

// --- numbers -----------------------------------------------------------------------------------

const TILES = [
  ["Running", (f) => [whole.format(f.running), `of ${whole.format(f.max_num_seqs)} slots`]],
  ["Waiting", (f) => [whole.format(f.waiting), ""]],
  ["Refused", () => [whole.format(samples.at(-1).refused), ""],
    "Answers 429 or 503: too many requests were open"],
  ["Finished", (f) => [whole.format(f.finished), ""]],
  ["Requests", (f) => [rate(f.requests_per_s), "/s"], "Over the last 10 s"],
  ["Tokens", (f) => [rate(f.tokens_per_s), "/s"], "Of finished requests, over the last 10 s"],
  ["Steps", (f) => [rate(f.steps_per_s), "/s"], "Over the last 10 s"],
  ["Rows a step", (f) => [f.rows_per_step.toFixed(1), ""], "Over the last 10 s"],
];

for (const [name, , title] of TILES) {
  const value = make("dd", {}, make("span", { textContent: "–" }), " ", make("small"));
  $("tiles").append(make("div", { title: title ?? "" }, make("dt", { textContent: name }), value));
}

function drawTiles() {
  if (frame === null) return;
  for (const [i, [, read]] of TILES.entries()) {
    const [value, unit] = read(frame);
    const shown = $("tiles").children[i].lastChild;
    setText(shown.firstChild, value);
    setText(shown.lastChild, unit);
  }
}

const percentiles = (name) => ["p50", "p90", "p99"].map((p) => [p, p, (s) => s[name][p]]);
const CHARTS = [
  { title: "Queue", unit: "requests", show: (v) => whole.format(v), lines: [
    ["waiting", "p90", (s) => s.waiting], ["running", "p50", (s) => s.running]] },
  { title: "Throughput", unit: "tokens/s", show: rate, lines: [
    ["tokens/s", "p50", (s) => s.tokens]] },
  { title: "Latency", unit: "to the whole answer", show: seconds,
    lines: percentiles("latency") },
  { title: "Wait", unit: "for a slot", show: seconds, lines: percentiles("waited") },
];

for (const chart of CHARTS) {
  chart.canvas = make("canvas");
  chart.canvas.setAttribute("aria-hidden", "true");
  const values = chart.lines.map(([name, tint]) => {
    const swatch = make("i");
    swatch.style.background = `var(--${tint})`;
    return make("li", {}, swatch, `${name} `, make("b", { textContent: "–" }));
  });
  chart.values = values.map((one) => one.lastChild);
  const card = make("section", { className: "card chart" },
    make("h2", { textContent: chart.title }),
    make("span", { className: "unit", textContent: chart.unit }),
    chart.canvas, make("ul", { className: "legend" }, ...values));
  $("charts").append(card);
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((one) => one * power >= value);
}

function drawChart({ canvas, lines, show, values }) {
  const height = 108;
  const [c, width] = fit(canvas, height);
  const now = held ?? frame?.now ?? 0;
  const visible = samples.filter((one) => one.at >= now - CHART_S && one.at <= now);
  const most = Math.max(0, ...visible.flatMap((s) => lines.map(([, , read]) => read(s) ?? 0)));
  const top = niceTop(most || 1);
  const bottom = height - 18;
  const y = (value) => bottom - (value / top) * (bottom - 8);
  const x = (at) => width - ((now - at) / CHART_S) * width;
  c.fillStyle = colour.line;
  for (const part of [0, 0.5, 1]) c.fillRect(0, Math.round(y(part * top)), width, 1);
  for (const [i, [, tint, read]] of lines.entries()) {
    c.strokeStyle = colour[tint];
    c.lineWidth = 1.75;
    c.lineJoin = "round";
    c.beginPath();
    let drawn = false;
    for (const sample of visible) {
      const value = read(sample);
      if (value === null) drawn = false;
      else if (drawn) c.lineTo(x(sample.at), y(value));
      else c.moveTo(x(sample.at), y(value));
      drawn = value !== null;
    }
    c.stroke();
    const last = visible.length ? read(visible.at(-1)) : null;
    setText(values[i], last === null ? "–" : show(last));
  }
  c.fillStyle = colour.muted;
  c.textAlign = "left";
  c.fillText(show(top), 0, y(top) - 1 + 8);
  c.fillText(`−${CHART_S} s`, 0, height - 7);
  c.textAlign = "right";
  c.fillText("now", width, height - 7);
}

// --- one answer --------------------------------------------------------------------------------

// {id, mine, prompt, maxTokens, blockLength, states: [{committed, position, provisional, steps}],
//  status, latency, shown: index of a state, pinned: by the slider, endedAt, told}
let chosen = null;
let shownAt = 0;
let watching = new AbortController();
let awaiting = false; // whoever comes next
const HINT = "Choose a bar, with the mouse or the arrow keys, to see its answer.";
setText($("caption"), HINT);

function begin(id, mine) {
  chosen = {
    id, mine, prompt: "", maxTokens: 0, blockLength: 0, states: [], status: "waiting",
    latency: null, shown: -1, pinned: false, endedAt: null, told: false,
  };
  setText($("caption"), HINT);
  drawAnswer();
  return chosen;
}

function choose(bar) {
  $("follow").checked = false;
  if (chosen?.id !== bar.id) watch(bar.id);
  setText($("caption"), describe(bar));
}

// Watch a request's answer, or that of who joins next.
async function watch(id) {
  watching.abort();
  watching = new AbortController();
  const { signal } = watching;
  awaiting = id === null;
  let answer = awaiting ? null : begin(id, false);
  try {
    const query = awaiting ? "" : `?id=${encodeURIComponent(id)}`;
    const response = await talk(`state/answer${query}`, { signal });
    for await (const data of events(response)) {
      const news = JSON.parse(data);
      if (news.error) throw new Error(news.error.message);
      if (news.over) break;
      answer ??= begin(news.request, false);
      awaiting = false;
      Object.assign(answer, {
        prompt: news.prompt ?? answer.prompt, status: news.status, latency: news.latency_s,
        maxTokens: news.max_tokens, blockLength: news.block_length,
      });
      reached(answer, news);
    }
  } catch (error) {
    if (signal.aborted) return;
    if (answer !== null) answer.status = error.status === undefined ? "lost" : error.message;
  }
  if (answer !== null) ended(answer);
  else setTimeout(() => { if (!signal.aborted) awaiting = false; }, 1000);
}

function reached(answer, { committed, position, provisional, steps }) {
  if (answer.states.length < MAX_STATES) {
    answer.states.push({ committed, position, provisional, steps });
  } else answer.states[MAX_STATES - 1] = { committed, position, provisional, steps };
}

function ended(answer) {
  answer.endedAt = performance.now();
}

// Show one state more, not faster than can be seen.
function playAnswer() {
  const time = performance.now();
  if ($("follow").checked && connected && held === null && !awaiting &&
      (chosen === null || (chosen.told && time - chosen.endedAt > STAY_MS))) watch(null);
  if (chosen === null || chosen.pinned || time - shownAt < SHOW_MS) return;
  const last = chosen.states.length - 1;
  if (chosen.shown < last) {
    chosen.shown = last - chosen.shown > 60 ? last - 60 : chosen.shown + 1;
    shownAt = time;
    drawAnswer();
  } else if (chosen.endedAt !== null && !chosen.told) {
    chosen.told = true;
    chosen.endedAt = time;
    drawAnswer();
    if (chosen.mine && chosen.status !== "no answer") {
      say(`Your answer is whole: ${chosen.status.replaceAll("_", " ")}.`);
    }
  }
}

function drawAnswer() {
  const answer = chosen;
  const last = answer.states.length - 1;
  const state = answer.states[answer.shown] ??
    { committed: "", position: 0, provisional: [], steps: 0 };
  const slider = $("step");
  slider.max = Math.max(last, 0);
  slider.value = Math.max(answer.shown, 0);
  const of = answer.shown < 0 ? "–" : `${answer.shown + 1} of ${last + 1}`;
  setText($("step-of"), of);
  slider.setAttribute("aria-valuetext", `state ${of}`);
  const behind = answer.shown < last && !answer.pinned;
  const status = answer.told || (!behind && answer.endedAt !== null)
    ? answer.status.replaceAll("_", " ") : answer.endedAt === null ? answer.status : "playing";
  setText($("answer-facts"), [
    answer.mine ? "yours" : shortId(answer.id), status, `${counted(state.position, "token")} committed`,
    ...(state.steps ? [counted(state.steps, "step")] : []),
    ...(answer.latency !== null ? [seconds(answer.latency)] : []),
    ...(behind ? ["slowed down to be seen"] : []),
  ].join(" · "));
  setText($("answer-prompt"), answer.prompt);
  drawText(state);
  drawBlocks(answer, state);
}

function drawText({ committed, provisional }) {
  const parts = [];
  if (committed) parts.push(make("span", { className: "committed", textContent: committed }), " ");
  for (const token of provisional) {
    if (token === null) {
      parts.push(make("span", { className: "mask" }));
      continue;
    }
    const special = /^<\|.*\|>$/.test(token);
    parts.push(make("span", {
      className: "provisional", textContent: special ? "∎" : token, title: special ? token : "" }));
  }
  $("text").replaceChildren(...parts);
}

function drawBlocks({ maxTokens, blockLength }, { position, provisional }) {
  const box = $("blocks");
  const length = blockLength || 8;
  const count = Math.ceil(Math.min(Math.max(maxTokens, position + provisional.length), 2048) /
    length);
  if (box.childElementCount !== count || box.firstChild?.childElementCount !== length) {
    box.replaceChildren(...Array.from({ length: count }, () =>
      make("span", {}, ...Array.from({ length }, () => make("i")))));
  }
  let full = 0;
  for (const [b, block] of [...box.children].entries()) {
    for (const [i, cell] of [...block.children].entries()) {
      const at = b * length + i;
      const guess = provisional[at - position];
      const kind = at < position ? "c" : guess === undefined ? "" : guess === null ? "m" : "p";
      if (cell.className !== kind) cell.className = kind;
    }
    if ((b + 1) * length <= position) full += 1;
  }
  box.setAttribute("aria-label",
    `${counted(position, "token")} committed, ${full} of ${count} blocks whole`);
}

$("step").addEventListener("input", () => {
  if (chosen === null) return;
  chosen.shown = Number($("step").value);
  chosen.pinned = chosen.shown < chosen.states.length - 1;
  $("follow").checked = false;
  drawAnswer();
});
$("again").addEventListener("click", () => {
  if (chosen === null || !chosen.states.length) return;
  $("follow").checked = false;
  chosen.shown = -1;
  chosen.pinned = false;
  chosen.told = false;
});

// --- asking ------------------------------------------------------------------------------------

const IN_BOX = "llada-box";
const EXAMPLES = {
  [IN_BOX]: [
    ["spell", "spell a 405 b 12 c 318 d 77 e 960 f 251 g 84 h 733"],
    ["digits", "digits a four hundred five b twelve c nine hundred sixty"],
    ["reverse", "reverse a 405 b 12 c 7 d 318 e 96"],
    ["sort", "sort h 7 c 405 a 12 f 318 b 96 e 551 d 2 g 840"],
  ],
  other: [
    ["a haiku", "Write a haiku about the sea."],
    ["a sum", "A train leaves at 9:40 and arrives at 11:05. How long does it take?"],
    ["code", "Write a Python function that reverses a linked list."],
  ],
};
let model = null;

// What a server is asked once one is connected to it.
async function welcome() {
  try {
    const now = await (await talk("policy")).json();
    const select = $("policy");
    if (select.childElementCount !== now.policies.length) {
      select.replaceChildren(...now.policies.map((name) => make("option", { textContent: name })));
    }
    select.value = now.policy;
    suggest();
    const [served] = (await (await talk("v1/models")).json()).data;
    if (served.id === model) return;
    model = served.id;
    setText($("model"), model);
    $("example").replaceChildren(...(EXAMPLES[model] ?? EXAMPLES.other).map(
      ([name, text]) => make("option", { textContent: name, value: text })));
    if (!$("prompt").value) $("prompt").value = $("example").value;
  } catch (error) {
    say(error.message, true);
  }
}

$("example").addEventListener("change", () => { $("prompt").value = $("example").value; });

$("ask-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const prompt = $("prompt").value.trim();
  if (!prompt) return;
  $("follow").checked = false;
  watching.abort();
  const answer = begin("", true); // goes on if another one is chosen: hanging up would cancel it
  answer.prompt = prompt;
  drawAnswer();
  say("Asked.");
  let state = { committed: "", position: 0, provisional: [], steps: 0 };
  try {
    const asked = model === IN_BOX || !model
      ? ["v1/completions", { prompt }]
      : ["v1/chat/completions", { messages: [{ role: "user", content: prompt }] }];
    const body = { ...asked[1], stream: true, provisional: true };
    const response = await talk(asked[0], { body });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const news = JSON.parse(data);
      if (news.error) throw new Error(news.error.message);
      const [choice] = news.choices;
      answer.id = `${news.id}.0`;
      const row = frame?.slots.find((one) => one?.id === answer.id);
      if (row) {
        answer.status = "running";
        answer.blockLength = row.block_length;
        answer.maxTokens = row.max_blocks * row.block_length;
      }
      const text = choice.text ?? choice.delta?.content ?? "";
      state = { ...state, committed: state.committed + text };
      // After committed text comes what is left of the guess; until then they do not fit.
      if (choice.finish_reason) {
        answer.status = news.dllm.reason;
        answer.latency = news.dllm.latency_s ?? null;
        state = { ...state, provisional: [], steps: news.dllm.num_steps ?? 0 };
      } else if (news.dllm) Object.assign(state, news.dllm);
      else continue;
      reached(answer, state);
    }
    ended(answer);
  } catch (error) {
    answer.status = "no answer";
    ended(answer);
    say(error.message, true);
  }
});

// --- load --------------------------------------------------------------------------------------

const SMALL = ("zero one two three four five six seven eight nine ten eleven twelve thirteen " +
  "fourteen fifteen sixteen seventeen eighteen nineteen").split(" ");
const TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split(" ");
const below = (n) => Math.floor(Math.random() * n);

function spelled(number) {
  const words = number >= 100 ? [SMALL[Math.floor(number / 100)], "hundred"] : [];
  const rest = number % 100;
  if (rest >= 20) words.push(TENS[Math.floor(rest / 10) - 2]);
  const units = rest >= 20 ? rest % 10 : rest;
  if (units > 0 || number === 0) words.push(SMALL[units]);
  return words.join(" ");
}

// A prompt of the box's task: a verb, and lettered numbers.
function boxPrompt() {
  const verb = ["spell", "digits", "reverse", "sort"][below(4)];
  const letters = [..."abcdefgh"].slice(0, 1 + below(8));
  if (verb === "sort") letters.sort(() => Math.random() - 0.5);
  const items = letters.map((letter) => {
    const number = below([10, 100, 1000][below(3)]);
    return `${letter} ${verb === "digits" ? spelled(number) : number}`;
  });
  return [verb, ...items].join(" ");
}

let loading = null;

$("load-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (loading !== null) {
    loading.abort();
    return;
  }
  loading = new AbortController();
  const { signal } = loading;
  const count = Number($("count").value);
  const own = $("prompt").value.trim();
  const done = { answered: 0, refused: 0, failed: 0 };
  let left = count;
  const tell = () => {
    $("load-bar").value = (done.answered + done.refused + done.failed) / count;
    setText($("load-said"), `${whole.format(done.answered)} of ${whole.format(count)} answered` +
      (done.refused ? `, ${whole.format(done.refused)} refused` : "") +
      (done.failed ? `, ${whole.format(done.failed)} failed` : ""));
  };
  setText($("load"), "Stop");
  $("load-bar").hidden = false;
  tell();

  async function work() {
    while (left > 0 && !signal.aborted) {
      const size = Math.min(LOAD.each, left);
      left -= size;
      const prompts = Array.from({ length: size }, () => model === IN_BOX ? boxPrompt() : own);
      try {
        await (await talk("v1/completions", { body: { prompt: prompts }, signal })).json();
        done.answered += size;
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 429) {
          done.refused += size;
          await new Promise((then) => setTimeout(then, 1000));
        } else {
          done.failed += size;
          say(error.message, true);
          if (error.status === undefined) return;
        }
      }
      tell();
    }
  }

  await Promise.all(Array.from({ length: LOAD.workers }, work));
  if (signal.aborted) say("Stopped: what was open is cancelled.");
  loading = null;
  setText($("load"), "Start");
  $("load-bar").hidden = true;
});

// --- the policy --------------------------------------------------------------------------------

const USUAL = { fixed_fill: "timeout_s=0.1" };
let suggested = "";

// What most would set, unless something else stands there.
function suggest() {
  const field = $("settings");
  if (field.value !== suggested) return;
  field.value = suggested = USUAL[$("policy").value] ?? "";
}

function readSettings(text) {
  const settings = {};
  for (const part of text.split(/[\s,]+/).filter(Boolean)) {
    const [name, value, more] = part.split("=");
    if (!name || !value || more !== undefined) {
      throw new Error(`the setting ${part} is not of the form name=value`);
    }
    settings[name] = Number.isNaN(Number(value)) ? value : Number(value);
  }
  return settings;
}

$("policy").addEventListener("change", suggest);
$("policy-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const body = { name: $("policy").value, ...readSettings($("settings").value) };
    const answer = await (await talk("policy", { body })).json();
    say(`The policy is ${answer.policy} now.`);
  } catch (error) {
    say(`Not switched: ${error.message}`, true);
  }
});

// --- the loop ----------------------------------------------------------------------------------

function drawLink() {
  const silent = clock() - arrivedAt;
  const state = frame === null ? "connecting"
    : !connected ? "lost" : silent > SILENT_S ? "slow" : "live";
  const text = {
    connecting: "Connecting…",
    lost: "Not connected",
    slow: `No news for ${Math.floor(silent)} s`,
    live: frame?.policy ? `Live · ${frame.policy}` : "Live",
  }[state];
  $("link").dataset.state = state;
  setText($("link"), text);
  document.querySelector("main").classList.toggle("stale", frame !== null && !connected);
  if (connected && silent > DEAD_S) giveUp.abort();
}

let slowDrawnAt = 0;
let ganttDrawnAt = 0;

function loop(time) {
  requestAnimationFrame(loop);
  playAnswer();
  // No oftener than what is drawn moves by a pixel.
  const pixelMs = (1000 * Number($("span").value)) / (gantt.clientWidth || 1);
  if (time - ganttDrawnAt >= (calm.matches ? 1000 : Math.max(30, pixelMs))) {
    ganttDrawnAt = time;
    drawGantt();
  }
  if (time - slowDrawnAt >= 250) {
    slowDrawnAt = time;
    drawLink();
    drawTiles();
    drawTable();
    CHARTS.forEach(drawChart);
  }
}

dark.addEventListener("change", readColours);
if (innerWidth < 600) $("span").value = "2";
readColours();
drawLegend();
follow();
requestAnimationFrame(loop);
