// A glimpse of an atom's samples for its row of the table, and the tokens of one text that lead to each other.

const narrow = window.matchMedia('(max-width: 640px)');

// characters start to end without the blanks at their beginning: a token often has the blank before its word
function withoutBlanks(text, start, end) {
  let from = start;
  while (from < end && /\s/.test(text[from])) from++;
  return from < end ? [from, end] : [start, end];
}

// the piece of a text around characters start to end, which are marked; what is before them leaves room for them
function glimpse(text, first, end, reach = 190) {
  const [start] = withoutBlanks(text, first, end), room = narrow.matches ? 14 : 44, flat = s => s.replace(/\s+/g, ' ');
  let from = Math.max(0, start - room);
  const blank = text.indexOf(' ', from);
  if (from > 0 && blank >= 0 && blank < start) from = blank + 1;
  return [from > 0 ? '… ' : '', flat(text.slice(from, start)), end > start ? h('mark', {}, flat(text.slice(start, end))) : '',
    flat(text.slice(end, end + reach)), end + reach < text.length ? '…' : ''];
}

// where the first of some words stands in a text
function wordPlace(text, words) {
  const lower = text.toLowerCase();
  for (const word of words) {
    const at = lower.indexOf(word);
    if (at >= 0 && lower.length === text.length) return [at, at + word.length];
  }
  return null;
}

const queryWords = () => state.atomQuery.toLowerCase().split(/\s+/).filter(Boolean);

// one line of the strongest sample of an atom; while searching, of the strongest that matches, with the match marked
function exampleLine(j) {
  const places = Array.from(row('strongest_sample', j)).filter(p => p >= 0);
  if (!places.length) return null;
  const words = queryWords(), matching = places.find(p => words.length && words.every(w => sampleText(p).toLowerCase().includes(w)));
  const p = matching === undefined ? places[0] : matching, text = sampleText(p);
  const own = report.head.kind === 'token' ? [array('sample_start')[p], array('sample_end')[p]] : [0, 0];
  const token = text.slice(...own).toLowerCase();
  const found = matching === undefined || words.some(w => token.includes(w)) ? null : wordPlace(text, words);
  const [start, end] = found || own;
  return h('span', { class: 'example text' }, glimpse(text, start, end));
}

// the name of an atom, with an example below it where there are texts
function nameCell(j) {
  if (isDead(j)) return h('span', { class: 'dead' }, 'never active');
  const named = h('span', { class: 'name' }, atomName(j));
  return hasExamples() ? [named, exampleLine(j)] : named;
}

const hasExamples = () => Boolean(report.head.texts && array('strongest_sample'));

// -- the other tokens of a text --

let textTokens = null;

// samples of the page by the text they are tokens of
function tokensOf(source) {
  if (!textTokens) {
    textTokens = new Map();
    array('sample_source').forEach((s, p) => { if (textTokens.has(s)) textTokens.get(s).push(p); else textTokens.set(s, [p]); });
  }
  return textTokens.get(source);
}

// the text of a token in which those that are on this page are links
function linkedText(p) {
  const text = sampleText(p), parts = [], shift = array('sample_shift')[p];
  let at = 0;
  for (const other of tokensOf(array('sample_source')[p])) {
    const move = array('sample_shift')[other] - shift;
    const [start, end] = withoutBlanks(text, array('sample_start')[other] + move, array('sample_end')[other] + move);
    if (start < at || end > text.length || end <= start) continue;
    parts.push(text.slice(at, start), other === p ? h('mark', {}, text.slice(start, end)) : tokenLink(other, text.slice(start, end)));
    at = end;
  }
  parts.push(text.slice(at));
  return parts;
}

function tokenLink(p, text) {
  const first = row('sample_atom', p)[0];
  const title = first < 0 ? '' : `sample ${sampleNumber(p)}; strongest atom ${first} ${atomName(first)}`;
  return h('a', { class: 'token', href: `#sample/${sampleNumber(p)}`, title }, text);
}
