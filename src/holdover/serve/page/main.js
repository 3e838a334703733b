// The page: one prompt, generated without and with a cache, as an image or a video.

import { ApiError, compare, generate, generateVideo, get, key, videoFile } from "./api.js";
import { count, plot, strip } from "./charts.js";
import { element, methodButtons, settingInputs, settingValues, words } from "./controls.js";

const $ = (id) => document.getElementById(id);
const SUBJECTS = ["red apple", "cat with sunglasses", "rocket", "cactus", "ghost", "pizza", "happy frog", "birthday cake"];
const SCALES = ["guidance", "cfg_scale"]; // each sent only if the model has it
const state = { model: null, methods: [], cache: null, given: {}, running: null, plain: new Map(), points: [], frontier: [], lastPlain: null };

async function start() {
  try {
    const [models, cache] = await Promise.all([get("/v1/models"), get("/v1/cache")]);
    showModel(models.data[0], cache);
  } catch (error) {
    if (error.status === 503) {
      showStatus("The model is loading…");
      return setTimeout(start, 700);
    }
    showFailure(error);
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
  $("prompt").maxLength = $("negative").maxLength = model.limits.max_prompt;
  $("negative-label").hidden = !model.negative_prompt;
  for (const scale of SCALES) {
    $(`${scale}-label`).hidden = $(scale).disabled = model[scale] === null;
    $(scale).value = model[scale] ?? "";
  }
  showVideoFields(model.video);
  $("size").value = model.size;
  $("sizes").replaceChildren(...sizes(model).map((value) => element("option", { value })));
  $("style").replaceChildren(element("option", { value: "" }, "none"), ...Object.values(model.styles).map((style) => element("option", { value: style }, style.replace(/ style$/, ""))));
  $("style-label").hidden = Object.keys(model.styles).length === 0;
  $("style").value = model.styles.fluent3d ?? "";
  const linked = readLink();
  const preferred = state.methods.some((m) => m.method === cache.method) ? cache.method : "mag_cache";
  const known = state.methods.find((m) => m.method === linked) ?? state.methods.find((m) => m.method === preferred) ?? state.methods[0];
  if (known.method === cache.method) state.given = { ...cache.settings, ...state.given };
  const ofDefault = () => (method().method === cache.method ? cache.settings : {});
  const buttons = methodButtons(state.methods, known.method, () => (showSettings(ofDefault()), updateLink()));
  $("methods").replaceChildren($("methods").querySelector("legend"), element("div", { className: "segments" }, ...buttons));
  showSettings(state.given);
  showStatus("");
  updatePlot();
  if (state.frontier.length) $("plot-note").textContent = "The line is the frontier in the model's profile; each point is a setting you tried.";
  if (linked) run();
}

function showVideoFields(video) {
  for (const name of ["frames", "fps"]) $(`${name}-label`).hidden = $(name).disabled = !video;
  $("image-label").hidden = !video || video.image === "none";
  $("image").required = video?.image === "required";
  for (const metric of ["ssim", "lpips"]) $(metric).closest("div").hidden = Boolean(video);
  if (!video) return;
  Object.assign($("frames"), { value: video.num_frames, step: video.multiple });
  $("fps").value = video.fps;
}

/** Sizes to choose from; the field takes any other too. */
function sizes({ size, square, size_multiple: multiple, limits }) {
  const [width, height] = size.split("x").map(Number);
  const shapes = square ? [[1, 1], [2, 2], [4, 4], [8, 8], [16, 16]] : [[1, 1], [1.5, 1], [1, 1.5], [0.5, 0.5], [2, 2]];
  const round = (side) => (square ? side : Math.max(1, Math.round(side / multiple)) * multiple);
  const all = shapes.map(([w, h]) => [round(width * w), round(height * h)]);
  return all.filter((sides) => Math.max(...sides) <= limits.max_size).map((sides) => sides.join("x"));
}

const method = () => state.methods.find((m) => m.method === document.querySelector("[name=method]:checked")?.value);

function showSettings(values) {
  $("method-doc").textContent = method().doc;
  $("settings").replaceChildren(...settingInputs(method(), values, state.cache.targets, updateLink));
}

// Links: the address contains the settings.

const FIELDS = ["prompt", "negative", "style", "size", "steps", "frames", "fps", "guidance", "cfg_scale", "seed"];

function link() {
  const used = FIELDS.filter((name) => !$(name).closest("[hidden]") && !(name === "negative" && $(name).value === ""));
  const query = new URLSearchParams(used.map((name) => [name, $(name).value]));
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
      addMessage(`${name} in the link is not a valid value.`);
    }
  }
  return query.get("method");
}

const updateLink = () => history.replaceState(null, "", link());

// Generating.

const requestBody = (cache, steps) => ({
  prompt: $("style").value ? `${$("prompt").value.trim()}, ${$("style").value}` : $("prompt").value.trim(),
  ...($("negative").value.trim() && state.model.negative_prompt ? { negative_prompt: $("negative").value.trim() } : {}),
  ...Object.fromEntries(SCALES.filter((scale) => state.model[scale] !== null).map((scale) => [scale, Number($(scale).value)])),
  size: $("size").value,
  seed: Number($("seed").value),
  steps,
  ...(state.model.video
    ? { num_frames: Number($("frames").value), fps: Number($("fps").value), compare: true }
    : { partial_images: state.model.partial_images ? Math.min(steps - 1, 15, state.model.limits.max_previews) : 0 }),
  cache,
});

async function run() {
  if (!state.model) return start();
  if (!$("form").reportValidity()) return;
  state.running?.abort();
  const control = (state.running = new AbortController());
  updateLink();
  setBusy(true);
  clearResults();
  try {
    const steps = Number($("steps").value);
    const cache = { method: method().method, ...settingValues(method(), $("settings")) };
    if (state.model.video) {
      await runVideo(requestBody(cache, steps), control.signal);
      return showStatus("");
    }
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
    if (state.plain.size > 20) state.plain.clear();
    state.plain.set(name, await generateInto("plain", request, signal));
  } else {
    show("plain", state.plain.get(name), request.steps);
    finish("plain", state.plain.get(name));
  }
  return state.plain.get(name);
}

/** One job generates both videos; the one without a cache is generated first, unless the server has it from the last run. */
async function runVideo(request, signal) {
  const { cache, ...rest } = request;
  const image = $("image-label").hidden ? undefined : $("image").files[0];
  const name = JSON.stringify([rest, image?.name, image?.lastModified]);
  const both = state.lastPlain !== name;
  try {
    const done = await generateVideo(request, image, signal, ({ status, progress, steps }) => {
      if (status === "queued") return showStatus("Waiting for other videos…");
      const step = Math.round((progress / 100) * steps * (both ? 2 : 1));
      const [id, own] = both && step < steps ? ["plain", step] : ["cached", step - (both ? steps : 0)];
      showStatus(id === "plain" ? "Generating without a cache…" : "Generating with the cache…");
      for (const side of ["plain", "cached"]) $(side).classList.toggle("active", side === id);
      $(id).querySelector(".bar").style.transform = `scaleX(${own / steps})`;
      $(id).querySelector(".time").textContent = `step ${own} of ${steps}`;
      if (both && id === "cached") $("plain").querySelector(".time").textContent = `step ${steps} of ${steps}`;
    });
    state.lastPlain = name;
    await Promise.all([showVideo("plain", done, done.comparison.plain), showVideo("cached", done, done.holdover)]);
    for (const player of players()) player.currentTime = 0;
    await Promise.all(players().map((player) => player.play().catch(() => {}))); // a browser may not allow it
    const { psnr, equal, plain } = done.comparison;
    showNumbers(plain, done.holdover, { psnr, equal }, cache);
  } finally {
    for (const side of ["plain", "cached"]) $(side).classList.remove("active");
  }
}

const players = () => ["plain", "cached"].map((id) => $(id).querySelector("video"));

async function showVideo(id, { id: video, steps, size }, holdover) {
  const player = $(id).querySelector("video");
  URL.revokeObjectURL(player.src);
  player.src = await videoFile(video, id === "plain" ? "plain" : "video");
  player.hidden = false;
  player.setAttribute("aria-label", `${id}: ${$("prompt").value}`);
  $(id).querySelector(".frame").style.aspectRatio = size.replace("x", " / ");
  strip($(id).querySelector(".strip"), holdover.trace, steps);
  finish(id, { holdover });
  await new Promise((resolve) => player.addEventListener("loadeddata", resolve, { once: true }));
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
  showNumbers(plain.holdover, cached.holdover, await compare(plain.b64_json, cached.b64_json), cache);
}

function showNumbers(plain, cached, { psnr, ssim, lpips, equal }, cache) {
  const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
  const [computed, held] = [sum(cached.computed), sum(cached.held)];
  $("speed").textContent = `${(plain.seconds.generation / cached.seconds.generation).toFixed(2)}×`;
  $("psnr").textContent = equal ? "identical" : `${psnr.toFixed(1)} dB`;
  $("ssim").textContent = ssim?.toFixed(3) ?? "–";
  $("lpips").textContent = lpips?.toFixed(4) ?? "–";
  $("forwards").textContent = `${computed} of ${computed + held}`;
  $("bytes").textContent = bytes(cached.held_bytes);
  state.points.push({ method: cache.method, speed: (computed + held) / computed, psnr: equal ? 60 : psnr, label: labelOf(cache) });
  updatePlot();
}

const updatePlot = () => plot($("plot"), state.points.slice(-40), state.frontier);

const labelOf = ({ method: name, ...settings }) => [words(name), ...Object.values(settings).map((value) => (typeof value === "object" ? "…" : value))].join(" ");
const bytes = (n) => (n < 1e3 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toFixed(0)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`);

function clearResults() {
  for (const id of ["plain", "cached"]) {
    $(id).classList.remove("done");
    $(id).querySelector(".bar").style.transform = "scaleX(0)";
    for (const part of [".time", ".count"]) $(id).querySelector(part).textContent = "";
    $(id).querySelector(".strip").replaceChildren();
  }
  for (const id of ["speed", "psnr", "ssim", "lpips", "forwards", "bytes"]) $(id).textContent = "–";
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
  showStatus("");
  if (error.status === 401) return askForKey();
  addMessage(error instanceof ApiError ? error.message : `The server cannot be reached: ${error.message}`);
}

const showStatus = (text) => ($("status").textContent = text);

/** A message stays until it is closed or the user generates again. */
function addMessage(text) {
  const close = element("button", { type: "button", title: "Close" }, "×");
  close.setAttribute("aria-label", "Close this message");
  const message = element("li", {}, element("span", {}, text), close);
  close.addEventListener("click", () => message.remove());
  $("messages").append(message);
}

const clearMessages = () => $("messages").replaceChildren();

function askForKey() {
  const wrong = key.get() !== "";
  $("key-label").hidden = false;
  $("key").focus();
  $("key").select();
  clearMessages();
  addMessage(wrong ? "This key is wrong." : "This server requires a key.");
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  clearMessages();
  run();
});
$("form").addEventListener("change", () => state.model && updateLink());
$("stop").addEventListener("click", () => state.running?.abort());
$("dice").addEventListener("click", () => {
  $("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % 100000;
  updateLink();
});
for (const player of players()) {
  for (const [event, shown] of [["pointerenter", true], ["focus", true], ["pointerleave", false], ["blur", false]]) {
    player.addEventListener(event, () => (player.controls = shown)); // they would cover a small video
  }
}
$("key").addEventListener("change", () => {
  key.set($("key").value);
  clearMessages();
  start();
});
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
