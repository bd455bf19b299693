// The page of an atom.

function showAtom(j) {
  const view = byId('view-atom');
  const title = atomName(j) ? `Atom ${j}: ${atomName(j)}` : `Atom ${j}`;
  document.title = `${title} · ${report.head.title}`;
  view.replaceChildren(atomHead(j), h('div', { class: 'columns' },
    h('div', { class: 'stack' }, heatCard(j), ...sampleCards(j)),
    h('div', { class: 'stack' }, numbersCard(j), histogramCard(j), ...logitCards(j), positionCard(j), neighbourCard(j), partnerCard(j), classCard(j))));
}

function atomHead(j) {
  const step = (to, text, key) => h('button', { type: 'button', title: key, disabled: to === null,
    onclick: () => { location.hash = `#atom/${to}`; } }, text);
  const [before, after] = neighboursInTable(j);
  const words = explanation(j) && keywords(j) ? h('p', { class: 'note explained' }, `keywords: ${keywords(j)}`) : null;
  const rated = score(j) === null ? null : h('span', { class: 'score' }, `  score ${digits(score(j), 2)}`);
  return h('div', { class: 'atom-head' },
    h('div', {}, h('div', { class: 'note' }, h('a', { href: '#atoms' }, 'Atoms'), ` / ${j}`),
      h('div', { class: 'atom-picture' }, hasTiles() ? tile(j, 96) : null,
        h('div', {}, h('h1', {}, atomName(j) || `Atom ${j}`, rated), words))),
    h('div', { class: 'steps' }, step(before, '← previous', 'k'), step(after, 'next →', 'j')));
}

// previous and next atom in the order of the table
function neighboursInTable(j) {
  const order = tables.atoms.order, at = order.indexOf(j);
  if (at < 0) return [j > 0 ? j - 1 : null, j + 1 < nAtoms() ? j + 1 : null];
  return [at > 0 ? order[at - 1] : null, at + 1 < order.length ? order[at + 1] : null];
}

function numbersCard(j) {
  const facts = [[whole(array('active')[j]), 'active samples'], [percent(density(j)), 'density'],
    [isDead(j) ? '–' : digits(array('mean')[j]), 'mean coefficient'], [isDead(j) ? '–' : digits(array('largest')[j]), 'largest |coefficient|'],
    [percent(balance(j)), 'positive'], [digits(array('coherence')[j]), 'coherence']];
  return h('div', { class: 'card numbers' }, facts.map(([value, name]) => h('div', {}, h('b', {}, value), h('span', {}, name))));
}

function histogramCard(j) {
  if (isDead(j)) return null;
  const counts = row('histogram', j), low = array('histogram_low')[j], high = array('histogram_high')[j];
  const most = Math.max(...counts), w = 320, hgt = 110, step = w / counts.length;
  const image = svg('svg', { class: 'histogram', viewBox: `0 0 ${w} ${hgt + 18}`, preserveAspectRatio: 'none', role: 'img',
    'aria-label': `Histogram of ${whole(array('active')[j])} coefficients from ${digits(low)} to ${digits(high)}` });
  counts.forEach((count, b) => {
    if (!count) return;
    const from = low + (high - low) * b / counts.length, size = Math.max(1.5, hgt * count / most);
    const bar = svg('rect', { x: b * step + 0.5, y: hgt - size, width: step - 1, height: size,
      fill: from < -1e-9 ? 'var(--orange)' : 'var(--blue)' });
    bar.append(svg('title', {}, `${digits(from)} to ${digits(low + (high - low) * (b + 1) / counts.length)}: ${whole(count)}`));
    image.append(bar);
  });
  image.append(svg('line', { x1: 0, x2: w, y1: hgt, y2: hgt, stroke: 'var(--line)' }));
  const ends = h('div', { class: 'note', style: { display: 'flex', 'justify-content': 'space-between', 'font-size': '12px' } },
    h('span', {}, digits(low, 2)), low < 0 && high > 0 ? h('span', {}, '0') : null, h('span', {}, digits(high, 2)));
  image.setAttribute('viewBox', `0 0 ${w} ${hgt + 1}`);
  return h('div', { class: 'card' }, h('h3', {}, 'Coefficients where it is active'), image, ends);
}

function linkList(title, note, items) {
  if (!items.length) return null;
  return h('div', { class: 'card' }, h('h3', { title: note }, title), h('ul', { class: `list links${hasTiles() ? ' seen' : ''}` }, items));
}

const linkItem = (j, bar, title) => h('li', { title }, h('span', {}, atomLink(j)),
  h('span', { title: atomName(j) }, hasTiles() ? h('span', { class: 'strip' }, h('a', { href: `#atom/${j}` }, tile(j, 32)), strongestStrip(j, 5, 24)) : atomName(j)), bar);

// the first of an atom's strongest samples, side by side
function strongestStrip(j, n, size) {
  if (!hasPictures()) return [];
  return Array.from(row('strongest_sample', j)).filter(p => p >= 0).slice(0, n).map(p => samplePicture(p, size));
}

function neighbourCard(j) {
  const near = Array.from(row('neighbour', j)), similarity = row('similarity', j);
  return linkList('Nearest atoms (cosine)', 'Largest absolute cosine; orange points the other way',
    near.map((l, i) => linkItem(l, valueBar(similarity[i], 1))));
}

function partnerCard(j) {
  const partner = row('partner', j), jaccard = row('jaccard', j), together = row('together', j);
  const items = [], most = jaccard[0];
  partner.forEach((l, i) => {
    if (l >= 0) items.push(linkItem(l, valueBar(jaccard[i], most), `${whole(together[i])} samples together`));
  });
  const n = report.head.summary.n_coactivation_samples;
  return linkList('Active together (Jaccard index)', `Samples with both atoms by samples with either, on ${whole(n)} samples`, items);
}

function classCard(j) {
  if (!array('class')) return null;
  const items = [];
  row('class', j).forEach((c, i) => {
    const share = row('class_share', j)[i];
    if (c >= 0 && share > 0) items.push(h('li', { title: `${percent(report.head.class_base[c])} of all samples` },
      h('span', { class: 'note' }, `×${digits(share / report.head.class_base[c], 2)}`), h('span', {}, className(c)), valueBar(share, 1, percent(share))));
  });
  return linkList('Classes of its samples', 'Share of the samples on which it is active, and how many times the share in all samples', items);
}

// -- its samples --

const LISTS = {
  strongest: j => `Strongest samples${report.head.one_per || ''}${array('mean')[j] < 0 ? '; this atom is mostly negative' : ''}`,
  typical: () => 'Drawn at random from each quarter of its activations',
  opposite: () => 'Strongest of the other sign',
};

function sampleCards(j) {
  if (isDead(j)) return [h('div', { class: 'card note' }, `This atom is active on none of the ${whole(report.head.summary.n_samples)} samples.`)];
  return Object.keys(LISTS).filter(name => report.head.lists.includes(name)).map(name => sampleCard(name, j));
}

function sampleCard(name, j) {
  const places = row(`${name}_sample`, j), values = row(`${name}_value`, j), n = places.length;
  const entries = [];
  places.forEach((p, i) => { if (p >= 0) entries.push([p, values[i], entryNumber(name, j * n + i)]); });
  if (!entries.length) return null;
  return h('div', { class: 'card', 'data-list': name }, h('h3', {}, LISTS[name](j)),
    name === 'typical' ? quarterGroups(j, entries) : sampleList(j, entries));
}

function sampleList(j, entries) {
  const most = array('largest')[j];
  return hasPictures()
    ? h('div', { class: 'gallery' }, entries.map(([p, value]) => h('a', { href: `#sample/${sampleNumber(p)}` }, samplePicture(p, 66), digits(value))))
    : h('ul', { class: 'list samples' }, entries.map(([p, value, e]) => h('li', {}, valueBar(value, most), textNode(p, e, most), label(p))));
}

const QUARTERS = ['Strongest quarter', 'Second quarter', 'Third quarter', 'Weakest quarter'];

// samples under the quarter of the atom's activations that they were drawn from
function quarterGroups(j, entries) {
  const edges = row('quarter', j);
  return h('div', hasPictures() ? { class: 'quarters' } : {}, QUARTERS.map((title, q) => {
    const low = edges[3 - q], high = edges[4 - q];
    const inside = entries.filter(([, value]) => (q === 0 || Math.abs(value) <= edges[4 - q]) && Math.abs(value) > low);
    return inside.length ? h('div', { 'data-quarter': q }, h('p', { class: 'note quarter' }, `${title}: ${digits(low)} to ${digits(high)}`), sampleList(j, inside)) : null;
  }));
}

// number of an entry of a list among all entries of all lists, in the order in which they were packed
function entryNumber(name, at) {
  let first = 0;
  for (const other of report.head.lists) {
    if (other === name) return first + at;
    first += array(`${other}_sample`).length;
  }
  return -1;
}

const label = p => (array('sample_class') ? h('span', { class: 'label' }, className(array('sample_class')[p])) : null);

// text of a sample with its token marked, and the other tokens on which the atom of entry e is active
function textNode(p, e, most) {
  const link = { href: `#sample/${sampleNumber(p)}` };
  if (!report.head.texts) return h('span', { class: 'text' }, h('a', link, `sample ${sampleNumber(p)}`));
  return h('span', { class: 'text' }, h('a', link, markedText(p, e, most)));
}

function markedText(p, e, most) {
  const text = sampleText(p);
  if (report.head.kind !== 'token') return [text];
  const own = [array('sample_start')[p], array('sample_end')[p]];
  const spans = [];
  if (e !== undefined && e >= 0 && array('context_offset')) {
    for (let i = array('context_offset')[e]; i < array('context_offset')[e + 1]; i++) {
      spans.push([array('context_start')[i], array('context_end')[i], array('context_value')[i]]);
    }
  }
  if (!spans.some(s => s[0] === own[0])) spans.push([...own, 0]);
  spans.sort((a, b) => a[0] - b[0]);
  const parts = [];
  let at = 0;
  for (const [first, end, value] of spans) {
    if (first < at) continue;
    const [start] = withoutBlanks(text, first, end);
    parts.push(text.slice(at, start), litToken(text.slice(start, end), value, most, first === own[0]));
    at = end;
  }
  parts.push(text.slice(at));
  return parts;
}

function litToken(text, value, most, own) {
  if (own) return h('mark', value ? { title: digits(value) } : {}, text);
  const strength = Math.round(12 + 48 * Math.min(1, Math.abs(value) / (most || 1)));
  const color = value < 0 ? 'var(--orange)' : 'var(--blue)';
  return h('span', { class: 'lit', title: digits(value), style: { background: `color-mix(in srgb, ${color} ${strength}%, transparent)` } }, text);
}

function heatCard(j) {
  if (!photos().length || isDead(j) || !array('photo_0_atom')) return null;
  return h('div', { class: 'card' }, h('h3', {}, 'Where it is active'), h('div', { class: 'photo-row' }, photos().map((_, n) => heatPhoto(n, j))));
}
