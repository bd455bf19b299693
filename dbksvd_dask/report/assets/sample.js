// The page of a sample, and the table of samples.

function sampleColumns() {
  const columns = [
    { key: 'id', title: 'Sample', width: '76px', number: true, phone: '54px', value: p => p, cell: p => h('a', { href: `#sample/${sampleNumber(p)}` }, String(sampleNumber(p))) },
    hasPictures() && { key: 'picture', title: '', width: '34px', phone: '34px', value: p => p, cell: p => samplePicture(p, 32) },
    { key: 'text', title: hasPictures() ? '' : 'Text', width: 'minmax(0, 1fr)', phone: 'minmax(0, 1fr)', value: p => sampleText(p).toLowerCase(),
      cell: p => h('span', { class: 'text' }, report.head.kind === 'token' ? glimpse(sampleText(p), array('sample_start')[p], array('sample_end')[p]) : sampleText(p)) },
    array('sample_class') && { key: 'class', title: 'Class', width: '150px', value: p => className(array('sample_class')[p]), cell: p => label(p) },
    { key: 'l0', title: 'Active', width: '64px', number: true, value: p => array('sample_l0')[p], cell: p => whole(array('sample_l0')[p]), hint: 'Active atoms' },
    { key: 'first', title: 'Strongest', width: '80px', number: true, value: p => row('sample_atom', p)[0],
      cell: p => (row('sample_atom', p)[0] < 0 ? '–' : atomLink(row('sample_atom', p)[0])), hint: 'Its strongest atom' },
    { key: 'value', title: 'Coefficient', width: '120px', number: true, value: p => Math.abs(row('sample_value', p)[0]),
      cell: p => digits(row('sample_value', p)[0]), hint: 'Coefficient of its strongest atom; sorted by size' },
  ];
  return columns.filter(Boolean);
}

function showSample(p) {
  document.title = `Sample ${sampleNumber(p)} · ${report.head.title}`;
  const atoms = row('sample_atom', p), values = row('sample_value', p), most = Math.abs(values[0]);
  const items = [];
  atoms.forEach((j, i) => { if (j >= 0) items.push(linkItem(j, valueBar(values[i], most))); });
  const rest = array('sample_l0')[p] - items.length;
  const found = array('sample_photo') ? array('sample_photo')[p] : -1;
  byId('view-sample').replaceChildren(
    h('div', { class: 'atom-head' },
      h('div', {}, h('div', { class: 'note' }, h('a', { href: '#samples' }, 'Samples'), ` / ${sampleNumber(p)}`),
        h('h1', {}, `Sample ${sampleNumber(p)} `, label(p))),
      sampleSteps(p)),
    h('div', { class: hasPictures() ? 'columns' : 'stack wide' },
      h('div', { class: 'stack' }, h('div', { class: 'card' }, sampleBody(p)),
        found >= 0 ? h('div', { class: 'card' }, h('h3', {}, 'Where it lies'), photo(found, frame(p))) : null),
      h('div', { class: 'stack' }, linkList(`Its ${items.length} strongest atoms${rest > 0 ? `, of ${whole(rest + items.length)}` : ''}`, 'By absolute coefficient', items))));
}

function sampleBody(p) {
  if (hasPictures()) return h('div', { class: 'gallery' }, samplePicture(p, 192));
  if (!report.head.texts) return h('p', { class: 'text big' }, `Sample number ${sampleNumber(p)}; this report was made without texts or images.`);
  if (report.head.kind !== 'token') return h('p', { class: 'text big' }, sampleText(p));
  const others = tokensOf(array('sample_source')[p]).length - 1;
  const note = others ? h('p', { class: 'note' }, `Underlined: ${whole(others)} other token${others === 1 ? '' : 's'} of this text on this page, each with its atoms.`) : null;
  return [h('p', { class: 'text big' }, linkedText(p)), note];
}

function sampleSteps(p) {
  const order = tables.samples.order, at = order.indexOf(p);
  const step = (to, text, key) => h('button', { type: 'button', title: key, disabled: to === undefined,
    onclick: () => { location.hash = `#sample/${sampleNumber(to)}`; } }, text);
  return h('div', { class: 'steps' }, step(at < 0 ? undefined : order[at - 1], '← previous', 'k'), step(at < 0 ? undefined : order[at + 1], 'next →', 'j'));
}
