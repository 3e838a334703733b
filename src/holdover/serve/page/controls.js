// The form of a method's settings, built from the server's description of them.

const HIDDEN = new Set(["num_inference_steps"]); // known from the scheduler
const SHOWN = 4;

export const element = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};

export const words = (name) => name.replaceAll("_", " ");

/** Radio buttons, one per method. */
export function methodButtons(methods, chosen, onChange) {
  return methods.map(({ method }) => {
    const input = element("input", { type: "radio", name: "method", value: method, checked: method === chosen });
    input.addEventListener("change", onChange);
    return element("label", { className: "segment" }, input, element("span", {}, words(method)));
  });
}

/** Numbers with sliders, checkboxes, lists and texts for the settings of a method; `values` overrides the defaults. */
export function settingInputs(method, values, targets, onChange) {
  const fields = method.settings.filter((field) => !HIDDEN.has(field.name) && (targets || !["quality", "target"].includes(field.name)));
  const valueOf = (field) => values[field.name] ?? field.default;
  const simple = fields.filter((field) => formOf(field, valueOf(field)) !== text);
  const rows = [...simple, ...fields.filter((field) => !simple.includes(field))].map((field) => row(field, valueOf(field), onChange));
  if (simple.some((field) => field.name === "target") && simple.some((field) => field.name === "budget")) rows.unshift(aim(rows, values, onChange));
  if (rows.length <= SHOWN + 1) return rows;
  const shown = Math.min(SHOWN, Math.max(1, simple.length));
  const more = element("details", {}, element("summary", {}, "More settings"), ...rows.slice(shown));
  more.addEventListener("invalid", () => (more.open = true), true);
  return [...rows.slice(0, shown), more];
}

/** The values in the form that differ from the defaults; the others are not sent, which keeps links short. */
export function settingValues(method, root) {
  const values = {};
  for (const field of method.settings) {
    const input = root.querySelector(`[data-setting="${field.name}"]`);
    if (!input || input.closest("[hidden]")) continue;
    const value = READ[input.dataset.kind](field, input.value, input);
    if (value !== undefined && value !== field.default) values[field.name] = value;
  }
  return values;
}

// Each kind of input, and what its value is in a request.

const READ = {
  number: (field, value) => (value === "" ? undefined : Number(value)),
  check: (field, value, input) => input.checked,
  list: (field, value) => field.choices[Number(value)],
  text: (field, value) => (value.trim() === "" ? undefined : parsed(field, value.trim())),
  target: (field, value) => (value === "" ? undefined : `psnr>=${value}`),
  budget: (field, value) => (value === "" ? undefined : `${value}x`),
};

/** Texts with a number in them: [pattern, unit, lowest, highest, step, usual]. */
const MEASURES = {
  target: [/^psnr>=([\d.]+)$/, "dB PSNR", 20, 60, 1, 40],
  budget: [/^([\d.]+)x$/, "×", 1.5, 8, 0.5, 3],
};

function formOf(field, value) {
  if (field.name in MEASURES && (value == null || MEASURES[field.name][0].test(value))) return measure;
  if (field.choices) return list;
  return { number, integer: number, boolean: check }[field.kind] ?? text;
}

function parsed(field, value) {
  if (field.kind === "text") return value;
  try {
    return JSON.parse(value);
  } catch {
    return value;
  }
}

function row(field, value, onChange) {
  const id = `setting-${field.name}`;
  const hint = element("p", { className: "hint", id: `${id}-hint` }, field.allowed && !field.choices ? `${field.doc} (${field.allowed})` : field.doc);
  const { input, beside = [], below = [] } = formOf(field, value)(field, value);
  input.id = id;
  input.dataset.setting = field.name;
  input.setAttribute("aria-describedby", hint.id);
  input.addEventListener("input", onChange);
  const name = words(field.name.replace(/^mag_/, ""));
  const label = element("label", { htmlFor: id }, name[0].toUpperCase() + name.slice(1));
  return element("div", { className: "setting" }, element("div", { className: "line" }, label, input, ...beside), ...below, hint);
}

/** A number that takes any value the server takes, and a slider over the usual ones. */
function number(field, value) {
  const integer = field.kind === "integer";
  const low = field.minimum ?? 0;
  const high = field.maximum ?? (integer ? Math.max(10, 4 * field.default) : 4 * (field.default || 0.25));
  const box = element("input", { type: "number", step: integer ? 1 : "any", value });
  if (field.minimum !== null) box.min = field.minimum;
  if (field.maximum !== null) box.max = field.maximum;
  return { input: kind(box, "number"), below: [slider(box, low, high, integer ? 1 : high > 20 ? 0.5 : 0.01)] };
}

function measure(field, value) {
  const [pattern, unit, low, high, step, usual] = MEASURES[field.name];
  const box = element("input", { type: "number", step: "any", min: field.name === "budget" ? 1 : 0, value: pattern.exec(value ?? "")?.[1] ?? usual });
  return { input: kind(box, field.name), beside: [element("span", { className: "unit" }, unit)], below: [slider(box, low, high, step)] };
}

function slider(box, min, max, step) {
  const range = element("input", { type: "range", min, max, step, value: box.value, tabIndex: -1 });
  range.setAttribute("aria-hidden", "true");
  range.addEventListener("input", () => ((box.value = range.value), box.dispatchEvent(new Event("input", { bubbles: true }))));
  box.addEventListener("input", () => box.value !== "" && (range.value = box.value));
  return range;
}

const check = (field, value) => ({ input: kind(element("input", { type: "checkbox", checked: Boolean(value) }), "check") });

function list(field, value) {
  const named = field.name === "quality"; // what is aimed for, so none is no choice
  const chosen = named ? (value ?? "high") : value;
  const options = field.choices.map((choice, i) => element("option", { value: i, selected: choice === chosen, hidden: named && choice === null }, String(choice ?? "none")));
  return { input: kind(element("select", {}, ...options), "list") };
}

/** Lists and optional values, as JSON; empty for the default. */
function text(field, value) {
  const shown = value == null ? "" : typeof value === "string" ? value : JSON.stringify(value);
  return { input: kind(element("input", { type: "text", value: shown, placeholder: "default", spellcheck: false }), "text") };
}

const kind = (input, name) => ((input.dataset.kind = name), input);

/** Quality or speed: one of them is shown. */
function aim(rows, values, onChange) {
  const of = (name) => rows.find((row) => row.querySelector(`[data-setting=${name}]`));
  const aims = { quality: "a quality", target: "a PSNR", budget: "a speed-up" };
  const chosen = Object.keys(aims).findLast((name) => values[name] != null) ?? "target";
  const options = Object.entries(aims).map(([value, text]) => element("option", { value, selected: value === chosen }, text));
  const select = element("select", { id: "aim" }, ...options);
  const show = () => Object.keys(aims).forEach((name) => (of(name).hidden = name !== select.value));
  select.addEventListener("input", () => (show(), onChange()));
  show();
  return element("div", { className: "setting" }, element("div", { className: "line" }, element("label", { htmlFor: "aim" }, "Aim for"), select));
}
