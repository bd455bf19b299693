// What an atom of a language model does to its tokens, and where in a text it is active.

function logitCards(j) {
  return [['positive', 'Tokens it makes likelier'], ['negative', 'Tokens it makes less likely']].map(([side, title]) => {
    if (!array(`${side}_token`)) return null;
    const tokens = row(`${side}_token`, j), values = row(`${side}_logit`, j), most = Math.max(...Array.from(values, Math.abs));
    const items = [];
    tokens.forEach((t, i) => {
      if (t >= 0) items.push(h('li', {}, h('code', { class: 'text' }, shownToken(report.head.tokens[t])), valueBar(values[i], most)));
    });
    return h('div', { class: 'card', 'data-logits': side },
      h('h3', { title: 'Change of the logit by a coefficient of 1, straight through the last norm' }, title), h('ul', { class: 'list logits' }, items));
  });
}

// spaces and line ends of a token can be seen
const shownToken = text => text.replace(/ /g, '␣').replace(/\n/g, '↵').replace(/\t/g, '⇥') || '∅';

function positionCard(j) {
  if (!array('position_density') || isDead(j)) return null;
  const share = Array.from(row('position_density', j)), edges = report.head.position_edges;
  const most = Math.max(...share) || 1;
  const items = [];
  share.forEach((value, b) => {
    const from = edges[b], to = edges[b + 1] - 1;
    if (to >= from) items.push(h('li', {}, h('span', { class: 'note' }, from === to ? String(from) : `${from}–${to}`), valueBar(value, most, percent(value))));
  });
  return h('div', { class: 'card', 'data-positions': '' },
    h('h3', { title: 'Share of the tokens at these positions on which it is active' }, 'Density by position'), h('ul', { class: 'list positions' }, items));
}
