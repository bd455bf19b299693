// The first page: numbers, photographs, the map of atoms, parameters.

function showOverview() {
  const s = report.head.summary;
  byId('overview-title').textContent = report.head.title;
  byId('overview-lead').textContent = `${whole(s.n_atoms)} atoms over ${whole(s.n_features)} features, at most `
    + `${whole(s.k)} per sample, measured on ${whole(s.n_samples)} samples; ${whole(s.iteration)} iterations of training.`;
  byId('tiles').replaceChildren(...tiles(s));
  byId('about').replaceChildren(...Object.entries(report.head.about).map(([name, facts]) => h('div', { class: 'card' },
    h('h3', {}, name), h('table', { class: 'facts' }, h('tbody', {}, Object.entries(facts).map(([k, v]) =>
      h('tr', {}, h('td', {}, k.replaceAll('_', ' ')), h('td', {}, v))))))));
  if (photos().length) {
    byId('photos').replaceChildren(h('h2', {}, 'Photographs'), h('div', { class: 'card' },
      h('p', { class: 'note' }, 'Click anywhere to see the patch there and its strongest atoms.'),
      h('div', { class: 'photo-row' }, photos().map((_, n) => clickablePhoto(n)))));
  }
  if (hasTiles()) {
    const used = searchAtoms('', j => !isDead(j)).sort((a, b) => array('variance')[b] - array('variance')[a]).slice(0, 160);
    byId('photos').append(h('h2', {}, 'Atoms of the highest variance'), h('div', { class: 'card mosaic' },
      used.map(j => h('a', { href: `#atom/${j}`, title: `atom ${j}` }, tile(j, 48)))));
  }
}

function tiles(s) {
  const share = (n, of) => `${whole(n)} (${percent(n / of)})`;
  const list = [
    ['Variance explained', s.variance_explained == null ? null : percent(s.variance_explained), 'mean over features'],
    ['Relative error', s.mean_relative_error == null ? null : digits(s.mean_relative_error), 'mean over samples'],
    ['Cosine similarity', s.cosine_similarity == null ? null : digits(s.cosine_similarity), 'sample and reconstruction'],
    ['Unexplained (FVU)', s.fvu == null ? null : percent(s.fvu), 'of the total variance'],
    ['Active atoms (L0)', digits(s.l0_mean), `per sample, ${whole(s.l0_min)} to ${whole(s.l0_max)}`],
    ['L1', digits(s.l1_mean), 'mean sum of |coefficients|'],
    ['Dead atoms', share(s.n_dead, s.n_atoms), `on ${whole(s.n_samples)} samples`, s.n_dead > 0.1 * s.n_atoms],
    ['Over-dense atoms', share(s.n_over_dense, s.n_atoms), `active on over ${percent(s.over_dense)}`, s.n_over_dense > 0.05 * s.n_atoms],
    ['Mutual coherence', digits(s.mutual_coherence), `Welch bound ${digits(s.welch_bound)}`],
    ['Near-duplicates', share(s.n_near_duplicates, s.n_atoms), `|cosine| above ${digits(s.duplicate_threshold, 2)}`, s.n_near_duplicates > 0.05 * s.n_atoms],
    ['Positive share', percent(s.sign_balance_mean), 'mean over atoms'],
  ];
  return list.filter(t => t[1] !== null).map(([name, value, note, warn]) =>
    h('div', { class: `card tile${warn ? ' warn' : ''}` }, h('span', {}, name), h('b', {}, value), h('span', {}, note)));
}

// -- the map of atoms --

const map = { points: [] };

function drawMap() {
  const canvas = byId('map'), box = canvas.getBoundingClientRect();
  if (!box.width) return;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = box.width * ratio;
  canvas.height = box.height * ratio;
  const draw = canvas.getContext('2d');
  draw.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(name).trim();
  const left = 46, right = 26, top = 8, bottom = 34, w = box.width - left - right, hgt = box.height - top - bottom;
  const [low, high] = densityDecades();
  const at = e => left + w * (e - low) / (high - low), x = j => at(Math.log10(density(j))), y = v => top + hgt * (1 - v);
  drawAxes(draw, { left, top, w, hgt, low, high, at, y, color });
  const tone = signTones(color);
  map.points = [];
  const size = nAtoms() > 4000 ? 1.6 : 2.4;
  for (let j = 0; j < nAtoms(); j++) {
    if (isDead(j)) continue;
    const px = x(j), py = y(Math.min(1, array('coherence')[j]));
    draw.fillStyle = tone(balance(j));
    draw.globalAlpha = 0.75;
    draw.beginPath();
    draw.arc(px, py, size, 0, 7);
    draw.fill();
    map.points.push([px, py, j]);
  }
  draw.globalAlpha = 1;
}

// whole decades of density that hold every atom in use
function densityDecades() {
  let low = Infinity, high = -Infinity;
  for (let j = 0; j < nAtoms(); j++) {
    if (isDead(j)) continue;
    low = Math.min(low, density(j));
    high = Math.max(high, density(j));
  }
  if (low > high) return [-1, 0];
  const from = Math.floor(Math.log10(low) + 1e-9), to = Math.ceil(Math.log10(high) - 1e-9);
  return [from, Math.max(to, from + 1)];
}

// colour by share of positive coefficients: orange, grey in the middle, blue
function signTones(color) {
  const rgb = name => [1, 3, 5].map(i => Number.parseInt(color(name).slice(i, i + 2), 16));
  const [negative, middle, positive] = ['--orange', '--soft', '--blue'].map(rgb);
  return b => {
    const end = b < 0.5 ? negative : positive, part = Math.abs(2 * b - 1);
    return `rgb(${middle.map((m, i) => Math.round(m + (end[i] - m) * part)).join(' ')})`;
  };
}

function drawAxes(draw, { left, top, w, hgt, low, high, at, y, color }) {
  draw.font = '11px system-ui, sans-serif';
  draw.strokeStyle = color('--line');
  draw.fillStyle = color('--soft');
  draw.textAlign = 'right';
  for (const v of [0, 0.25, 0.5, 0.75, 1]) {
    draw.beginPath();
    draw.moveTo(left, y(v));
    draw.lineTo(left + w, y(v));
    draw.stroke();
    draw.fillText(String(v), left - 6, y(v) + 4);
  }
  draw.textAlign = 'center';
  for (let e = low; e <= high; e++) {
    draw.beginPath();
    draw.moveTo(at(e), top);
    draw.lineTo(at(e), top + hgt);
    draw.stroke();
    draw.fillText(`${Number((100 * 10 ** e).toPrecision(1))} %`, at(e), top + hgt + 16);
  }
  draw.fillText('share of samples on which the atom is active', left + w / 2, top + hgt + 31);
  draw.save();
  draw.translate(11, top + hgt / 2);
  draw.rotate(-Math.PI / 2);
  draw.fillText('coherence', 0, 0);
  draw.restore();
}

function nearestPoint(event) {
  const box = byId('map').getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  let best = null, least = 144;
  for (const point of map.points) {
    const distance = (point[0] - x) ** 2 + (point[1] - y) ** 2;
    if (distance < least) { least = distance; best = point; }
  }
  return best;
}

function listenToMap() {
  const canvas = byId('map'), tip = byId('map-tip');
  canvas.addEventListener('mousemove', event => {
    const point = nearestPoint(event);
    tip.hidden = !point;
    if (!point) return;
    tip.textContent = `${point[2]}  ${atomName(point[2])}`.trim();
    tip.style.left = `${Math.min(point[0] + 12, canvas.clientWidth - tip.offsetWidth)}px`;
    tip.style.top = `${point[1] + 12}px`;
  });
  canvas.addEventListener('mouseleave', () => { tip.hidden = true; });
  canvas.addEventListener('click', event => {
    const point = nearestPoint(event);
    if (point) location.hash = `#atom/${point[2]}`;
  });
}
