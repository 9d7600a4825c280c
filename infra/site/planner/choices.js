// What is chosen, as the part of the address behind "#": plain texts as they are, pasted documents packed.

const PACKED = "packed:";
// Of a node or pod only what plans are made with, so that a link stays short
const KEPT = {
  Node: (item) => ({
    kind: "Node",
    metadata: { name: item.metadata?.name, labels: item.metadata?.labels },
    spec: {
      taints: item.spec?.taints,
      providerID: item.spec?.providerID,
      unschedulable: item.spec?.unschedulable,
    },
    status: {
      allocatable: item.status?.allocatable,
      capacity: item.status?.capacity,
      conditions: item.status?.conditions?.filter(({ type }) => type === "Ready")
        .map(({ type, status }) => ({ type, status })),
    },
  }),
  Pod: (item) => ({
    kind: "Pod",
    metadata: { name: item.metadata?.name, namespace: item.metadata?.namespace },
    spec: {
      nodeName: item.spec?.nodeName,
      overhead: item.spec?.overhead,
      containers: item.spec?.containers?.map(resourcesOf),
      initContainers: item.spec?.initContainers?.map(resourcesOf),
    },
    status: { phase: item.status?.phase },
  }),
};

function resourcesOf({ resources, restartPolicy }) {
  return { resources, restartPolicy };
}

/** A document without what plans don't need; text that is no JSON stays as it is. */
function condensed(text) {
  try {
    const found = JSON.parse(text);
    const items = found.items?.map((item) => KEPT[item.kind]?.(item) ?? null).filter(Boolean);
    return JSON.stringify(items ? { items } : found);
  } catch {
    return text;
  }
}

/** The form as a fragment of an address. */
export async function written(form, documents) {
  const parts = new URLSearchParams();
  for (const [name, text] of Object.entries(form)) {
    if (text) parts.set(name, documents.has(name) ? PACKED + (await pack(condensed(text))) : text);
  }
  return parts.toString();
}

/** The form that a fragment of an address says; a packed text that is damaged is left out. */
export async function read(fragment) {
  const form = {};
  for (const [name, text] of new URLSearchParams(fragment)) {
    form[name] = text.startsWith(PACKED) ? await unpack(text.slice(PACKED.length)) : text;
  }
  return form;
}

async function pack(text) {
  const bytes = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(text));
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

async function unpack(text) {
  try {
    const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(binary, (character) => character.charCodeAt(0));
    return new TextDecoder().decode(await through(new DecompressionStream("deflate-raw"), bytes));
  } catch {
    return "";
  }
}

async function through(stream, bytes) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}
