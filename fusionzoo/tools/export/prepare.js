// Raw values -> inputs of the graph, as preprocess.json says and example.py does.
// Each function returns {name: {type, data, dims}}, one row; a missing value gives any valid input.
import { Tokenizer } from "./packages/tokenizers.min.mjs";

const input = (type, data, dims) => ({ type, data, dims: [1, ...dims] });
const int64 = (values) => BigInt64Array.from(values, BigInt);

/** Round to the nearest whole number, a half to the even one, as Python does. */
export function round(x) {
  const low = Math.floor(x);
  return x - low === 0.5 ? low + (Math.abs(low) % 2) : Math.round(x);
}

// Pictures are {width, height, data}, data the red, green, blue of each pixel, row by row.

/** Decode a file, upright and on white. A browser reads only the upper 8 bits of a grey PNG of 16. */
async function decodePicture(file, range) {
  const head = new DataView(await file.slice(0, 26).arrayBuffer());
  const isDeep = head.byteLength === 26 && head.getUint32(0) === 0x89504e47 && head.getUint16(24) === 0x1000;
  if (isDeep && range && (range[0] !== 0 || range[1] !== 65535)) {
    throw new Error(`a browser cannot read 16 bits from ${range[0]} to ${range[1]}: save 8 bits of that range`);
  }
  const drawn = await createImageBitmap(file, { colorSpaceConversion: "none" });
  const { width, height } = drawn;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(drawn, 0, 0);
  const shades = context.getImageData(0, 0, width, height).data;
  return { width, height, data: shades.filter((_, place) => place % 4 !== 3) };
}

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
const FILTERS = { // Pillow's: [half of the width, weight at a distance]
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, (x) => (Math.abs(x) < 1 ? sinc(x) * (0.54 + 0.46 * Math.cos(Math.PI * x)) : 0)],
  bicubic: [2, (x) => cubic(Math.abs(x))],
  lanczos: [3, (x) => (Math.abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

function cubic(x) {
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
}

const ONE = 2 ** 22; // weights are whole numbers, as in Pillow

/** For each place of the new side: where its window begins, and the weights of the old places. */
function windows(oldSide, newSide, interpolation) {
  const scale = oldSide / newSide;
  if (interpolation === "nearest") {
    const centres = [scale / 2]; // added up, as in Pillow, so that both round a tie alike
    while (centres.length < newSide) centres.push(centres.at(-1) + scale);
    return centres.map((centre) => [Math.floor(centre), [ONE]]);
  }
  const places = Array.from({ length: newSide }, (_, place) => (place + 0.5) * scale);
  const [half, weight] = FILTERS[interpolation];
  const stretch = Math.max(scale, 1);
  return places.map((centre) => {
    const first = Math.max(0, Math.trunc(centre - half * stretch + 0.5));
    const last = Math.min(oldSide, Math.trunc(centre + half * stretch + 0.5));
    const weights = [];
    for (let x = first; x < last; x++) weights.push(weight((x - centre + 0.5) / stretch));
    const sum = weights.reduce((a, b) => a + b, 0);
    return [first, weights.map((x) => Math.round((x / sum) * ONE))];
  });
}

/** Change one side of a picture: `step` pixels lie between neighbours along it. */
function resizeSide(picture, along, side, interpolation) {
  if (picture[along] === side) return picture;
  const next = { ...picture, [along]: side };
  next.data = new Uint8ClampedArray(3 * next.width * next.height);
  const horizontal = along === "width";
  const step = horizontal ? 3 : 3 * picture.width;
  windows(picture[along], side, interpolation).forEach(([first, weights], place) => {
    const lines = horizontal ? picture.height : picture.width;
    for (let line = 0; line < lines; line++) {
      const start = horizontal ? 3 * line * picture.width : 3 * line;
      const end = horizontal ? 3 * (line * side + place) : 3 * (place * next.width + line);
      for (let shade = 0; shade < 3; shade++) {
        let sum = 0;
        weights.forEach((w, x) => (sum += w * picture.data[start + (first + x) * step + shade]));
        next.data[end + shade] = Math.floor((sum + ONE / 2) / ONE);
      }
    }
  });
  return next;
}

/** Resize as Pillow does: first the width, then the height, rounded in between. */
export function resize(picture, width, height, interpolation) {
  const wide = resizeSide(picture, "width", width, interpolation);
  return resizeSide(wide, "height", height, interpolation);
}

/** Put a picture into the middle of a white one. */
function pad(picture, width, height) {
  const data = new Uint8ClampedArray(3 * width * height).fill(255);
  const left = Math.floor((width - picture.width) / 2);
  const top = Math.floor((height - picture.height) / 2);
  for (let row = 0; row < picture.height; row++) {
    const from = 3 * row * picture.width;
    const line = picture.data.subarray(from, from + 3 * picture.width);
    data.set(line, 3 * ((top + row) * width + left));
  }
  return { width, height, data };
}

/** Bring a picture to the size of the input: (3, height, width) shades. */
export function fit(picture, by) {
  const [high, wide] = by.size;
  let [tall, broad] = by.resized;
  if (by.fit === "pad") {
    const scale = Math.max(picture.height / high, picture.width / wide);
    const [width, height] = [round(wide * scale), round(high * scale)];
    picture = pad(picture, Math.max(picture.width, width), Math.max(picture.height, height));
    [tall, broad] = [high, wide];
  } else if (by.fit === "crop" && tall === broad) {
    const [side, shorter] = [tall, Math.min(picture.width, picture.height)];
    tall = Math.trunc((side * picture.height) / shorter);
    broad = Math.trunc((side * picture.width) / shorter);
  } else if (by.fit === "crop") {
    const ratio = Math.min(picture.height / tall, picture.width / broad);
    tall = Math.max(tall, round(picture.height / ratio));
    broad = Math.max(broad, round(picture.width / ratio));
  }
  const resized = resize(picture, broad, tall, by.interpolation);
  const corner = by.rounds_down ? Math.floor : round;
  const [top, left] = [corner((tall - high) / 2), corner((broad - wide) / 2)];
  const shades = new Uint8Array(3 * high * wide);
  for (let place = 0; place < shades.length; place++) {
    const shade = Math.floor(place / (high * wide));
    const row = top + (Math.floor(place / wide) % high);
    shades[place] = resized.data[3 * (row * broad + left + (place % wide)) + shade];
  }
  return shades;
}

async function image(file, by) {
  const blank = { width: 8, height: 8, data: new Uint8ClampedArray(192).fill(255) };
  const picture = file === undefined ? blank : await decodePicture(file, by.range);
  return { pixels: input("uint8", fit(picture, by), [3, ...by.size]) };
}

const RATE = 48000; // at which a sound is decoded whose own rate is not found

/** Find the rate of a WAV, FLAC or Ogg Vorbis file, in samples per second: a browser tells none. */
export function rateOf(buffer) {
  const bytes = new DataView(buffer, 0, Math.min(buffer.byteLength, 4096));
  const text = String.fromCharCode(...new Uint8Array(buffer, 0, bytes.byteLength));
  const place = (mark, start) => (text.startsWith(start) ? text.indexOf(mark) : -1);
  const [wav, vorbis] = [place("fmt ", "RIFF"), place("\x01vorbis", "OggS")];
  if (wav >= 0) return bytes.getUint32(wav + 12, true);
  if (vorbis >= 0) return bytes.getUint32(vorbis + 12, true);
  return text.startsWith("fLaC") ? bytes.getUint32(18) >>> 12 : RATE;
}

const divisor = (a, b) => (b ? divisor(b, a % b) : a);

/** Resample by a windowed sinc, as fusionzoo and torchaudio do: a filter for each place of a period. */
export function resample(sound, rate, by) {
  const common = divisor(rate, by.rate);
  const [before, after, edge] = [rate / common, by.rate / common, by.zero_crossings];
  if (before === after) return sound;
  const cutoff = by.roll_off * Math.min(before, after);
  const margin = Math.ceil((edge * before) / cutoff);
  const filters = Array.from({ length: after }, (_, place) =>
    Array.from({ length: 2 * margin + before }, (_, tap) => {
      const time = ((tap - margin) / before - place / after) * cutoff;
      const near = Math.min(edge, Math.max(-edge, time));
      return (sinc(near) * Math.cos((near * Math.PI) / edge / 2) ** 2 * cutoff) / before;
    }),
  );
  return Float64Array.from({ length: Math.ceil((sound.length * after) / before) }, (_, place) => {
    const first = Math.floor(place / after) * before - margin;
    return filters[place % after].reduce((sum, x, tap) => sum + x * (sound[first + tap] ?? 0), 0);
  });
}

/** Decode a file: the mean of its channels, at the encoder's rate. */
async function decodeSound(file, by) {
  const buffer = await file.arrayBuffer();
  const rate = rateOf(buffer);
  const decoded = await new OfflineAudioContext(1, 1, rate).decodeAudioData(buffer);
  const sound = new Float64Array(decoded.length);
  for (let channel = 0; channel < decoded.numberOfChannels; channel++) {
    decoded.getChannelData(channel).forEach((x, place) => (sound[place] += x));
  }
  return resample(sound.map((x) => x / decoded.numberOfChannels), rate, by);
}

async function wave(file, by) {
  let sound = file === undefined ? new Float64Array(1) : await decodeSound(file, by);
  const first = Math.floor(Math.max(0, sound.length - by.most) / 2);
  sound = sound.subarray(first, first + by.most);
  const stored = new Int16Array(Math.max(1, round(by.least * by.rate), sound.length));
  sound.forEach((x, place) => (stored[place] = round(Math.min(1, Math.max(-1, x)) * by.peak)));
  const lengths = input("int64", int64([stored.length]), []);
  return { wave: input("int16", stored, [stored.length]), lengths };
}

function tokens(ids) {
  const mask = input("bool", new Uint8Array(ids.length).fill(1), [ids.length]);
  return { input_ids: input("int64", int64(ids), [ids.length]), attention_mask: mask };
}

function composed(text = "") {
  if (typeof text !== "string" || !text.isWellFormed()) throw new Error(`${JSON.stringify(text)?.slice(0, 60)} is not text`);
  return text.normalize("NFC");
}

async function bytes(text, by) {
  return tokens([by.start, ...new TextEncoder().encode(composed(text))].slice(0, by.max_length));
}

const readers = {}; // file -> Tokenizer

async function tokenizer(text, by) {
  readers[by.file] ??= new Tokenizer(await (await fetch(by.file)).json(), {});
  const line = by.prompt + composed(text);
  return tokens(encode(readers[by.file], by.lower_case ? line.toLowerCase() : line, by));
}

/** Encode a text; a long one loses its end, and keeps what the tokenizer puts around texts. */
export function encode(reader, line, by) {
  const { ids } = reader.encode(line);
  const over = ids.length - by.max_length;
  if (over > 0) {
    const own = reader.encode(line, { add_special_tokens: false }).ids;
    const around = ids.length - own.length;
    const before = Array.from({ length: around + 1 }, (_, first) => first).find((first) =>
      own.every((id, place) => ids[first + place] === id),
    );
    ids.splice(before + own.length - over, over);
  }
  return ids.length ? ids : [by.pad_id];
}

const DECIMAL = /^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$/;

/** Check a row of `width` finite numbers; text that is a number is one. */
function numbers(row, width) {
  const isNumber = (x) => ["number", "boolean"].includes(typeof x) || (typeof x === "string" && DECIMAL.test(x.trim()));
  const isRow = Array.isArray(row) || ArrayBuffer.isView(row);
  if (!isRow || row.length !== width || !Array.from(row).every((x) => isNumber(x) && Number.isFinite(Number(x)))) {
    throw new Error(`expected ${width} finite numbers, got ${JSON.stringify(row)?.slice(0, 60)}`);
  }
  return Array.from(row, Number);
}

async function vector(values, by) {
  return { values: input("float32", Float32Array.from(numbers(values ?? Array(by.width).fill(0), by.width)), [by.width]) };
}

async function sequence(steps, by) {
  if (steps != null && !(Array.isArray(steps) && steps.length)) throw new Error(`expected rows of ${by.width} numbers`);
  const kept = (steps ?? [Array(by.width).fill(0)]).map((row) => numbers(row, by.width)).slice(0, by.max_length);
  const values = input("float32", Float32Array.from(kept.flat()), [kept.length, by.width]);
  return { values, lengths: input("int64", int64([kept.length]), []) };
}

const fold = (name) => name.normalize("NFC").trim().toLowerCase();
const whole = (pattern) => new RegExp(`^(?:${pattern})$`);

/** Read a cell: a number, text without spaces around it, or null for an empty one. */
function cellOf(value, by) {
  if (typeof value === "boolean") return String(value);
  if (typeof value === "string") return ["", ...by.missing].includes(value.trim()) ? null : value.trim();
  if (value != null && typeof value !== "number") throw new Error(`a ${typeof value} is neither a number nor text`);
  return value == null || Number.isNaN(value) ? null : value;
}

const withPoint = (text, by) => (by.comma ? text.replace(new RegExp(by.comma), "$1.$2") : text);

function number(cell, how, by) {
  let plain = String(cell);
  const match = how.pattern && plain.match(whole(how.pattern));
  if (match) plain = match.slice(1).find((x) => x !== undefined);
  if (match && whole(how.thousands).test(plain)) plain = plain.replace(new RegExp(how.between, "g"), "");
  plain = withPoint(plain, by);
  if (!whole(by.number).test(plain) || !Number.isFinite(Number(plain))) {
    throw new Error(`column ${how.name}: ${JSON.stringify(cell)} is not a number of this model`);
  }
  return Number(plain);
}

function category(cell, by) {
  if (typeof cell !== "string") return String(cell);
  const text = withPoint(cell, by).normalize("NFC").replace(/^(-?[0-9]+)\.0+$/, "$1");
  return ["true", "false"].includes(text.toLowerCase()) ? text.toLowerCase() : text;
}

const DAY = 86400;

/** Read a date: [year, days since 1970, month, weekday, hour]. */
function date(cell, how) {
  const refused = new Error(`column ${how.name}: ${JSON.stringify(cell)} is no date of this model`);
  const [match, names] = how.patterns.map(([pattern, names]) => [String(cell).match(whole(pattern)), names]).find(([x]) => x) ?? [];
  if (!match) throw refused;
  const read = Object.fromEntries(names.map((name, place) => [name, match[place + 1] ?? "0"]));
  let seconds = (Number(read.serial) - 25569) * DAY; // of a spreadsheet
  if (!("serial" in read)) {
    const year = Number(read.year) + (read.year.length === 2 ? (Number(read.year) >= 70 ? 1900 : 2000) : 0);
    const midnight = new Date(0);
    midnight.setUTCFullYear(year, Number(read.month) - 1, Number(read.day));
    if (!year || midnight.getUTCMonth() !== read.month - 1 || midnight.getUTCDate() !== Number(read.day)) throw refused;
    const west = (read.ahead ?? "").startsWith("-") ? -1 : 1;
    const ahead = how.timed ? 3600 * (read.ahead ?? 0) + 60 * west * (read.minutes_ahead ?? 0) : 0;
    const clock = how.clock.reduce((sum, name, place) => sum + read[name].replace(",", ".") * 60 ** (2 - place), 0);
    seconds = midnight / 1000 + clock - ahead;
  } else if (!(read.serial >= 1 && read.serial <= 2958465)) throw refused;
  seconds = Math.round(1000 * seconds) / 1000;
  const days = Math.floor(seconds / DAY);
  const on = new Date(1000 * DAY * days);
  if (!(on.getUTCFullYear() >= 1 && on.getUTCFullYear() <= 9999)) throw refused; // by its offset
  return [on.getUTCFullYear(), days, String(on.getUTCMonth() + 1), how.weekdays[(on.getUTCDay() + 6) % 7], (seconds - days * DAY) / 3600];
}

/** Read a row of a table: {folded column of the model: cell}. */
function rowOf(cells, by, hows) {
  const row = {};
  for (const [name, value] of Object.entries(cells)) {
    const [cell, how] = [cellOf(value, by), hows[fold(name)] ?? {}];
    const parts = how.parts && cell !== null ? date(cell, how) : [];
    const read = how.parts ? how.parts.map((part, place) => [`${fold(name)} ${part}`, parts[place] ?? null]) : [[fold(name), cell]];
    for (const [key, x] of read) {
      if (key in row) throw new Error(`column ${name} is there twice`);
      row[key] = x;
    }
  }
  const known = by.columns.map(({ name }) => fold(name));
  const odd = [...known.filter((name) => !(name in row)), ...Object.keys(row).filter((name) => !known.includes(name))];
  if (odd.length) throw new Error(`columns that are missing, or not of this model: ${odd.join(", ")}`);
  return row;
}

async function tabular(cells, by) {
  if (cells != null && (typeof cells !== "object" || Array.isArray(cells))) throw new Error("give the cells by column");
  const hows = Object.fromEntries(by.cells.map((how) => [fold(how.name), how]));
  const row = rowOf(cells ?? Object.fromEntries(by.cells.map(({ name }) => [name, null])), by, hows);
  const [values, codes, known] = [[], [], []];
  for (const column of by.columns) {
    const cell = row[fold(column.name)];
    const isNumber = cell !== null && "mean" in column;
    const scaled = isNumber ? (number(cell, hows[fold(column.name)] ?? column, by) - column.mean) / column.std : 0;
    values.push(Math.min(100, Math.max(-100, scaled)));
    const place = cell === null ? -1 : (column.values?.indexOf(category(cell, by)) ?? -2);
    codes.push("mean" in column ? 0 : cell === null ? 1 : place < 0 ? 0 : place + 2);
    known.push(Number(cell !== null));
  }
  const dims = [by.columns.length];
  return {
    values: input("float32", Float32Array.from(values), dims),
    codes: input("int64", int64(codes), dims),
    known: input("bool", Uint8Array.from(known), dims),
  };
}

const PREPARE = { image, wave, bytes, tokenizer, vector, sequence, tabular };

/** Prepare one sample, {modality: raw value}: the graph's inputs, {"present": ..., "image.pixels": ...}. */
export async function prepare(sample, modalities) {
  const names = Object.keys(modalities);
  const odd = Object.keys(sample).filter((name) => !names.includes(name));
  if (odd.length) throw new Error(`the model reads ${names.join(", ")}, not ${odd.join(", ")}`);
  const [inputs, present] = [{}, []];
  for (const name of names) {
    const by = modalities[name].processor;
    const value = sample[name] ?? undefined;
    const prepared = await PREPARE[by.by](value, by).catch((error) => {
      throw new Error(`${name}: ${error.message}`);
    });
    present.push(Number(value !== undefined && (prepared.known?.data.some(Boolean) ?? true)));
    for (const key of Object.keys(prepared)) inputs[`${name}.${key}`] = prepared[key];
  }
  inputs.present = input("bool", Uint8Array.from(present), [names.length]);
  return inputs;
}
