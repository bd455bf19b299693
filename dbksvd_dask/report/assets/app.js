// Which view is shown, the keys, the theme.

const tables = {};
const state = { view: '', item: -1, filter: 'all', atomQuery: '', sampleQuery: '' };

// -- theme --

const stored = { get: () => { try { return localStorage.getItem('dbksvd-theme'); } catch { return null; } },
  set: value => { try { localStorage.setItem('dbksvd-theme', value); } catch { /* a page from disk may not be allowed to keep it */ } } };
const preferred = window.matchMedia('(prefers-color-scheme: dark)');

function applyTheme(name) {
  document.documentElement.dataset.theme = name;
  if (state.view === 'overview') drawMap();
}

function toggleTheme() {
  const name = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
  stored.set(name);
  applyTheme(name);
}

applyTheme(stored.get() || (preferred.matches ? 'dark' : 'light'));
preferred.addEventListener('change', () => { if (!stored.get()) applyTheme(preferred.matches ? 'dark' : 'light'); });

// -- tables --

function refreshAtoms() {
  const table = tables.atoms;
  const ranked = Boolean(state.atomQuery.trim()) && table.sortKey === 'id';
  table.show(searchAtoms(state.atomQuery, FILTERS[state.filter][1]), ranked);
  byId('atoms-count').textContent = table.order.length === nAtoms() ? `${whole(nAtoms())} atoms` : `${whole(table.order.length)} of ${whole(nAtoms())} atoms`;
  for (const chip of byId('filters').children) chip.setAttribute('aria-pressed', String(chip.dataset.filter === state.filter));
}

function refreshSamples() {
  tables.samples.show(searchSamples(state.sampleQuery), false);
  byId('samples-count').textContent = `${whole(tables.samples.order.length)} of the ${whole(nShown())} samples on this page, out of ${whole(report.head.summary.n_samples)}`;
}

function makeTables() {
  tables.atoms = new Table(byId('atoms-table'), { columns: atomColumns(), rowHeight: hasExamples() ? 54 : 36, label: 'Atoms', open: j => { location.hash = `#atom/${j}`; } });
  tables.samples = new Table(byId('samples-table'), { columns: sampleColumns(), rowHeight: 36, label: 'Samples', open: p => { location.hash = `#sample/${sampleNumber(p)}`; } });
  tables.atoms.onsort = refreshAtoms;
  tables.samples.onsort = refreshSamples;
  tables.atoms.sortKey = 'id';
  tables.samples.sortKey = 'id';
  byId('filters').append(...Object.entries(FILTERS).map(([key, [name, keep]]) => {
    let n = 0;
    for (let j = 0; j < nAtoms(); j++) if (keep(j)) n++;
    return h('button', { type: 'button', 'data-filter': key, onclick: () => { state.filter = key; refreshAtoms(); } }, `${name} ${whole(n)}`);
  }));
}

// -- views --

function showView(name) {
  state.view = name;
  for (const view of document.querySelectorAll('.view')) view.hidden = view.id !== `view-${name}`;
  for (const link of document.querySelectorAll('nav a')) {
    const current = link.dataset.view === name || link.dataset.view === `${name}s`;
    if (current) link.setAttribute('aria-current', 'page'); else link.removeAttribute('aria-current');
  }
  const search = byId('search'), samples = name === 'samples' || name === 'sample';
  search.placeholder = samples ? 'Search samples' : 'Search atoms';
  if (document.activeElement !== search) search.value = samples ? state.sampleQuery : state.atomQuery;
}

function route() {
  const [name, number] = location.hash.slice(1).split('/');
  const item = Number.parseInt(number, 10);
  if (name === 'main') return;
  document.title = `${report.head.title} · dictionary report`;
  if (name === 'atom' && item >= 0 && item < nAtoms()) {
    const at = tables.atoms.order.indexOf(item);
    if (at >= 0) tables.atoms.cursor = at;
    state.item = item;
    showView('atom');
    showAtom(item);
    window.scrollTo(0, 0);
  } else if (name === 'sample' && placeOf(item) >= 0) {
    const at = tables.samples.order.indexOf(placeOf(item));
    if (at >= 0) tables.samples.cursor = at;
    state.item = placeOf(item);
    showView('sample');
    showSample(state.item);
    window.scrollTo(0, 0);
  } else if (name === 'atom' || name === 'sample') {
    showView(name);
    byId(`view-${name}`).replaceChildren(h('div', { class: 'card empty' }, name === 'atom' ? `There is no atom ${number}.`
      : `Sample ${number} is not on this page, which holds the samples that its lists lead to and some drawn at random.`));
  } else if (name === 'atoms' || name === 'samples') {
    showView(name);
    tables[name].move(tables[name].cursor);
  } else {
    showView('overview');
    drawMap();
  }
  document.documentElement.dataset.place = location.hash; // the address changes at once, the page only now
}

function onSearch() {
  const value = byId('search').value, samples = state.view === 'samples' || state.view === 'sample';
  if (samples) state.sampleQuery = value; else state.atomQuery = value;
  if (samples) refreshSamples(); else refreshAtoms();
  const wanted = samples ? '#samples' : '#atoms';
  if (location.hash !== wanted) location.hash = wanted;
}

// -- keys --

function step(by) {
  if (state.view === 'atoms' || state.view === 'samples') return tables[state.view].move(tables[state.view].cursor + by);
  const table = state.view === 'atom' ? tables.atoms : state.view === 'sample' ? tables.samples : null;
  if (!table) return undefined;
  const at = table.order.indexOf(state.item), next = table.order[at + by];
  if (at >= 0 && next !== undefined) location.hash = state.view === 'atom' ? `#atom/${next}` : `#sample/${sampleNumber(next)}`;
  return undefined;
}

const KEYS = {
  '/': () => byId('search').select(), o: () => { location.hash = '#overview'; }, a: () => { location.hash = '#atoms'; },
  s: () => { location.hash = '#samples'; }, t: toggleTheme, '?': () => byId('help').showModal(),
  r: () => { location.hash = `#atom/${Math.floor(Math.random() * nAtoms())}`; },
  j: () => step(1), k: () => step(-1),
  Escape: () => { if (state.view === 'atom' || state.view === 'sample') location.hash = `#${state.view}s`; },
};
const TABLE_KEYS = {
  ArrowDown: t => t.move(t.cursor + 1), ArrowUp: t => t.move(t.cursor - 1), Home: t => t.move(0), End: t => t.move(Infinity),
  PageDown: t => t.move(t.cursor + t.page), PageUp: t => t.move(t.cursor - t.page),
  Enter: t => { if (t.order.length) t.open(t.order[t.cursor]); },
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId('help').open) return;
  const table = tables[state.view], typing = event.target === byId('search');
  if (typing && event.key === 'Escape') { byId('search').blur(); event.preventDefault(); return; }
  if (typing && !['ArrowDown', 'ArrowUp', 'Enter', 'PageDown', 'PageUp'].includes(event.key)) return;
  if (event.key === 'Enter' && event.target.closest('a, button')) return;
  const act = table && TABLE_KEYS[event.key];
  if (act) act(table); else if (!typing && KEYS[event.key]) KEYS[event.key](); else return;
  event.preventDefault();
}

// a printer has no scroll bar: it gets the first rows, all drawn
function onPrint() { if (tables[state.view]) tables[state.view].draw(500); }

async function start() {
  await unpack(byId('data').textContent);
  byId('data').remove();
  byId('count-atoms').textContent = whole(nAtoms());
  byId('count-samples').textContent = whole(nShown());
  makeTables();
  refreshAtoms();
  refreshSamples();
  showOverview();
  listenToMap();
  byId('search').addEventListener('input', onSearch);
  byId('theme').addEventListener('click', toggleTheme);
  byId('help-open').addEventListener('click', () => byId('help').showModal());
  document.addEventListener('keydown', onKey);
  // in a frame of a notebook, a link to a place of the page would lead to the notebook
  document.addEventListener('click', event => {
    const link = event.target.closest('a[href^="#"]');
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    location.hash = link.getAttribute('href');
  });
  window.addEventListener('hashchange', route);
  window.addEventListener('resize', () => { if (tables[state.view]) tables[state.view].draw(); else if (state.view === 'overview') drawMap(); });
  window.addEventListener('beforeprint', onPrint);
  window.addEventListener('afterprint', () => { if (tables[state.view]) tables[state.view].draw(); });
  byId('status').remove();
  route();
  document.documentElement.dataset.ready = 'true';
}

start().catch(error => {
  byId('status').textContent = `The data of this page cannot be read: ${error.message}. A current browser is needed (2023 or later).`;
  throw error;
});
