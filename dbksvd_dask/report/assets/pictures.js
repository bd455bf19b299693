// Sheets of small pictures, photographs, and where an atom is active on them.

const urls = {};

function imageUrl(name, type) {
  if (!urls[name]) urls[name] = URL.createObjectURL(new Blob([array(name)], { type }));
  return urls[name];
}

// picture i of a sheet, drawn `size` pixels wide
function picture(sheet, i, size, label) {
  const s = report.head[sheet];
  const scale = size / s.width;
  const number = Math.floor(i / s.per_sheet), cell = i % s.per_sheet;
  const x = (cell % s.columns) * s.cell_width, y = Math.floor(cell / s.columns) * s.cell_height;
  const [w, hgt] = s.sheets[number];
  return h('div', { class: 'picture', role: 'img', 'aria-label': label, style: {
    width: `${size}px`, height: `${Math.round(s.height * scale)}px`,
    'background-image': `url("${imageUrl(`${sheet}_${number}`, s.type)}")`,
    'background-size': `${w * scale}px ${hgt * scale}px`,
    'background-position': `${-x * scale}px ${-y * scale}px`,
  } });
}

const hasTiles = () => Boolean(report.head.tiles);
const hasPictures = () => report.head.kind === 'image';
const tile = (j, size) => picture('tiles', j, size, `atom ${j}`);
const samplePicture = (p, size) => picture('pictures', p, size, `sample ${sampleNumber(p)}`);
const photos = () => report.head.photos || [];

function photo(number, ...over) {
  const about = photos()[number];
  const image = h('img', { src: imageUrl(`photo_${number}`, 'image/jpeg'), alt: about.name,
    width: about.width, height: about.height });
  return h('figure', { class: 'photo' }, h('div', { style: { position: 'relative' } }, image, ...over),
    h('figcaption', {}, about.name));
}

// a photograph on which a click opens the patch under it
function clickablePhoto(number) {
  const figure = photo(number);
  figure.classList.add('pick');
  figure.querySelector('img').addEventListener('click', event => {
    const box = event.target.getBoundingClientRect(), about = photos()[number];
    const x = (event.clientX - box.left) / box.width * about.width;
    const y = (event.clientY - box.top) / box.height * about.height;
    location.hash = `#sample/${sampleNumber(nearestPatch(number, x, y))}`;
  });
  return figure;
}

function nearestPatch(number, x, y) {
  const rows = array(`photo_${number}_row`), cols = array(`photo_${number}_col`);
  const s = report.head.pictures;
  let best = 0, least = Infinity;
  for (let i = 0; i < rows.length; i++) {
    const distance = (rows[i] + s.height / 2 - y) ** 2 + (cols[i] + s.width / 2 - x) ** 2;
    if (distance < least) { least = distance; best = i; }
  }
  return array(`photo_${number}_sample`)[best];
}

// a frame around a patch
function frame(p) {
  const about = photos()[array('sample_photo')[p]], s = report.head.pictures;
  const share = (x, of) => `${(100 * x / of).toFixed(3)}%`;
  return h('div', { class: 'frame', style: {
    left: share(array('sample_col')[p], about.width), top: share(array('sample_row')[p], about.height),
    width: share(s.width, about.width), height: share(s.height, about.height) } });
}

// a photograph with the patches on which an atom is active, by strength
function heatPhoto(number, j) {
  const about = photos()[number], s = report.head.pictures;
  const canvas = h('canvas', { width: about.width, height: about.height });
  const draw = canvas.getContext('2d');
  const rows = array(`photo_${number}_row`), cols = array(`photo_${number}_col`);
  const most = array('largest')[j] || 1;
  let any = 0;
  draw.fillStyle = 'rgba(0, 0, 0, 0.55)';
  draw.fillRect(0, 0, about.width, about.height);
  for (let i = 0; i < rows.length; i++) {
    const atoms = row(`photo_${number}_atom`, i), at = atoms.indexOf(j);
    const value = at < 0 ? 0 : row(`photo_${number}_value`, i)[at];
    if (value === 0) continue;
    any++;
    const strength = 0.25 + 0.75 * Math.min(1, Math.abs(value) / most);
    draw.clearRect(cols[i], rows[i], s.width, s.height);
    draw.fillStyle = value > 0 ? `rgba(47, 111, 222, ${0.55 * strength})` : `rgba(217, 115, 26, ${0.55 * strength})`;
    draw.fillRect(cols[i], rows[i], s.width, s.height);
  }
  const figure = photo(number, canvas);
  figure.querySelector('figcaption').textContent = `${about.name}: active on ${whole(any)} of ${whole(rows.length)} patches`;
  return figure;
}
