// Data, numbers as text, and building of elements. Text of samples only ever becomes a text node.

const TYPES = { int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array,
  int32: Int32Array, uint32: Uint32Array, float32: Float32Array, float64: Float64Array };

const report = { head: null, arrays: {}, shapes: {} };

async function unpack(text) {
  const raw = atob(text.trim());
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const buffer = await new Response(stream).arrayBuffer();
  const length = Number(new DataView(buffer).getBigUint64(8, true));
  const content = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 16, length)));
  const base = 16 + Math.ceil(length / 8) * 8;
  report.head = content.head;
  for (const [name, a] of Object.entries(content.arrays)) {
    const size = a.shape.reduce((x, y) => x * y, 1);
    report.arrays[name] = new TYPES[a.type](buffer, base + a.offset, size);
    report.shapes[name] = a.shape;
  }
}

const array = name => report.arrays[name];
const width = name => report.shapes[name][1];
const row = (name, i) => array(name).subarray(i * width(name), (i + 1) * width(name));
const nAtoms = () => report.head.summary.n_atoms;
const nShown = () => array('sample').length;

// element: h('a', {href: '#', class: 'x'}, 'text', child)
function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'style') for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat().filter(c => c !== null && c !== undefined));
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const byId = id => document.getElementById(id);

// -- numbers --

const integers = new Intl.NumberFormat('en-GB');
const whole = x => (x === null || x === undefined ? '–' : integers.format(x));

function digits(x, n = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return '–';
  if (x === 0) return '0';
  const size = Math.abs(x);
  if (size >= 1e5 || size < 1e-4) return x.toExponential(n - 1).replace('-', '−').replace('e−', 'e-');
  return x.toPrecision(n).replace('-', '−');
}

function percent(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return '–';
  if (x === 0) return '0 %';
  const p = 100 * x;
  return (p >= 10 ? p.toFixed(0) : p >= 1 ? p.toFixed(1) : p >= 0.01 ? p.toFixed(2) : p.toPrecision(1)) + ' %';
}

// -- atoms --

const density = j => array('active')[j] / report.head.summary.n_samples;
const balance = j => (array('active')[j] ? array('positive')[j] / array('active')[j] : NaN);
const score = j => (report.head.scores && report.head.scores[j] !== undefined ? report.head.scores[j] : null);
const explanation = j => (report.head.explanations && report.head.explanations[j]) || '';
const keywords = j => (report.head.keywords ? report.head.keywords[j] : '');
const isDead = j => array('active')[j] === 0;
const atomsHaveNames = () => Boolean(report.head.keywords || report.head.explanations);
const atomName = j => explanation(j) || keywords(j);
const className = c => (report.head.classes && c >= 0 ? report.head.classes[c] : '');
const topClass = j => (array('class') ? row('class', j)[0] : -1);

const atomLink = j => h('a', { href: `#atom/${j}` }, String(j));

// a number with a bar: how much of `most` it is, and its sign by colour
function valueBar(x, most, text = digits(x)) {
  const part = most > 0 ? Math.min(1, Math.abs(x) / most) : 0;
  const style = { '--part': `${(100 * part).toFixed(1)}%`, '--color': x < 0 ? 'var(--orange)' : 'var(--blue)' };
  return h('div', { class: 'value', style }, h('i'), h('span', {}, text));
}

// -- samples --

const sampleNumber = p => array('sample')[p];

function placeOf(number) {
  const numbers = array('sample');
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < number) low = middle + 1; else high = middle;
  }
  return numbers[low] === number ? low : -1;
}

// the token that is the sample, in lower case; empty for a whole text
function sampleToken(p) {
  if (report.head.kind !== 'token') return '';
  return sampleText(p).slice(array('sample_start')[p], array('sample_end')[p]).toLowerCase();
}

function sampleText(p) {
  const texts = report.head.texts;
  if (!texts) return '';
  return report.head.kind === 'token' ? texts[array('sample_text')[p]] : texts[p];
}
