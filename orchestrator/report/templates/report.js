"use strict";

const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const PALETTE = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const IDLE = {
  "idle: training": "--i-train", "idle: publishing": "--i-publish", "idle: rollouts": "--i-rollout", "idle: prompts": "--i-prompt",
  "idle: run-ahead limit": "--i-limit", "idle: dispatch": "--i-dispatch", "idle: start-up": "--i-none", "idle: end of run": "--i-none",
};
const WORK = { rollout: "--c0", score: "--c2", source: "--c6", function: "--c7", evaluate: "--c4", train: "--c3", publish: "--c1", fault: "--bad" };
const DASHES = ["solid", "dash", "dot"];

async function unpack(id) {
  const text = byId(id).textContent;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const shown = (value, digits = 4) => {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
};

/* Charts: each is a function that gives traces and layout, called again when colours change. */

const charts = new Map();
let axis = "v";

function baseLayout({ unit = "", log = false, zero = false, height = 240 } = {}) {
  const line = { gridcolor: colour("--grid"), zerolinecolor: colour("--line"), linecolor: colour("--line"), tickcolor: colour("--line"), automargin: true };
  return {
    height, margin: { l: 46, r: 8, t: 6, b: 34 }, showlegend: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--dim"), family: "system-ui, Liberation Sans, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--text") } },
    hovermode: "x unified",
    xaxis: { ...line, title: { text: axis === "v" ? "version" : "seconds", font: { size: 12 }, standoff: 4 }, nticks: 8 },
    yaxis: { ...line, title: { text: unit, font: { size: 12 }, standoff: 6 }, nticks: 6, type: log ? "log" : "linear", exponentformat: "power", rangemode: zero ? "tozero" : "normal" },
  };
}

const CONFIG = { responsive: true, displayModeBar: false };

function draw(place) {
  const { traces, layout } = charts.get(place)();
  if (layout.xaxis.title.text === "version") Object.assign(layout.xaxis, wholeTicks(traces));
  showKeys(place.previousElementSibling, traces);
  window.Plotly.react(place, traces, layout, CONFIG);
  place.dataset.drawn = "yes";
}

function showKeys(line, traces) {
  const named = traces.length > 1 ? traces.filter((trace) => trace.name) : [];
  line.replaceChildren(...named.map((trace) => {
    const tone = trace.fillcolor || (trace.line && trace.line.color) || trace.marker.color;
    const mark = element("span", { class: trace.line && !trace.fillcolor ? `stroke ${trace.line.dash}` : "key", style: `--tone:${tone}` });
    return element("span", {}, mark, trace.name);
  }));
}

function wholeTicks(traces) {
  const versions = traces.flatMap((trace) => trace.x);
  return Math.max(...versions) - Math.min(...versions) < 8 ? { dtick: 1 } : {};
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    seen.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "300px" });

function addChart(place, make) {
  charts.set(place, make);
  place.before(element("div", { class: "chartkeys" }));
  place.dataset.drawn = "no";
}

function redraw() {
  for (const place of charts.keys()) if (place.dataset.drawn === "yes") draw(place);
}

function figure(parent, title, note) {
  const place = element("div", { class: "plot" });
  const parts = [element("figcaption", { text: title }), place];
  if (note) parts.splice(1, 0, element("p", { text: note }));
  parent.append(element("figure", { class: "chart" }, ...parts));
  return place;
}

function lineTraces(runs, linesOf) {
  const traces = [];
  runs.forEach((run, number) => {
    linesOf(run).forEach((line, place) => {
      const tone = runs.length > 1 ? PALETTE[number] : PALETTE[place];
      traces.push({
        x: line[axis], y: line.y, mode: line.y.length > 1 ? "lines" : "markers",
        name: runs.length > 1 ? `${run.name}: ${line.name}` : line.name,
        line: { color: colour(tone), width: 1.8, dash: DASHES[(runs.length > 1 ? place : 0) % DASHES.length] },
        marker: { color: colour(tone), size: 7 }, hovertemplate: "%{y:.4g}<extra>%{fullData.name}</extra>",
      });
    });
  });
  return traces;
}

function addCurves(page) {
  page.charts.forEach((chart, number) => {
    if (!page.runs.some((run) => run.lines[number].length)) return;
    const place = figure(byId("charts"), chart.title, chart.note);
    addChart(place, () => ({ traces: lineTraces(page.runs, (run) => run.lines[number]), layout: baseLayout(chart) }));
  });
}

function addWeights(page) {
  const bytes = figure(byId("weight-charts"), "Bytes a version", "Published against whole weights.");
  addChart(bytes, () => {
    const traces = lineTraces(page.runs, (run) => run.bytes);
    const layout = baseLayout({ unit: "bytes", log: true });
    Object.assign(layout.yaxis, decadeTicks(traces.flatMap((trace) => trace.y)));
    return { traces, layout };
  });
  for (const run of page.runs) {
    if (!run.density.v.length) continue;
    const title = page.runs.length > 1 ? `Density, ${run.name}` : "Density by kind of tensor";
    const place = figure(byId("weight-charts"), title, "Share of elements that a version changed.");
    addChart(place, () => densityHeat(run.density));
  }
}

function decadeTicks(values) {
  const low = Math.floor(Math.log10(Math.min(...values.filter((value) => value > 0))));
  const high = Math.ceil(Math.log10(Math.max(...values)));
  if (!Number.isFinite(low + high)) return {};
  const digits = high - low > 2 ? [1] : [1, 2, 5];
  const tickvals = [];
  for (let power = low; power <= high; power += 1) tickvals.push(...digits.map((digit) => digit * 10 ** power));
  const units = [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const name = (value) => { const [size, unit] = units.find(([least]) => value >= least) || [1, ""]; return `${value / size}${unit}`; };
  return { tickmode: "array", tickvals, ticktext: tickvals.map(name) };
}

function densityHeat(density) {
  const layout = baseLayout({ height: Math.max(240, 60 + 19 * density.kinds.length) });
  layout.hovermode = "closest";
  layout.yaxis = { ...layout.yaxis, type: "category", title: { text: "" }, autorange: "reversed", nticks: density.kinds.length, tickfont: { size: 11 } };
  const trace = {
    type: "heatmap", x: density[axis], y: density.kinds, z: density.z, zmin: 0,
    colorscale: [[0, colour("--heat0")], [1, colour("--heat1")]],
    colorbar: { thickness: 10, len: 0.9, tickformat: ".1~%", outlinewidth: 0, tickfont: { size: 11 } },
    hovertemplate: "%{y}<br>" + (axis === "v" ? "version %{x}" : "%{x:.1f} s") + "<br>%{z:.2%} changed<extra></extra>",
  };
  return { traces: [trace], layout };
}

/* Timeline */

function toneOf(kind) {
  return WORK[kind] || IDLE[kind] || "--c5";
}

function addTimeline(run, number) {
  const line = run.timeline;
  if (!line) return;
  const kinds = [...new Set([...Object.keys(line.shares.states), ...line.windows.flatMap((w) => w.spans.map((s) => s[3]))])].sort();
  addChart(byId(`shares-${number}`), () => sharesChart(line, kinds));
  const picker = byId(`window-${number}`);
  const gantt = byId(`gantt-${number}`);
  addChart(gantt, () => ganttChart(line, line.windows[Number(picker.value)], kinds));
  picker.addEventListener("change", () => draw(gantt));
}

function sharesChart(line, kinds) {
  const traces = kinds.filter((kind) => line.shares.states[kind]).map((kind) => ({
    x: line.shares.s, y: line.shares.states[kind], name: kind, stackgroup: "all", mode: "lines",
    line: { width: 0.5, color: colour(toneOf(kind)) }, fillcolor: colour(toneOf(kind)),
    hovertemplate: "%{y:.0%}<extra>%{fullData.name}</extra>",
  }));
  const layout = baseLayout({ height: 250 });
  layout.xaxis.title.text = "seconds";
  layout.yaxis = { ...layout.yaxis, range: [0, 1], tickformat: ".0%" };
  return { traces, layout };
}

function ganttChart(line, part, kinds) {
  const traces = kinds.filter((kind) => part.spans.some((span) => span[3] === kind)).map((kind) => {
    const own = part.spans.filter((span) => span[3] === kind);
    return {
      type: "bar", orientation: "h", name: kind, base: own.map((span) => span[1]), x: own.map((span) => span[2]),
      y: own.map((span) => line.lanes[span[0]]), customdata: own.map((span) => [span[4], span[2]]),
      width: kind.startsWith("idle: ") ? 0.34 : 0.7,
      marker: { color: colour(toneOf(kind)), line: { width: 0.5, color: colour("--page") } },
      hovertemplate: "%{customdata[0]}<br>%{customdata[1]:.3f} s<extra>" + kind + "</extra>",
    };
  });
  const layout = baseLayout({ height: 56 + 42 * line.lanes.length });
  Object.assign(layout, { barmode: "overlay", hovermode: "closest" });
  layout.xaxis = { ...layout.xaxis, title: { text: "" }, range: [part.from, part.to] };
  layout.yaxis = { ...layout.yaxis, type: "category", categoryorder: "array", categoryarray: line.lanes, autorange: "reversed", nticks: line.lanes.length };
  return { traces, layout };
}

/* Rollouts */

class RolloutViewer {
  constructor(runs) {
    this.runs = runs;
    this.at = { rollout: 0, token: -1 };
    this.list = byId("list");
    this.pickers = { run: byId("pick-run"), version: byId("pick-version"), group: byId("pick-group"), filter: byId("pick-filter") };
    if (this.pickers.run) this.pickers.run.addEventListener("change", () => this.fillVersions());
    this.pickers.version.addEventListener("change", () => this.fillGroups());
    this.pickers.group.addEventListener("change", () => this.show());
    this.pickers.filter.addEventListener("change", () => this.show());
    for (const radio of document.querySelectorAll("input[name=colour]")) radio.addEventListener("change", () => this.paint());
    this.list.addEventListener("keydown", (event) => this.onListKey(event));
    this.list.addEventListener("click", (event) => this.onClick(event));
    byId("rollouts").addEventListener("keydown", (event) => this.onKey(event));
    this.fillVersions(true);
  }

  get run() { return this.runs[this.pickers.run ? Number(this.pickers.run.value) : 0]; }
  get version() { return this.run.rollouts[Number(this.pickers.version.value)]; }
  get group() { return this.version && this.version.groups[Number(this.pickers.group.value)]; }
  get mode() { return document.querySelector("input[name=colour]:checked").value; }
  get rollouts() {
    const wanted = this.pickers.filter.value;
    return this.group.rollouts.filter((r) => !wanted || (r.outcome || "trained").startsWith(wanted));
  }

  fillVersions(newest = false) {
    const entries = this.run.rollouts.map((v) => `${v.version}` + (v.reward === null || v.reward === undefined ? "" : ` (reward ${shown(v.reward, 3)})`));
    this.fill(this.pickers.version, entries);
    if (newest && entries.length) this.pickers.version.value = String(entries.length - 1);
    this.fillGroups();
  }

  fillGroups() {
    const groups = this.version ? this.version.groups : [];
    this.fill(this.pickers.group, groups.map((group) => `${group.id}  ${this.promptText(group).replace(/\s+/g, " ").slice(0, 60)}  ${group.outcome}${group.reward === null ? "" : ` ${shown(group.reward, 3)}`}`));
    this.show();
  }

  fill(picker, entries) {
    picker.replaceChildren(...entries.map((text, number) => element("option", { value: number, text })));
  }

  promptText(group) { return group.prompt.map((token) => this.run.pieces[token] || `[${token}]`).join(""); }

  show() {
    this.at = { rollout: 0, token: -1 };
    byId("group").replaceChildren(...this.groupFacts());
    const rows = this.group ? this.rollouts.map((rollout, number) => this.row(rollout, number)) : [];
    if (!rows.length) rows.push(element("p", { class: "note", style: "padding:8px 12px", text: this.group ? this.nothing() : "No rollouts are stored for these versions." }));
    this.list.replaceChildren(...rows);
    this.paint();
    this.select(0, -1, false);
  }

  nothing() {
    if (this.group.rollouts.length) return "No rollout of this group is of that kind.";
    return "Its rollouts never came back: " + Object.keys(this.group.reasons).join("; ");
  }

  groupFacts() {
    const group = this.group;
    if (!group) return [];
    const facts = element("div", { class: "facts" });
    const fact = (name, value) => facts.append(element("span", {}, `${name} `, element("b", { text: value })));
    fact("group", group.id);
    if (group.answer !== null && group.answer !== undefined) fact("answer", typeof group.answer === "string" ? group.answer : JSON.stringify(group.answer));
    fact("mean reward", shown(group.reward));
    fact("outcome", group.outcome);
    for (const [reason, count] of Object.entries(group.reasons)) fact(reason, `x ${count}`);
    return [element("div", { class: "prompt", text: this.promptText(group) }), facts];
  }

  row(rollout, number) {
    const side = element("div", { class: "side" });
    side.append(element("div", {}, element("b", { text: `#${rollout.at}` }), ` reward `, element("b", { text: shown(rollout.reward) })));
    const advantage = rollout.advantage === null ? "" : `advantage ${shown(rollout.advantage, 3)}, `;
    side.append(element("div", { text: `${advantage}${rollout.tokens.length + rollout.more} tokens` }));
    const parts = this.group.parts[rollout.at];
    if (parts && Object.keys(parts).length) side.append(element("div", { text: Object.entries(parts).map(([k, v]) => `${k} ${shown(v)}`).join(", ") }));
    if (rollout.outcome) side.append(element("div", { class: rollout.outcome.startsWith("invalid") ? "bad" : "warn", text: rollout.outcome }));
    for (const words of rollout.reviews || []) side.append(element("div", { class: "review", text: words }));
    const tokens = element("div", { class: "tokens" });
    rollout.tokens.forEach((token, place) => {
      const piece = this.run.pieces[token];
      tokens.append(element("span", { "data-token": place, class: piece ? null : "special", text: piece || `[${token}]` }));
    });
    if (rollout.more) tokens.append(element("span", { class: "special", text: `and ${rollout.more} more` }));
    return element("div", { class: "rollout", role: "option", id: `rollout-${number}`, "data-rollout": number }, side, tokens);
  }

  paint() {
    if (!this.group) return;
    const versions = [...new Set(this.version.groups.flatMap((g) => g.rollouts.flatMap((r) => r.versions)))].sort((a, b) => a - b);
    this.rollouts.forEach((rollout, number) => {
      this.list.children[number].querySelectorAll("[data-token]").forEach((span, place) => {
        span.style.background = this.tone(rollout, place, versions);
      });
    });
    byId("legend").replaceChildren(...this.legend(versions));
  }

  tone(rollout, place, versions) {
    const at = (column) => (column ? column[place] : null);
    if (this.mode === "version") return this.versionTone(this.versionOf(rollout, place), versions);
    if (this.mode === "logprob") {
      const value = at(rollout.logprobs);
      return value === null ? "" : `rgba(${colour("--surprise")}, ${Math.min(0.75, -value / 5)})`;
    }
    const value = at(rollout.differences);
    if (value === null || value === 0) return "";
    return `rgba(${colour(value > 0 ? "--plus" : "--minus")}, ${Math.min(0.75, 0.12 + Math.abs(value) * 1.6)})`;
  }

  versionOf(rollout, place) { return Array.isArray(rollout.versions) ? rollout.versions[place] : rollout.versions; }

  versionTone(version, versions) {
    const number = versions.indexOf(version);
    return `color-mix(in srgb, ${colour(PALETTE[number % PALETTE.length])} 26%, transparent)`;
  }

  legend(versions) {
    const swatch = (background, text) => element("span", { class: "swatch", style: `background:${background}`, text });
    if (this.mode === "version") return ["policy version that drew the token:", ...versions.map((v) => swatch(this.versionTone(v, versions), v))];
    if (this.mode === "logprob") return ["how unlikely the token was:", swatch(`rgba(${colour("--surprise")}, 0.2)`, "-1"), swatch(`rgba(${colour("--surprise")}, 0.7)`, "-4 or less")];
    const known = this.rollouts.some((rollout) => rollout.differences);
    if (!known) return ["the trainer's logprobs are not on record for these rollouts"];
    return ["trainer's logprob minus the engine's:", swatch(`rgba(${colour("--minus")}, 0.5)`, "lower"), swatch("transparent", "equal"), swatch(`rgba(${colour("--plus")}, 0.5)`, "higher")];
  }

  select(rollout, token, focus = true) {
    const rows = [...this.list.querySelectorAll(".rollout")];
    if (!rows.length) { byId("token").textContent = ""; return; }
    this.at = { rollout: Math.max(0, Math.min(rows.length - 1, rollout)), token };
    rows.forEach((row, number) => row.setAttribute("aria-selected", String(number === this.at.rollout)));
    for (const old of this.list.querySelectorAll(".at")) old.classList.remove("at");
    const row = rows[this.at.rollout];
    this.list.setAttribute("aria-activedescendant", row.id);
    const spans = row.querySelectorAll("[data-token]");
    this.at.token = Math.max(-1, Math.min(spans.length - 1, token));
    if (this.at.token >= 0) spans[this.at.token].classList.add("at");
    if (focus) row.scrollIntoView({ block: "nearest" });
    byId("token").textContent = this.words();
  }

  words() {
    const rollout = this.rollouts[this.at.rollout];
    const place = this.at.token;
    if (place < 0) return `Rollout #${rollout.at}: reward ${shown(rollout.reward)}, ${rollout.outcome || "trained"}. Arrow keys move through its tokens.`;
    const token = rollout.tokens[place];
    const parts = [`token ${place + 1} of ${rollout.tokens.length}: ${JSON.stringify(this.run.pieces[token] || "")} (id ${token})`, `version ${this.versionOf(rollout, place)}`];
    if (rollout.logprobs) parts.push(`engine's logprob ${shown(rollout.logprobs[place])}`);
    if (rollout.differences) parts.push(`trainer's minus engine's ${shown(rollout.differences[place])}`);
    return parts.join(", ");
  }

  onListKey(event) {
    const { rollout, token } = this.at;
    const moves = { ArrowDown: [rollout + 1, -1], ArrowUp: [rollout - 1, -1], ArrowRight: [rollout, token + 1], ArrowLeft: [rollout, token - 1], Home: [0, -1], End: [1e9, -1] };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.select(...moves[event.key]);
  }

  onKey(event) {
    if (event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = { n: ["group", 1], p: ["group", -1], "]": ["version", 1], "[": ["version", -1] };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const [name, step] = steps[event.key];
    const picker = this.pickers[name];
    const next = Number(picker.value) + step;
    if (next < 0 || next >= picker.options.length) return;
    picker.value = String(next);
    picker.dispatchEvent(new Event("change"));
    this.list.focus();
  }

  onClick(event) {
    const row = event.target.closest(".rollout");
    if (!row) return;
    const span = event.target.closest("[data-token]");
    this.select(Number(row.dataset.rollout), span ? Number(span.dataset.token) : -1);
    this.list.focus();
  }
}

async function main() {
  const page = JSON.parse(await unpack("data"));
  const viewer = new RolloutViewer(page.runs);
  addCurves(page);
  addWeights(page);
  page.runs.forEach(addTimeline);
  for (const radio of document.querySelectorAll("input[name=axis]")) {
    radio.addEventListener("change", () => { axis = radio.value; redraw(); });
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { redraw(); viewer.paint(); });
  document.head.append(element("script", { text: await unpack("library") }));
  for (const place of charts.keys()) seen.observe(place);
  Object.assign(document.documentElement.dataset, { ready: "yes", ms: Math.round(performance.now()) });
}

main().catch((error) => {
  const words = `The page's data could not be opened: ${error}`;
  document.querySelector("main").prepend(element("p", { class: "warning", text: words }));
  console.error(error);
});
