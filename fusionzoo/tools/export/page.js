// The page: a field for each modality, and what the exported model answers.
import * as ort from "./packages/ort.wasm.min.mjs";
import { prepare } from "./prepare.js";

ort.env.wasm.wasmPaths = new URL("./packages/", import.meta.url).href;
ort.env.wasm.numThreads = self.crossOriginIsolated ? navigator.hardwareConcurrency : 1;

const read = async (name) => (await fetch(name)).json();
const [{ modalities }, labels] = await Promise.all([read("preprocess.json"), read("labels.json")]);
const session = await ort.InferenceSession.create("model.onnx");

const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const DECODE = { // logits of a target -> a number, or a probability of each class
  regression: ([x], target) => x * target.deviation + target.mean,
  multilabel: (x) => x.map(sigmoid),
  classification: (x) => {
    const shares = x.map((y) => Math.exp(y - Math.max(...x)));
    const sum = shares.reduce((a, b) => a + b);
    return shares.map((y) => y / sum);
  },
  ordinal: (x) => { // above[k]: P(level >= k)
    const above = [1];
    for (const y of x) above.push(above.at(-1) * sigmoid(y));
    return above.map((share, level) => share - (above[level + 1] ?? 0));
  },
};

/** Answer a sample, {modality: File, text, numbers or cells by column}; leave out what it lacks. */
export async function answer(sample) {
  const inputs = await prepare(sample, modalities);
  const feeds = {};
  for (const name of session.inputNames) {
    const { type, data, dims } = inputs[name];
    feeds[name] = new ort.Tensor(type, data, dims);
  }
  const logits = Array.from((await session.run(feeds, ["logits"])).logits.data);
  const answers = {};
  for (const target of labels.decode) {
    const answered = DECODE[target.kind](logits.slice(target.first, target.last), target);
    const pairs = target.classes.map((name, place) => [name, answered[place]]);
    answers[target.name] = target.kind === "regression" ? answered : Object.fromEntries(pairs);
  }
  return answers;
}

const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

// Fields: each has the elements to show, and value(), undefined where it is empty.

function fileField(accept, show) {
  const field = element("input", { type: "file", accept });
  const shown = element("div", { className: "preview" });
  field.addEventListener("change", async () => shown.replaceChildren(...(field.files.length ? [await show(field.files[0])] : [])));
  return { shown: [field, shown], value: () => field.files[0] };
}

async function picture(file) {
  const drawn = await createImageBitmap(file);
  const canvas = element("canvas", { width: drawn.width, height: drawn.height });
  canvas.getContext("2d").drawImage(drawn, 0, 0);
  return canvas;
}

async function sound(file) {
  const reader = new FileReader();
  await new Promise((done) => { reader.onload = done; reader.readAsDataURL(file); });
  return element("audio", { controls: true, src: reader.result });
}

function textField() {
  const field = element("textarea", { rows: 3 });
  return { shown: [field], value: () => field.value.trim() || undefined };
}

function numbersField(width, several) {
  const hint = several ? `${width} numbers a line` : `${width} numbers`;
  const field = element("textarea", { rows: 3, placeholder: hint });
  const value = () => {
    const lines = field.value.trim().split("\n").filter((line) => line.trim());
    if (!lines.length) return undefined;
    const steps = lines.map((line) => line.trim().split(/[\s,;]+/));
    return several ? steps : steps.flat();
  };
  return { shown: [field], value };
}

function cellsField({ cells, columns }) {
  const valuesOf = Object.fromEntries(columns.map(({ name, values }) => [name, values]));
  const fields = cells.map(({ name }) => {
    if (!valuesOf[name]) return [name, element("input")];
    const options = ["", ...valuesOf[name]].map((value) => element("option", { value }, value || "unknown"));
    return [name, element("select", {}, ...options)];
  });
  const value = () => {
    const row = Object.fromEntries(fields.map(([name, field]) => [name, field.value]));
    return Object.values(row).some((cell) => cell.trim()) ? row : undefined;
  };
  return { shown: fields.map(([name, field]) => element("label", {}, `${name} `, field)), value };
}

const FIELDS = {
  image: () => fileField("image/*", picture),
  wave: () => fileField("audio/*", sound),
  bytes: textField,
  tokenizer: textField,
  vector: ({ width }) => numbersField(width, false),
  sequence: ({ width }) => numbersField(width, true),
  tabular: cellsField,
};

const MOST = 10; // classes shown

function showAnswers(answers) {
  return Object.entries(answers).flatMap(([target, answered]) => {
    const title = element("h2", {}, target);
    if (typeof answered === "number") return [title, element("p", {}, answered.toPrecision(4))];
    const likely = Object.entries(answered).sort((a, b) => b[1] - a[1]).slice(0, MOST);
    const rows = likely.map(([name, share]) => {
      const bar = element("span", { className: "bar" });
      bar.style.width = `${100 * share}%`;
      return element("tr", {}, element("td", {}, name), element("td", { className: "share" }, bar), element("td", {}, `${(100 * share).toFixed(1)} %`));
    });
    return [title, element("table", {}, ...rows)];
  });
}

const form = document.querySelector("form");
const fields = {};
for (const [name, { processor }] of Object.entries(modalities)) {
  fields[name] = FIELDS[processor.by](processor);
  form.append(element("fieldset", {}, element("legend", {}, name), ...fields[name].shown));
}
const button = element("button", {}, "Answer");
form.append(button);
const output = document.querySelector("output");
output.textContent = "Give one of them or more.";

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  button.disabled = true;
  try {
    const sample = {};
    for (const [name, field] of Object.entries(fields)) {
      try {
        sample[name] = field.value();
      } catch (error) {
        throw new Error(`${name}: ${error.message}`);
      }
    }
    if (Object.values(sample).every((value) => value === undefined)) throw new Error("Give one of them or more.");
    output.replaceChildren(...showAnswers(await answer(sample)));
  } catch (error) {
    output.textContent = error.message;
  } finally {
    button.disabled = false;
  }
});
document.body.dataset.ready = "yes";
