// An answer of the planner as elements: plans with their bars and commands, or why there is none.

const GIB = 2 ** 30;
const BY_SIZE = [[1, 2], [0.01, 4]];

/** An element with properties and children; texts become text nodes, so that nothing is read as HTML. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

/** A text with the parts between backticks as code. */
function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", {}, part) : part));
}

function gib(bytes, digits = 1) {
  return bytes == null ? "?" : (bytes / GIB).toFixed(digits);
}

function figure(value) {
  if (value == null) return "?";
  const [, digits] = BY_SIZE.find(([least]) => value >= least) ?? [0, 6];
  return value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: digits });
}

/** What is shown of an answer; `change(fields)` is called when a suggestion is taken. */
export function shown(found, change) {
  return found.plans ? plansOf(found) : refusal(found, change);
}

function refusal({ problem, advice, suggestions, command }, change) {
  const buttons = suggestions.map(({ words, fields }) =>
    element("button", { type: "button", className: "md-button", onclick: () => change(fields) }, words));
  return [
    element("div", { className: "planner-problem", role: "alert" },
      element("strong", {}, problem),
      advice ? element("p", {}, advice) : null,
      buttons.length ? element("div", { className: "planner-buttons" }, ...buttons) : null),
    said("In a terminal", command),
  ];
}

function plansOf(found) {
  const longest = Math.max(...found.plans.map((plan) =>
    Math.max(plan.needs_upper_bytes, plan.shows_upper_bytes, plan.capacity_bytes ?? 0)));
  return [
    ...found.notes.map((note) => element("p", { className: "planner-note" }, ...withCode(note))),
    legend(found.plans),
    element("ol", { className: "planner-plans" },
      ...found.plans.map((plan) => planOf(plan, longest, found.timed))),
    element("p", { className: "planner-note" }, `Order: ${found.order}.`),
    found.rejected.length
      ? element("details", {}, element("summary", {}, "What was rejected"),
        element("ul", {}, ...found.rejected.map((line) => element("li", {}, line))))
      : null,
    said("The same in a terminal", found.command),
  ];
}

function legend(plans) {
  const all = new Map(plans.flatMap((plan) => plan.categories).map((part) => [part.name, part]));
  return element("ul", { className: "planner-legend", ariaLabel: "What the memory goes to" },
    ...[...all.values()].map((part) => element("li", {}, swatch(part), part.name)));
}

function swatch({ color, pattern }) {
  return element("span", { className: `planner-part ${pattern}`, style: `background-color: ${color}` });
}

function planOf(plan, longest, timed) {
  const machine = plan.instance_type ? `, ${plan.nodes > 1 ? `${plan.nodes} ` : ""}${plan.instance_type}` : "";
  const cloud = plan.cloud ? ` (${plan.cloud})` : "";
  const layout = [
    `${plan.method} with ${plan.engine}`,
    plan.layout,
    `batch ${plan.micro_batch_size} x ${plan.accumulation}`,
    plan.activation_checkpointing ? "checkpointing" : null,
    plan.low_availability ? `low availability: ${plan.low_availability}` : null,
  ].filter(Boolean).join(", ");
  const speed = plan.tokens_per_second;
  const figures = [
    ["tokens/s", speed == null ? "?" : Math.round(speed).toLocaleString("en")],
    ...(timed
      ? [["hours", figure(plan.hours)], ["USD", figure(plan.usd)]]
      : [["USD/h", figure(plan.usd_per_hour)], ["USD/M tokens", figure(plan.usd_per_million_tokens)]]),
  ];
  return element("li", { className: "planner-plan" },
    element("h3", {}, `${plan.nodes * plan.gpus_per_node}x ${plan.gpu_type}${machine}${cloud}`),
    element("p", {}, layout),
    element("dl", { className: "planner-figures" },
      ...figures.map(([name, value]) =>
        element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
    bars(plan, longest),
    said("Run it, on a cluster with such nodes", plan.run),
    element("details", {}, element("summary", {}, "In full"), numbers(plan),
      element("pre", { tabIndex: 0 }, plan.text)));
}

/** What one GPU needs, by category, above what it shows; a line where its memory ends. */
function bars(plan, longest) {
  const share = (bytes) => `${((100 * bytes) / longest).toFixed(3)}%`;
  const parts = plan.categories.map((part) => element("span", {
    className: `planner-part ${part.pattern}`,
    style: `width: ${share(part.bytes)}; background-color: ${part.color}`,
    title: `${part.name}: ${gib(part.bytes, 2)} GiB`,
  }));
  const capacity = plan.capacity_bytes;
  const spare = capacity == null ? 0 : Math.round((100 * plan.headroom_bytes) / capacity);
  const words = capacity == null
    ? `One GPU: ${gib(plan.needs_bytes)} GiB`
    : `One GPU: ${gib(plan.needs_bytes)} of ${gib(capacity)} GiB: ${plan.verdict}, ${spare} % to spare`;
  return element("figure", { className: "planner-bars" },
    element("div", { className: "planner-tracks", ariaHidden: "true" },
      element("div", { className: "planner-track" }, ...parts, upper(plan.needs_upper_bytes, share)),
      element("div", { className: "planner-track shows" },
        element("span", { className: "planner-shows", style: `width: ${share(plan.shows_bytes)}` }),
        upper(plan.shows_upper_bytes, share)),
      capacity == null
        ? null
        : element("span", { className: "planner-capacity", style: `left: ${share(capacity)}` })),
    element("figcaption", {}, words));
}

function upper(bytes, share) {
  return element("span", { className: "planner-upper", style: `left: ${share(bytes)}` });
}

function numbers(plan) {
  const row = (name, bytes) =>
    element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, gib(bytes, 2)));
  return element("table", {},
    element("caption", {}, "Memory of one GPU, GiB"),
    element("tbody", {},
      ...plan.categories.map((part) => row(part.name, part.bytes)),
      row("needs", plan.needs_bytes), row("needs at most", plan.needs_upper_bytes),
      row("shows", plan.shows_bytes), row("shows at most", plan.shows_upper_bytes),
      plan.capacity_bytes == null ? null : row("has", plan.capacity_bytes)));
}

/** A command with a button that copies it. */
function said(label, command) {
  const code = element("code", { tabIndex: 0 }, command);
  const button = element("button", { type: "button", className: "planner-copy" }, "Copy");
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // without leave to copy: marked, to be copied by hand
    }
  };
  return element("div", { className: "planner-command" }, element("span", {}, label), code, button);
}
