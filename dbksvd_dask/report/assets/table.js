// A table that draws only the rows in sight, so that 65,536 rows scroll like 16.

const cellClass = column => [column.number ? 'num' : '', column.phone ? '' : 'wide-only'].join(' ').trim() || null;

class Table {
  // columns: {key, title, width, number, value(i), cell(i), hint, phone}; a phone shows only those with a width `phone`
  constructor(host, { columns, rowHeight, open, label }) {
    Object.assign(this, { host, columns, rowHeight, open });
    this.order = [];
    this.sortKey = null;
    this.descending = false;
    this.cursor = 0;
    this.grid = { '--grid': columns.map(c => c.width).join(' '), '--grid-phone': columns.filter(c => c.phone).map(c => c.phone).join(' ') };
    this.head = h('div', { class: 'thead', role: 'row', style: this.grid },
      columns.map(c => this.headCell(c)));
    this.rows = h('div', { class: 'rows', role: 'rowgroup' });
    this.body = h('div', { class: 'tbody', tabindex: '0', role: 'presentation' }, this.rows);
    this.body.addEventListener('scroll', () => this.draw(), { passive: true });
    host.setAttribute('role', 'grid');
    host.setAttribute('aria-label', label);
    host.append(this.head, this.body);
  }

  headCell(column) {
    const button = h('button', { type: 'button', title: column.hint, onclick: () => this.sortBy(column.key) }, column.title);
    return h('div', { class: cellClass(column), role: 'columnheader', 'data-key': column.key }, button);
  }

  sortBy(key, descending) {
    const column = this.columns.find(c => c.key === key);
    if (descending === undefined) descending = this.sortKey === key ? !this.descending : Boolean(column.number) && key !== 'id';
    this.sortKey = key;
    this.descending = descending;
    this.onsort();
  }

  // rows to show, before sorting
  show(rows, ranked) {
    this.order = rows;
    if (this.sortKey && !ranked) this.sort();
    for (const cell of this.head.children) {
      const sorted = cell.dataset.key === this.sortKey && !ranked;
      cell.setAttribute('aria-sort', sorted ? (this.descending ? 'descending' : 'ascending') : 'none');
    }
    this.host.setAttribute('aria-rowcount', this.order.length + 1);
    this.rows.style.height = `${this.order.length * this.rowHeight}px`;
    this.cursor = 0;
    this.body.scrollTop = 0;
    this.draw();
  }

  // absent values (null, NaN, '') come last either way
  sort() {
    const { value } = this.columns.find(c => c.key === this.sortKey);
    const sign = this.descending ? -1 : 1;
    const keys = new Map(this.order.map(i => [i, value(i)]));
    const absent = x => x === null || x === '' || Number.isNaN(x);
    this.order = [...this.order].sort((a, b) => {
      const x = keys.get(a), y = keys.get(b);
      if (absent(x) || absent(y)) return absent(x) - absent(y) || a - b;
      return (x < y ? -sign : x > y ? sign : 0) || a - b;
    });
  }

  draw(all = false) {
    const { scrollTop, clientHeight } = this.body;
    const first = all ? 0 : Math.max(0, Math.floor(scrollTop / this.rowHeight) - 4);
    const last = Math.min(this.order.length, all ? all : Math.ceil((scrollTop + clientHeight) / this.rowHeight) + 4);
    const drawn = [];
    for (let at = first; at < last; at++) drawn.push(this.row(at));
    if (!this.order.length) drawn.push(h('div', { class: 'empty' }, 'Nothing matches.'));
    this.rows.replaceChildren(...drawn);
  }

  row(at) {
    const i = this.order[at];
    return h('div', { class: 'row', role: 'row', 'aria-rowindex': at + 2, 'aria-selected': String(at === this.cursor),
      'data-item': i, style: { top: `${at * this.rowHeight}px`, height: `${this.rowHeight}px`, ...this.grid },
      onclick: event => { if (!event.target.closest('a')) { this.cursor = at; this.open(i); } } },
    this.columns.map(c => h('div', { class: cellClass(c), role: 'gridcell' }, c.cell(i))));
  }

  move(to) {
    if (!this.order.length) return;
    this.cursor = Math.max(0, Math.min(this.order.length - 1, to));
    const top = this.cursor * this.rowHeight, { scrollTop, clientHeight } = this.body;
    if (top < scrollTop) this.body.scrollTop = top;
    else if (top + this.rowHeight > scrollTop + clientHeight) this.body.scrollTop = top + this.rowHeight - clientHeight;
    this.draw();
  }

  get page() { return Math.max(1, Math.floor(this.body.clientHeight / this.rowHeight) - 1); }
}

// -- the atoms --

const meter = (part, kind) => h('span', { class: `meter ${kind || ''}` }, h('i', { style: { width: `${100 * part}%` } }));

function atomColumns() {
  const rare = Math.log10(report.head.summary.n_samples);
  const columns = [
    { key: 'id', title: 'Atom', width: '52px', number: true, phone: '46px', value: j => j, cell: j => atomLink(j) },
    hasTiles() && { key: 'tile', title: '', width: '34px', phone: '34px', value: j => j, cell: j => tile(j, 32) },
    hasPictures() && { key: 'samples', title: 'Strongest samples', width: '320px', phone: atomsHaveNames() ? null : 'minmax(0, 1fr)', value: j => j, cell: j => h('span', { class: 'strip' }, strongestStrip(j, 10, 28)) },
    { key: 'name', title: !atomsHaveNames() ? '' : report.head.explanations ? 'Explanation or keywords' : 'Keywords', width: 'minmax(0, 1fr)',
      value: j => atomName(j).toLowerCase(), hint: 'Explanation, or the words that set its strongest samples apart',
      phone: hasPictures() && !atomsHaveNames() ? null : 'minmax(0, 1fr)', cell: nameCell },
    report.head.classes && { key: 'class', title: 'Class', width: '124px', value: j => className(topClass(j)),
      hint: 'The class that is most over-represented among its samples', cell: j => className(topClass(j)) },
    report.head.scores && { key: 'score', title: 'Score', width: '64px', number: true, value: score, cell: j => digits(score(j), 2),
      hint: 'How well the explanation predicts the activation (rank correlation)' },
    { key: 'density', title: 'Density', width: '112px', number: true, phone: '52px', value: density, hint: 'Share of samples on which it is active',
      cell: j => [percent(density(j)), meter(isDead(j) ? 0 : 1 + Math.log10(density(j)) / rare)] },
    { key: 'mean', title: 'Mean', width: '70px', number: true, value: j => (isDead(j) ? NaN : array('mean')[j]),
      cell: j => (isDead(j) ? '–' : digits(array('mean')[j])), hint: 'Mean of its nonzero coefficients' },
    { key: 'largest', title: 'Largest', width: '70px', number: true, value: j => (isDead(j) ? NaN : array('largest')[j]),
      cell: j => (isDead(j) ? '–' : digits(array('largest')[j])), hint: 'Largest absolute coefficient' },
    { key: 'balance', title: 'Positive', width: '106px', number: true, value: balance, hint: 'Share of its coefficients that are positive',
      cell: j => [percent(balance(j)), isDead(j) ? meter(0, 'off') : meter(balance(j), 'split')] },
    { key: 'coherence', title: 'Coherence', width: '76px', number: true, value: j => array('coherence')[j],
      cell: j => digits(array('coherence')[j]), hint: 'Largest absolute cosine to another atom' },
    array('neighbour').length && { key: 'nearest', title: 'Nearest', width: '66px', number: true, value: j => row('neighbour', j)[0],
      cell: j => atomLink(row('neighbour', j)[0]), hint: 'The atom that gives the coherence' },
  ];
  return columns.filter(Boolean);
}

const FILTERS = {
  all: ['All', () => true],
  dead: ['Dead', isDead],
  dense: ['Over-dense', j => density(j) > report.head.summary.over_dense],
  near: ['Near-duplicates', j => array('coherence')[j] > report.head.summary.duplicate_threshold],
  mixed: ['Both signs', j => balance(j) > 0.1 && balance(j) < 0.9],
};

// -- searching --

let nameIndex = null, textIndex = null;

function buildNames() {
  nameIndex = Array.from({ length: nAtoms() }, (_, j) => {
    const name = [explanation(j), keywords(j), className(topClass(j))].join(' ').toLowerCase();
    return { name, words: new Set(name.match(/[\p{L}\p{N}]+/gu)) };
  });
}

function buildTexts() {
  textIndex = Array.from({ length: nAtoms() }, (_, j) => (report.head.texts && array('strongest_sample')
    ? Array.from(row('strongest_sample', j)).filter(p => p >= 0).map(p => ({ text: sampleText(p).toLowerCase(), token: sampleToken(p) })) : []));
}

// how an atom matches: whole words of its name, then tokens, then texts of its strongest samples that have every word
function matchOf(j, words) {
  const has = text => words.every(w => text.includes(w));
  const whole = words.every(w => nameIndex[j].words.has(w));
  const tokens = textIndex[j].filter(t => has(t.token)).length, texts = textIndex[j].filter(t => has(t.text)).length;
  return whole || texts || has(nameIndex[j].name) ? { j, whole, tokens, texts } : null;
}

// atoms that match, best first; report/searching.py has the same order
function searchAtoms(query, keep) {
  const rows = [];
  for (let j = 0; j < nAtoms(); j++) if (keep(j)) rows.push(j);
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return rows;
  if (!nameIndex) buildNames();
  if (!textIndex) buildTexts();
  const number = words.length === 1 ? words[0].replace(/^#/, '') : '';
  const found = rows.map(j => matchOf(j, words)).filter(m => m && String(m.j) !== number);
  found.sort((a, b) => b.whole - a.whole || b.tokens - a.tokens || b.texts - a.texts || a.j - b.j);
  return [...rows.filter(j => String(j) === number), ...found.map(m => m.j)];
}

function searchSamples(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = Array.from({ length: nShown() }, (_, p) => p);
  if (!words.length) return rows;
  const label = p => (array('sample_class') ? className(array('sample_class')[p]).toLowerCase() : '');
  return rows.filter(p => words.every(w => sampleText(p).toLowerCase().includes(w) || label(p).includes(w)
    || String(sampleNumber(p)) === w));
}
