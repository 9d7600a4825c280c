// The estimator in a worker: Python is started once, then each form that comes in is answered.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const MODULES = "/modules";
const GLUE = `
import json, sys
sys.path.insert(0, "${MODULES}")
from estimator.planner_page import answers, fields

def answer(form):
    return json.dumps(answers.answer(json.loads(form)))

json.dumps(fields.as_values())
`;

async function start() {
  const [python, archive] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    fetch(new URL("./estimator.zip", import.meta.url)).then((response) => {
      if (!response.ok) throw new Error(`estimator.zip: ${response.status}`);
      return response.arrayBuffer();
    }),
  ]);
  python.unpackArchive(archive, "zip", { extractDir: MODULES });
  const groups = JSON.parse(python.runPython(GLUE));
  return { groups, answer: python.globals.get("answer") };
}

const started = start();
started.then(
  ({ groups }) => postMessage({ groups }),
  (error) => postMessage({ failed: String(error) }),
);

onmessage = async ({ data: { number, form } }) => {
  const { answer } = await started;
  const began = performance.now();
  try {
    const found = JSON.parse(answer(JSON.stringify(form)));
    postMessage({ number, found, milliseconds: performance.now() - began });
  } catch (error) {
    postMessage({ number, failed: String(error) });
  }
};
