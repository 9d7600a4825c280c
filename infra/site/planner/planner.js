// The planner's page: draws the form that the estimator describes, asks it at each change, keeps the choice
// in the address.
import { element, shown } from "./answer.js";
import { read, written } from "./choices.js";

const PAUSE_MS = 60; // of typing, before the planner is asked
// Groups of fields that are open at first; the others open on demand, or where a field of theirs is set
const OPEN = matchMedia("(min-width: 60em)").matches ? ["Training", "Where"] : ["Training"];
const root = document.getElementById("planner");
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const inputs = new Map();
const documents = new Set();
let status, result;
let asked = 0;
let waiting;

worker.onmessage = ({ data }) => {
  if (data.groups) return begin(data.groups);
  if (data.failed) return fail(data.failed);
  if (data.number === asked) show(data);
  return undefined;
};
worker.onerror = (event) => fail(event.message || "its files could not be loaded");

async function begin(groups) {
  draw(groups);
  take(await read(location.hash.slice(1)));
  ask();
  addEventListener("hashchange", async () => {
    if (location.hash.slice(1) === (await written(form(), documents))) return;
    take(await read(location.hash.slice(1)));
    ask();
  });
}

function draw(groups) {
  status = element("p", { className: "planner-status", role: "status" }, "Planning...");
  result = element("div", { className: "planner-result" });
  const fields = element("form", { className: "planner-form", ariaLabel: "What to plan for" },
    ...groups.map(({ group, fields }) =>
      element("details", { open: OPEN.includes(group) },
        element("summary", {}, group),
        element("div", { className: "planner-fields" }, ...fields.map(fieldOf)))),
    element("button", { type: "reset", className: "md-button" }, "Clear all"));
  fields.onsubmit = (event) => event.preventDefault();
  fields.oninput = later;
  fields.onreset = () => setTimeout(ask);
  root.replaceChildren(fields, element("section", { ariaLabel: "Plans" }, status, result));
}

function fieldOf(field) {
  const id = `planner-${field.name}`;
  const input = inputOf(field, id);
  inputs.set(field.name, input);
  if (field.kind === "document") documents.add(field.name);
  const label = element("label", { htmlFor: id }, field.label, " ", element("code", {}, field.option));
  const list = field.kind !== "choice" && field.choices.length
    ? element("datalist", { id: `${id}-list` }, ...field.choices.map((value) => element("option", { value })))
    : null;
  const wide = field.kind === "document" || field.name === "model" ? "planner-field wide" : "planner-field";
  return element("div", { className: wide }, label, input, list);
}

function inputOf(field, id) {
  if (field.kind === "choice") {
    const others = field.choices.filter((value) => value !== field.hint);
    return element("select", { id }, element("option", { value: "" }, field.hint),
      ...others.map((value) => element("option", { value }, value)));
  }
  if (field.kind === "flag") return element("input", { id, type: "checkbox" });
  if (field.kind === "document") {
    return element("textarea", { id, rows: 2, spellcheck: false, placeholder: field.hint });
  }
  const input = element("input", {
    id, type: "text", placeholder: field.hint, autocomplete: "off", spellcheck: false,
    inputMode: ["whole", "number"].includes(field.kind) ? "decimal" : "text",
  });
  if (field.choices.length) input.setAttribute("list", `${id}-list`);
  return input;
}

/** The texts of all fields that have one. */
function form() {
  const texts = {};
  for (const [name, input] of inputs) {
    const text = input.type === "checkbox" ? (input.checked ? "on" : "") : input.value.trim();
    if (text) texts[name] = text;
  }
  return texts;
}

/** Show a form's texts in the fields; all others are emptied. */
function take(texts) {
  for (const [name, input] of inputs) put(input, texts[name] ?? "");
}

function put(input, text) {
  if (input.type === "checkbox") input.checked = text === "on";
  else input.value = text;
  if (text) input.closest("details").open = true;
}

function later() {
  clearTimeout(waiting);
  waiting = setTimeout(ask, PAUSE_MS);
}

async function ask() {
  clearTimeout(waiting);
  asked += 1;
  root.dataset.asked = asked;
  const number = asked;
  const texts = form();
  // An empty form is answered with the example that stands in its first field
  const example = !texts.model && !texts.config ? { model: inputs.get("model").placeholder } : {};
  worker.postMessage({ number, form: { ...example, ...texts } });
  const fragment = await written(texts, documents);
  if (number === asked) history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname);
}

function show({ number, found, milliseconds }) {
  const fields = (changed) => {
    for (const [name, text] of Object.entries(changed)) put(inputs.get(name), text);
    ask();
  };
  result.replaceChildren(...shown(found, fields).filter(Boolean));
  status.textContent = `Planned in ${(milliseconds / 1000).toFixed(1)} s in this browser.`;
  root.dataset.answered = number;
}

function fail(message) {
  const said = element("p", { className: "planner-problem", role: "alert" },
    `The planner has failed: ${message}. Reload the page; `,
    element("code", {}, "finetune plan"), " answers the same in a terminal.");
  (result ?? root).replaceChildren(said);
}
