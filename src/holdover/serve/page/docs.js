// The API as a page, made from the server's OpenAPI document: no scripts of other servers.

import { element } from "./controls.js";

const code = (text) => element("code", {}, text);

async function start() {
  try {
    const document = await (await fetch("/openapi.json")).json();
    show(document);
  } catch (error) {
    window.document.getElementById("status").textContent = `The OpenAPI document cannot be read: ${error.message}`;
  }
}

function show(api) {
  const [about, nav, root] = ["about", "paths", "operations"].map((id) => document.getElementById(id));
  about.textContent = `Version ${api.info.version}. ${api.info.description.replaceAll("`", "")}`;
  const operations = Object.entries(api.paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, operation]) => ({ path, verb: verb.toUpperCase(), operation })));
  nav.replaceChildren(...operations.map(({ path, verb }) => element("a", { href: `#${anchor(verb, path)}` }, code(verb), ` ${path}`)));
  root.replaceChildren(...operations.map((one) => section(api, one)));
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

const anchor = (verb, path) => `${verb.toLowerCase()}${path.replaceAll(/[^a-z0-9]+/gi, "-")}`;

function section(api, { path, verb, operation }) {
  const body = operation.requestBody?.content ?? {};
  const [kind] = Object.keys(body);
  const schema = kind && resolve(api, body[kind].schema);
  const answer = operation.responses["200"]?.content?.["application/json"]?.schema;
  const parts = [element("h2", {}, code(verb), ` ${path}`), element("p", {}, operation.description.replaceAll("`", ""))];
  if (schema) {
    parts.push(element("h3", {}, `Request, ${kind}`), table(api, schema), ...examples(path, kind, schema));
    if (schema.properties.cache) parts.push(...caches(api, schema.properties.cache));
  }
  if (answer) parts.push(element("h3", {}, "Response"), table(api, resolve(api, answer)));
  const statuses = Object.entries(operation.responses).filter(([status]) => status !== "200");
  parts.push(element("h3", {}, "Errors"), element("table", {}, ...statuses.map(([status, { description }]) => line(code(status), description.replaceAll("`", "")))));
  return element("section", { id: anchor(verb, path), className: "operation" }, ...parts);
}

function examples(path, kind, schema) {
  const url = `${location.origin}${path}`;
  const curls = kind === "multipart/form-data"
    ? [`curl ${url} -F image=@photo.png -F prompt="in the style of a woodcut"`]
    : (schema.examples ?? []).slice(0, 3).map((example) => `curl ${url} -H "Content-Type: application/json" -d '${JSON.stringify(example)}'`);
  return curls.map((text) => element("pre", {}, text));
}

/** The methods that `cache` may name, with their settings. */
function caches(api, cache) {
  const named = cache.anyOf.filter((option) => option.title && option.properties && Object.keys(option.properties).length);
  return [
    element("h3", {}, "cache"),
    ...named.map((option) => element("details", {}, element("summary", {}, option.title), table(api, option))),
  ];
}

const resolve = (api, schema) => (schema.$ref ? schema.$ref.split("/").slice(1).reduce((node, part) => node[part], api) : schema);

function table(api, schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const needed = (schema.required ?? []).includes(name) ? "required" : "";
    return line(code(name), typeOf(api, field), [needed, field.description ?? ""].filter(Boolean).join(". "));
  });
  return element("table", {}, ...rows);
}

const line = (...cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));

/** The type of a field with its limits, in words. */
function typeOf(api, field) {
  const one = resolve(api, field);
  if (one.anyOf) return [...new Set(one.anyOf.filter((option) => option.type !== "null").map((option) => typeOf(api, option)))].join(" or ");
  if (one.const !== undefined) return JSON.stringify(one.const);
  if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(", ");
  if (one.title && one.properties) return one.title;
  if (one.type === "array") return `list of ${typeOf(api, one.items)}${one.maxItems === undefined ? "" : `, at most ${one.maxItems}`}`;
  const limits = [["minimum", "≥"], ["maximum", "≤"], ["maxLength", "length ≤"]].filter(([word]) => one[word] !== undefined);
  return [one.type ?? "any", ...limits.map(([word, sign]) => `${sign} ${one[word]}`)].join(", ");
}

start();
