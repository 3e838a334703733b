// The form of a method's settings, built from the server's description of them.

const HIDDEN = new Set(["num_inference_steps"]); // known from the scheduler
const SHOWN = 4;

export const element = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};

/** Radio buttons, one per method. */
export function methodButtons(methods, chosen, onChange) {
  return methods.map(({ method }) => {
    const input = element("input", { type: "radio", name: "method", value: method, checked: method === chosen });
    input.addEventListener("change", onChange);
    return element("label", { className: "segment" }, input, element("span", {}, method.replace("_", " ")));
  });
}

/** Sliders, checkboxes and lists for the settings of a method; `values` overrides the defaults. */
export function settingInputs(method, values, targets, onChange) {
  const fields = method.settings.filter((field) => !HIDDEN.has(field.name) && formOf(field) && (targets || field.name !== "target"));
  const rows = fields.map((field) => row(field, values[field.name] ?? field.default, onChange));
  if (fields.some((field) => field.name === "target")) rows.unshift(aim(rows, values, onChange));
  if (rows.length <= SHOWN + 1) return rows;
  const more = element("details", {}, element("summary", {}, "More settings"), ...rows.slice(SHOWN));
  return [...rows.slice(0, SHOWN), more];
}

/** The values in the form that differ from the defaults; the others are not sent, which keeps links short. */
export function settingValues(method, root) {
  const values = {};
  for (const field of method.settings) {
    const input = root.querySelector(`[data-setting="${field.name}"]`);
    if (!input || input.closest("[hidden]")) continue;
    const value = read(field, input);
    if (value !== field.default) values[field.name] = value;
  }
  return values;
}

function formOf(field) {
  if (field.name in SPECIAL) return SPECIAL[field.name].make;
  if (field.choices) return list;
  return { number: slider, integer: slider, boolean: box }[field.kind];
}

function row(field, value, onChange) {
  const id = `setting-${field.name}`;
  const output = element("output", { htmlFor: id });
  const input = formOf(field)(field, value);
  input.id = id;
  input.dataset.setting = field.name;
  const update = () => (output.textContent = shown(field, input));
  input.addEventListener("input", () => (update(), onChange()));
  update();
  const label = element("label", { htmlFor: id }, words(field.name), output);
  const hint = element("p", { className: "hint", id: `${id}-hint` }, field.doc);
  input.setAttribute("aria-describedby", hint.id);
  return element("div", { className: "setting" }, label, input, hint);
}

function words(name) {
  const plain = name.replace(/^mag_/, "").replaceAll("_", " ");
  return plain[0].toUpperCase() + plain.slice(1);
}

function slider(field, value) {
  const low = field.minimum ?? 0;
  const high = field.maximum ?? (field.kind === "integer" ? Math.max(10, 4 * field.default) : 4 * (field.default || 0.25));
  const step = field.kind === "integer" ? 1 : 0.01;
  return element("input", { type: "range", min: low, max: Math.max(high, value), step, value });
}

// Settings that are text with a number in it.
const SPECIAL = {
  target: { make: numberSlider(20, 60, 1, 40), read: (value) => `psnr>=${value}`, shown: (value) => `PSNR ≥ ${value} dB` },
  budget: { make: numberSlider(1.5, 8, 0.5, 3), read: (value) => `${value}x`, shown: (value) => `${value}×` },
};

function numberSlider(min, max, step, usual) {
  return (field, value) => element("input", { type: "range", min, max, step, value: /[\d.]+/.exec(value ?? "")?.[0] ?? usual });
}

/** Quality or speed: one of the two sliders is shown. */
function aim(rows, values, onChange) {
  const of = (name) => rows.find((row) => row.querySelector(`[data-setting=${name}]`));
  const options = [["target", "a quality"], ["budget", "a speed-up"]].map(([value, text]) => element("option", { value, selected: value === (values.budget ? "budget" : "target") }, text));
  const select = element("select", { id: "aim" }, ...options);
  const show = () => ["target", "budget"].forEach((name) => of(name) && (of(name).hidden = name !== select.value));
  select.addEventListener("input", () => (show(), onChange()));
  show();
  return element("div", { className: "setting" }, element("label", { htmlFor: "aim" }, "Aim for"), select);
}

const box = (field, value) => element("input", { type: "checkbox", checked: Boolean(value) });

function list(field, value) {
  const options = field.choices.map((choice, i) => element("option", { value: i, selected: choice === value }, String(choice ?? "none")));
  return element("select", {}, ...options);
}

function read(field, input) {
  if (field.name in SPECIAL) return SPECIAL[field.name].read(input.value);
  if (field.choices) return field.choices[Number(input.value)];
  return field.kind === "boolean" ? input.checked : Number(input.value);
}

function shown(field, input) {
  if (field.name in SPECIAL) return SPECIAL[field.name].shown(input.value);
  if (field.choices || field.kind === "boolean") return "";
  return field.kind === "integer" ? input.value : Number(input.value).toFixed(2);
}
