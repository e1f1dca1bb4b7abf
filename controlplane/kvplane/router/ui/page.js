"use strict";
// Reads ui/data every two seconds and shows it. Everything is set as text, never as markup.

const EVERY_MS = 2000;
const NOW_MS = 60_000;
const KEPT_MS = 600_000;
const PATHS = ["direct", "pull", "cold"];

const kept = []; // {at, paths} of each answer, the oldest first
let latest = null;
let paused = false;

const byId = (id) => document.getElementById(id);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function cell(row, text, className) {
  row.append(element("td", text, className));
}

function number(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

function percent(part, whole) {
  return whole ? `${(100 * part / whole).toFixed(1)} %` : "–";
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 120 ? `${seconds.toFixed(seconds < 10 ? 1 : 0)} s` : `${Math.round(seconds / 60)} min`;
}

function total(paths, name) {
  return PATHS.reduce((sum, path) => sum + paths[path][name], 0);
}

// Where the counts began anew the router did, and what was before says nothing.
function difference(now, before, name) {
  return Math.max(0, now[name] - before[name]);
}

// The share `wanted` of first tokens came within this many seconds: by the buckets of a histogram, evenly within one.
function quantile(buckets, before, wanted) {
  const bounds = Object.keys(buckets).map((bound) => [bound === "+Inf" ? Infinity : Number(bound), bound]).sort((a, b) => a[0] - b[0]);
  const counts = bounds.map(([value, bound]) => [value, buckets[bound] - (before ? before[bound] || 0 : 0)]);
  if (!counts.length || counts[counts.length - 1][1] <= 0) return null;
  const sought = wanted * counts[counts.length - 1][1];
  let [low, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= sought) {
      return bound === Infinity ? low : low + (bound - low) * (count > below ? (sought - below) / (count - below) : 1);
    }
    [low, below] = [bound, count];
  }
  return low;
}

function showState(data) {
  const state = byId("state");
  const words = data.draining ? ["draining", "warn"] : data.ready ? ["ready", "good"] : ["not ready", "bad"];
  const plane = { up: "control plane up", none: "no control plane", unavailable: "control plane unavailable" }[data.control_plane];
  const text = `${words[0]}, ${plane}`;
  if (state.textContent !== text) { // screen readers speak what changes, and only that
    state.textContent = text;
    state.className = words[1];
  }
  byId("problems").hidden = data.problems.length === 0;
  byId("problem-list").replaceChildren(...data.problems.map((problem) => element("li", problem)));
  const workers = data.workers > 1 ? ` Engines' load and recent decisions are those of one of ${data.workers} processes.` : "";
  byId("about").textContent = `kvplane ${data.version}, process ${data.pid}.${workers}`;
}

function showReuse(data, before) {
  const { paths } = data;
  const seconds = before ? (data.at - before.at) / 1000 : 0;
  const answered = before ? PATHS.reduce((sum, path) => sum + difference(paths[path], before.paths[path], "answered"), 0) : 0;
  const reused = before ? PATHS.reduce((sum, path) => sum + difference(paths[path], before.paths[path], "reused"), 0) : 0;
  byId("hit-now").textContent = percent(reused, answered);
  byId("hit-all").textContent = percent(total(paths, "reused"), total(paths, "answered"));
  byId("rate").textContent = seconds ? (answered / seconds).toFixed(1) : "–";
  byId("tokens").textContent = number(total(paths, "reused_tokens"));
  const rows = PATHS.map((path) => {
    const own = paths[path];
    const earlier = before && before.paths[path].answered <= own.answered ? before.paths[path].ttft.buckets : null;
    const row = element("tr");
    const head = element("th", path);
    head.scope = "row";
    row.append(head);
    cell(row, number(own.answered), "number");
    cell(row, percent(own.answered, total(paths, "answered")), "number");
    cell(row, number(own.failed), own.failed ? "number bad" : "number");
    cell(row, number(own.reused_tokens), "number");
    cell(row, duration(before ? quantile(own.ttft.buckets, earlier, 0.5) : null), "number");
    cell(row, duration(quantile(own.ttft.buckets, null, 0.5)), "number");
    cell(row, duration(quantile(own.ttft.buckets, null, 0.9)), "number");
    cell(row, Object.entries(own.reasons).slice(0, 4).map(([reason, count]) => `${reason} ${number(count)}`).join(", "));
    return row;
  });
  byId("paths").replaceChildren(...rows);
}

function showGraph() {
  const points = [];
  for (let index = 1; index < kept.length; index += 1) {
    const [before, now] = [kept[Math.max(0, index - 5)], kept[index]];
    const answered = PATHS.reduce((sum, path) => sum + difference(now.paths[path], before.paths[path], "answered"), 0);
    const reused = PATHS.reduce((sum, path) => sum + difference(now.paths[path], before.paths[path], "reused"), 0);
    if (answered) points.push([now.at, reused / answered]);
  }
  const graph = byId("hit-graph");
  byId("hit-figure").hidden = points.length < 2;
  if (points.length < 2) return;
  const begin = Math.min(points[0][0], Date.now() - NOW_MS);
  const width = Math.max(1, points[points.length - 1][0] - begin);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.map(([at, share]) => `${(600 * (at - begin) / width).toFixed(1)},${(77 - 74 * share).toFixed(1)}`).join(" "));
  graph.replaceChildren(line);
  const shares = points.map(([, share]) => share);
  graph.setAttribute("aria-label", `hit rate between ${percent(Math.min(...shares), 1)} and ${percent(Math.max(...shares), 1)}, last ${percent(shares[shares.length - 1], 1)}`);
}

function showEngines(data) {
  const rows = data.engines.map((engine) => {
    const row = element("tr");
    const head = element("th", engine.url, "id");
    head.scope = "row";
    row.append(head);
    cell(row, engine.roles.join(", "));
    cell(row, engine.state, { up: "good", down: "bad" }[engine.state] || "warn");
    cell(row, number(engine.outstanding), "number");
    cell(row, number(engine.waiting), "number");
    cell(row, number(engine.retained_conversations), "number");
    const blocks = element("td");
    if (engine.retained_blocks === null) {
      blocks.textContent = "not reported";
    } else {
      const text = engine.total_blocks ? `${number(engine.retained_blocks)} of ${number(engine.total_blocks)}` : number(engine.retained_blocks);
      if (engine.total_blocks) {
        const meter = element("meter");
        meter.max = engine.total_blocks;
        meter.value = engine.retained_blocks;
        meter.setAttribute("aria-label", `blocks retained by ${engine.url}`);
        blocks.append(meter, " ");
      }
      blocks.append(text);
    }
    row.append(blocks);
    cell(row, engine.models.join(", "));
    return row;
  });
  byId("engines").replaceChildren(...rows);
}

function showRecent(data) {
  const wanted = byId("filter").value.trim().toLowerCase();
  const lines = data.recent.filter((line) => !wanted || JSON.stringify(Object.values(line)).toLowerCase().includes(wanted));
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.request : undefined;
  const rows = lines.map((line) => {
    const row = element("tr");
    const head = element("th", null, "id");
    head.scope = "row";
    const link = element("a", line.request_id);
    link.href = `debug/turns/${encodeURIComponent(line.request_id)}`;
    link.dataset.request = line.request_id;
    head.append(link);
    row.append(head);
    cell(row, duration(line.age_s), "short");
    cell(row, line.path || "–");
    cell(row, line.reason || (line.state === "running" ? "running" : "–"));
    cell(row, line.status || "–", line.status >= 400 ? "number bad" : "number");
    cell(row, number(line.turn || null), "number");
    cell(row, number(line.tokens.prompt_estimated), "number");
    cell(row, number(line.tokens.reused), "number");
    cell(row, line.total_ms === null ? "–" : duration(line.total_ms / 1000), "number");
    cell(row, [line.prefill, line.decode].filter(Boolean).join(" → "), "id");
    return row;
  });
  byId("recent").replaceChildren(...rows);
  byId("nothing").hidden = rows.length > 0;
  // The rows are new ones; whoever was on one by keyboard stays there.
  if (focused) rows.map((row) => row.querySelector("a")).find((link) => link.dataset.request === focused)?.focus();
}

function show() {
  const oldest = kept.find((sample) => sample.at >= latest.at - NOW_MS);
  showState(latest);
  showReuse(latest, oldest === latest ? null : oldest);
  showGraph();
  showEngines(latest);
  showRecent(latest);
}

async function look() {
  try {
    const answer = await fetch("ui/data", { cache: "no-store" });
    if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
    latest = await answer.json();
    latest.at = Date.now();
    const last = kept[kept.length - 1];
    if (last && total(latest.paths, "answered") < total(last.paths, "answered")) kept.length = 0; // started anew
    kept.push(latest);
    while (kept.length && kept[0].at < latest.at - KEPT_MS) kept.shift();
    show();
  } catch (error) {
    const state = byId("state");
    state.textContent = `no answer: ${error.message}; what is shown is from before`;
    state.className = "bad";
  }
}

byId("pause").addEventListener("click", (event) => {
  paused = !paused;
  event.target.setAttribute("aria-pressed", String(paused));
  event.target.textContent = paused ? "Resume" : "Pause";
});
byId("filter").addEventListener("input", () => latest && showRecent(latest));
setInterval(() => { if (!paused && !document.hidden) look(); }, EVERY_MS);
look();
