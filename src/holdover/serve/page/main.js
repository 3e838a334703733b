// The page: one prompt, generated without and with a cache.

import { ApiError, compare, generate, get, key } from "./api.js";
import { count, plot, strip } from "./charts.js";
import { element, methodButtons, settingInputs, settingValues } from "./controls.js";

const $ = (id) => document.getElementById(id);
const SUBJECTS = ["red apple", "cat with sunglasses", "rocket", "cactus", "ghost", "pizza", "happy frog", "birthday cake"];
const state = { model: null, methods: [], cache: null, given: {}, running: null, plain: new Map(), points: [], frontier: [] };

async function start() {
  try {
    const [models, cache] = await Promise.all([get("/v1/models"), get("/v1/cache")]);
    showModel(models.data[0], cache);
  } catch (error) {
    if (error.status === 401) return askForKey();
    if (error.status === 503) {
      showStatus("The model is loading…");
      return setTimeout(start, 700);
    }
    showStatus(error.message, true);
  }
}

function showModel(model, cache) {
  Object.assign(state, { model, methods: cache.methods.filter((m) => m.method !== "none"), cache });
  state.frontier = cache.frontier;
  $("key-label").hidden = true;
  $("model").textContent = model.id;
  $("model").hidden = false;
  $("steps").max = model.limits.max_steps;
  $("steps").value = Math.min(model.steps, model.limits.max_steps);
  $("prompt").maxLength = model.limits.max_prompt;
  $("style").replaceChildren(element("option", { value: "" }, "none"), ...Object.values(model.styles).map((style) => element("option", { value: style }, style.replace(/ style$/, ""))));
  $("style-label").hidden = Object.keys(model.styles).length === 0;
  $("style").value = model.styles.fluent3d ?? "";
  const linked = readLink();
  const preferred = state.methods.some((m) => m.method === cache.method) ? cache.method : "mag_cache";
  const known = state.methods.find((m) => m.method === linked) ?? state.methods.find((m) => m.method === preferred) ?? state.methods[0];
  if (known.method === cache.method) state.given = { ...cache.settings, ...state.given };
  const buttons = methodButtons(state.methods, known.method, () => (showSettings({}), updateLink()));
  $("methods").replaceChildren($("methods").querySelector("legend"), element("div", { className: "segments" }, ...buttons));
  showSettings(state.given);
  showStatus("");
  updatePlot();
  if (state.frontier.length) $("plot-note").textContent = "The line is the frontier in the model's profile; each point is a setting you tried.";
  if (linked) run();
}

const method = () => state.methods.find((m) => m.method === document.querySelector("[name=method]:checked")?.value);

function showSettings(values) {
  $("method-doc").textContent = method().doc;
  $("settings").replaceChildren(...settingInputs(method(), values, state.cache.targets, updateLink));
}

// Links: the address contains the settings.

const FIELDS = ["prompt", "style", "steps", "guidance", "seed"];

function link() {
  const query = new URLSearchParams(FIELDS.map((name) => [name, $(name).value]));
  query.set("method", method().method);
  for (const [name, value] of Object.entries(settingValues(method(), $("settings")))) query.set(`cache.${name}`, JSON.stringify(value));
  return `${location.pathname}?${query}`;
}

function readLink() {
  const query = new URLSearchParams(location.search);
  for (const name of FIELDS) if (query.has(name)) $(name).value = query.get(name);
  if ($("style").selectedIndex < 0) $("style").value = "";
  for (const [name, text] of query) {
    if (!name.startsWith("cache.")) continue;
    try {
      state.given[name.slice(6)] = JSON.parse(text);
    } catch {
      showStatus(`${name} in the link is not a valid value.`, true);
    }
  }
  return query.get("method");
}

const updateLink = () => history.replaceState(null, "", link());

// Generating.

const requestBody = (cache, steps) => ({
  prompt: $("style").value ? `${$("prompt").value.trim()}, ${$("style").value}` : $("prompt").value.trim(),
  seed: Number($("seed").value),
  guidance: Number($("guidance").value),
  steps,
  partial_images: state.model.partial_images ? Math.min(steps - 1, 15) : 0,
  cache,
});

async function run() {
  if (!$("form").reportValidity() || !state.model) return;
  state.running?.abort();
  const control = (state.running = new AbortController());
  updateLink();
  setBusy(true);
  clearResults();
  try {
    const steps = Number($("steps").value);
    const cache = { method: method().method, ...settingValues(method(), $("settings")) };
    const plain = await generatePlain(requestBody({ method: "none" }, steps), control.signal);
    showStatus("Generating with the cache…");
    const cached = await generateInto("cached", requestBody(cache, steps), control.signal);
    await showResult(plain, cached, cache);
    showStatus("");
  } catch (error) {
    if (control === state.running) showFailure(error);
  } finally {
    if (control === state.running) setBusy(false);
  }
}

/** The image without a cache does not depend on the cache's settings: it is generated once and kept. */
async function generatePlain(request, signal) {
  const name = JSON.stringify(request);
  if (!state.plain.has(name)) {
    showStatus("Generating without a cache…");
    if (state.plain.size > 20) state.plain.clearResults();
    state.plain.set(name, await generateInto("plain", request, signal));
  } else {
    show("plain", state.plain.get(name), request.steps);
    finish("plain", state.plain.get(name));
  }
  return state.plain.get(name);
}

async function generateInto(id, request, signal) {
  $(id).classList.add("active");
  try {
    const done = await generate(request, signal, (event) => show(id, { ...event, trace: event.trace }, request.steps));
    show(id, done, request.steps);
    finish(id, done);
    return done;
  } finally {
    $(id).classList.remove("active");
  }
}

function show(id, event, steps) {
  const image = $(id).querySelector("img");
  image.src = `data:image/png;base64,${event.b64_json}`;
  image.hidden = false;
  image.alt = `${id}: ${$("prompt").value}`;
  const trace = event.trace ?? event.holdover.trace;
  strip($(id).querySelector(".strip"), trace, steps);
  const share = event.step ? event.step / event.steps : 1;
  $(id).querySelector(".bar").style.transform = `scaleX(${share})`;
  $(id).querySelector(".time").textContent = event.step ? `step ${event.step} of ${event.steps}` : "";
}

function finish(id, { holdover }) {
  $(id).classList.add("done");
  $(id).querySelector(".time").textContent = `${holdover.seconds.generation.toFixed(2)} s`;
  const texts = Object.values(holdover.trace);
  const computed = texts.reduce((sum, text) => sum + count(text, "C"), 0);
  const all = texts.reduce((sum, text) => sum + text.length, 0);
  $(id).querySelector(".count").textContent = `${computed} of ${all} forwards computed`;
}

async function showResult(plain, cached, cache) {
  const speed = plain.holdover.seconds.generation / cached.holdover.seconds.generation;
  const { psnr, equal } = await compare(plain.b64_json, cached.b64_json);
  const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
  const [computed, held] = [sum(cached.holdover.computed), sum(cached.holdover.held)];
  $("speed").textContent = `${speed.toFixed(2)}×`;
  $("psnr").textContent = equal ? "identical" : `${psnr.toFixed(1)} dB`;
  $("forwards").textContent = `${computed} of ${computed + held}`;
  $("bytes").textContent = bytes(cached.holdover.held_bytes);
  state.points.push({ method: cache.method, speed: (computed + held) / computed, psnr: equal ? 60 : psnr, label: labelOf(cache) });
  updatePlot();
}

const updatePlot = () => plot($("plot"), state.points.slice(-40), state.frontier);

const labelOf = ({ method: name, ...settings }) => [name, ...Object.values(settings)].join(" ");
const bytes = (n) => (n < 1e3 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toFixed(0)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`);

function clearResults() {
  for (const id of ["plain", "cached"]) {
    $(id).classList.remove("done");
    $(id).querySelector(".bar").style.transform = "scaleX(0)";
    for (const part of [".time", ".count"]) $(id).querySelector(part).textContent = "";
    $(id).querySelector(".strip").replaceChildren();
  }
  for (const id of ["speed", "psnr", "forwards", "bytes"]) $(id).textContent = "–";
}

function setBusy(yes) {
  const [from, to] = yes ? [$("generate"), $("stop")] : [$("stop"), $("generate")];
  const focused = document.activeElement === from;
  from.hidden = true;
  to.hidden = false;
  if (focused) to.focus();
  document.body.classList.toggle("busy", yes);
}

function showFailure(error) {
  if (error.name === "AbortError") return showStatus("Stopped.");
  if (error.status === 401) return askForKey();
  showStatus(error instanceof ApiError ? error.message : `The server cannot be reached: ${error.message}`, true);
}

function showStatus(text, bad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
}

function askForKey() {
  $("key-label").hidden = false;
  $("key").focus();
  showStatus("This server requires a key.", true);
}

$("form").addEventListener("submit", (event) => (event.preventDefault(), run()));
$("form").addEventListener("change", () => state.model && updateLink());
$("stop").addEventListener("click", () => state.running?.abort());
$("dice").addEventListener("click", () => {
  $("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % 100000;
  updateLink();
});
$("key").addEventListener("change", () => (key.set($("key").value), start()));
$("share").addEventListener("click", async () => {
  updateLink();
  await navigator.clipboard?.writeText(location.href).then(() => showStatus("Link copied."), () => showStatus("The link is in the address bar."));
});
window.addEventListener("resize", updatePlot);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.running?.abort();
});
$("prompt").placeholder = SUBJECTS[Math.floor(Math.random() * SUBJECTS.length)];
start();
