// What the engines do: reads the server's events and draws them. Asks for a key when the server wants one.

const SECONDS = 60;
const MAX_BARS = 128;
const USES = ['free', 'used', 'cached', 'shared', 'null'];

let key = sessionStorage.getItem('rustvllm-key') ?? '';
let selected = null; // the rank that is shown; null: all
let shown = null; // the newest state
const histories = new Map(); // by rank: what the charts show

// An address beside this page, whatever a proxy puts in front of it.
const address = (path) => new URL(path, location.href).href;
const headers = (more = {}) => (key ? { Authorization: `Bearer ${key}`, ...more } : more);

// Read server-sent events; `onEvent(name, data)`.
async function readEvents(response, onEvent) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end = text.indexOf('\n\n'); end >= 0; end = text.indexOf('\n\n')) {
      const lines = text.slice(0, end).split('\n');
      text = text.slice(end + 2);
      const of = (field) => lines.filter((line) => line.startsWith(`${field}: `)).map((line) => line.slice(field.length + 2));
      const data = of('data').join('\n');
      if (data) onEvent(of('event')[0] ?? 'message', data);
    }
  }
}

async function errorOf(response) {
  try {
    const { error, message } = await response.json();
    return error?.message ?? error ?? message ?? `HTTP ${response.status}`;
  } catch {
    return `HTTP ${response.status}`;
  }
}

function say(state, words, note = '') {
  const status = byId('status');
  status.dataset.state = state;
  if (status.textContent !== words) status.textContent = words;
  if (byId('note').textContent !== note) byId('note').textContent = note;
}

const pause = (milliseconds) => new Promise((resolve) => { setTimeout(resolve, milliseconds); });

// For ever: a server that goes away is waited for.
async function follow() {
  for (;;) {
    try {
      const response = await fetch(address('dashboard/events'), { headers: headers(), cache: 'no-store' });
      byId('key-form').hidden = response.status !== 401;
      if (response.ok) {
        await readEvents(response, (name, data) => { if (name === 'state') show(JSON.parse(data)); });
        say('warn', 'the server has ended the stream', 'asking again …');
      } else if (response.status === 401) {
        say('warn', 'a key is needed');
        sessionStorage.removeItem('rustvllm-key');
        await keyGiven();
      } else {
        say(response.status === 503 ? 'warn' : 'bad', await errorOf(response), 'asking again …');
      }
    } catch {
      say('bad', 'no connection to the server', 'asking again …');
    }
    await pause(1000);
  }
}

let giveKey = () => {};
const keyGiven = () => new Promise((resolve) => { giveKey = resolve; });

byId('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  key = byId('key').value.trim();
  byId('key').value = '';
  if (key) sessionStorage.setItem('rustvllm-key', key);
  giveKey();
});

// -- what is kept for the charts -----------------------------------------------------------------------------------

function historyOf(rank) {
  if (!histories.has(rank)) histories.set(rank, { samples: [], bars: [], lastStep: 0, last: null });
  return histories.get(rank);
}

// Take one engine's answer in: rates come from what has changed since the one before.
function remember({ rank, state }) {
  const history = historyOf(rank), { stats, steps } = state, { totals } = steps;
  const last = history.last, now = performance.now();
  if (last && (totals.num_steps < last.steps.totals.num_steps || stats.num_steps < last.stats.num_steps)) {
    histories.delete(rank); // another engine has taken its place
    remember({ rank, state });
    return;
  }
  history.last = state;
  for (const [step, , , , ...phases] of steps.steps) {
    if (step <= history.lastStep) continue;
    history.bars.push(phases);
    history.lastStep = step;
  }
  history.bars.splice(0, history.bars.length - MAX_BARS);
  if (!last) return;
  const seconds = (state.time_ns - last.time_ns) / 1e9;
  if (!(seconds > 0)) return;
  const since = (name) => stats[name] - last.stats[name];
  const numSteps = totals.num_steps - last.steps.totals.num_steps;
  history.samples.push({
    time: now,
    generation: since('num_generation_tokens') / seconds,
    prompt: since('num_prompt_tokens') / seconds,
    steps: numSteps / seconds,
    phases: totals.phase_ns.map((total, at) => (numSteps ? (total - last.steps.totals.phase_ns[at]) / numSteps : 0)),
    total: numSteps ? (totals.total_ns - last.steps.totals.total_ns) / numSteps : 0,
    running: stats.num_running,
    waiting: stats.num_waiting,
    usage: stats.kv_cache_usage,
    queries: since('prefix_cache_queries'),
    hits: since('prefix_cache_hits'),
    allQueries: stats.prefix_cache_queries,
    allHits: stats.prefix_cache_hits,
    drafts: since('num_draft_tokens'),
    accepted: since('num_accepted_tokens'),
    allDrafts: stats.num_draft_tokens,
    allAccepted: stats.num_accepted_tokens,
    blocks: stats.num_usable_blocks,
    memory: memoryOf(shown.server, [{ state }]),
  });
  while (history.samples.length && now - history.samples[0].time > SECONDS * 1000) history.samples.shift();
}

// The samples of several engines as those of one; they were taken together.
function combined(ranks) {
  const all = ranks.map((rank) => historyOf(rank).samples);
  if (all.length === 1) return all[0];
  const length = Math.min(...all.map((samples) => samples.length));
  return Array.from({ length }, (_, at) => {
    const each = all.map((samples) => samples[samples.length - length + at]);
    const sum = (of) => each.reduce((total, sample) => total + of(sample), 0), steps = sum((sample) => sample.steps);
    const mean = (of, weight) => { const total = sum(weight); return total ? sum((sample) => of(sample) * weight(sample)) / total : 0; };
    return {
      time: each[0].time,
      ...Object.fromEntries(['generation', 'prompt', 'running', 'waiting', 'queries', 'hits', 'allQueries', 'allHits', 'drafts', 'accepted', 'allDrafts', 'allAccepted', 'blocks', 'memory']
        .map((name) => [name, sum((sample) => sample[name])])),
      steps,
      phases: each[0].phases.map((_phase, phase) => mean((sample) => sample.phases[phase], (sample) => sample.steps)),
      total: mean((sample) => sample.total, (sample) => sample.steps),
      usage: mean((sample) => sample.usage, (sample) => sample.blocks),
    };
  });
}

// -- what is shown -------------------------------------------------------------------------------------------------

function show(state) {
  shown = state;
  const { server, engines } = state;
  byId('model').textContent = server.models[0];
  offer(server.task);
  byId('version').textContent = `version ${server.version} · up ${formatDuration(server.uptime_seconds)}`;
  document.title = `${server.models[0]} · rustvllm`;
  for (const engine of engines) if (engine.state) remember(engine);
  if (selected !== null && !engines.some(({ rank }) => rank === selected)) selected = null;
  showTabs(engines);
  showStatus(server, engines);
  draw();
}

function showTabs(engines) {
  const tabs = byId('engines');
  tabs.hidden = engines.length < 2;
  const names = engines.length < 2 ? [] : [[null, 'all'], ...engines.map(({ rank, death }) => [rank, `engine ${rank}${death ? ' ✕' : ''}`])];
  const wanted = names.map(([rank, name]) => `${rank}${name}`).join();
  if (tabs.dataset.names !== wanted) {
    tabs.dataset.names = wanted;
    tabs.replaceChildren(...names.map(([rank, name]) => {
      const tab = element('button', { type: 'button', role: 'tab', 'data-rank': rank ?? 'all' }, name);
      tab.addEventListener('click', () => { selected = rank; showTabs(shown.engines); draw(); });
      return tab;
    }));
  }
  for (const tab of tabs.children) tab.setAttribute('aria-selected', String(tab.dataset.rank === String(selected ?? 'all')));
}

function showStatus(server, engines) {
  const silent = engines.filter(({ error }) => error), dead = engines.filter(({ death }) => death);
  const running = engines.reduce((sum, engine) => sum + (engine.state ? engine.state.stats.num_running + engine.state.stats.num_waiting : 0), 0);
  if (!server.serves) say('bad', server.status, server.message ?? '');
  else if (dead.length) say('warn', `engine ${dead.map(({ rank }) => rank).join(', ')} is dead`, dead[0].death);
  else if (silent.length) say('warn', `engine ${silent.map(({ rank }) => rank).join(', ')} does not answer`, silent[0].error);
  else say('good', running ? 'running' : 'idle', engines.map(({ state }) => state?.last_step_error).filter(Boolean).map((error) => `last failed step: ${error}`)[0] ?? '');
}

// A latency of the last minute: the median, and what the slowest of a hundred took.
function latencyTile(name) {
  return (_, { recent }) => {
    const of = (quantile) => numberOf(rowOf(recent), recent.columns, `${name}_${quantile}`);
    if (of('p50') === null) return ['–', 'none lately'];
    const [value, unit] = formatTime(of('p50') * 1e9).split(' ');
    return [value, `${unit} · p99 ${formatTime(of('p99') * 1e9)}`];
  };
}

const totalOf = ({ totals }, name) => (selected === null ? totals.all : totals[String(selected)])?.[name] ?? 0;

// Id, name, [number, unit] of the newest sample and its surroundings, what its line shows (a number of the samples, or
// the name of one of the hour's), colour, and what it means.
const TILES = [
  ['running', 'running', (s) => [formatNumber(s.running), 'requests'], (s) => s.running, 'used', 'Requests in the running list'],
  ['waiting', 'waiting', (s) => [formatNumber(s.waiting), 'requests'], (s) => s.waiting, 'wait', 'Requests in the queue'],
  ['generation', 'generation', (s) => [formatNumber(Math.round(s.generation)), 'tokens/s'], (s) => s.generation, 'generation', 'Tokens that were generated, per second'],
  ['prompt', 'prompts', (s) => [formatNumber(Math.round(s.prompt)), 'tokens/s'], (s) => s.prompt, 'prompt', 'Tokens of prompts, per second'],
  ['ttft', 'time to first token', latencyTile('ttft'), 'ttft_p50', 'used', 'Median of the last minute (TTFT); the line is the last hour'],
  ['itl', 'time between tokens', latencyTile('itl'), 'itl_p50', 'forward', 'Median of the last minute (ITL); the line is the last hour'],
  ['usage', 'KV cache in use', (s) => [(s.usage * 100).toFixed(1), '%'], (s) => s.usage, 'shared', 'Share of the KV blocks that requests hold'],
  ['hits', 'prefix cache hits', (s) => [s.allQueries ? ((100 * s.allHits) / s.allQueries).toFixed(1) : '–', s.allQueries ? '% of prompts' : ''], (s) => (s.queries ? s.hits / s.queries : 0), 'cached', 'Share of the prompt tokens that were found in the prefix cache since the start'],
  ['drafts', 'drafts kept', (s) => [s.allDrafts ? ((100 * s.allAccepted) / s.allDrafts).toFixed(1) : '–', s.allDrafts ? `% of ${formatNumber(s.allDrafts)}` : ''], (s) => (s.drafts ? s.accepted / s.drafts : 0), 'cached', 'Share of the drafts (guessed tokens) that steps ran and that were right, since the start'],
  ['step', 'step', (s) => (s.steps ? formatTime(s.total).split(' ') : ['–', '']), (s) => s.total, 'forward', 'Mean time of a step'],
  ['errors', 'errors', (_, { recent }) => [formatNumber(totalOf(recent, 'errors')), `failed · ${formatNumber(totalOf(recent, 'refused'))} refused`], 'errors', 'bad', 'Requests that failed, and those that the queue had no room for, since the start; the line is the last hour'],
  ['preemptions', 'preemptions', (_, { recent }) => [formatNumber(totalOf(recent, 'preemptions')), 'since the start'], 'preemptions', 'warn', 'Times that a request gave its KV blocks to others; the line is the last hour'],
  ['memory', 'memory', (s, { memory }) => [...formatBytes(memory).split(' ')], (s) => s.memory, 'update', 'Resident memory of the API process and the engines that are shown'],
];

// Bytes of the processes that are shown; an engine may live in the API process.
function memoryOf(server, engines) {
  const processes = new Map([server, ...engines.map(({ state }) => state)].filter((each) => each.process).map((each) => [each.process.pid, each.process.memory_bytes]));
  return [...processes.values()].reduce((sum, bytes) => sum + bytes, 0);
}

// Of a model on several ranks: which are alive, and how long ago one made progress.
function showRanks(engines) {
  const all = engines.flatMap(({ rank: engine, state }) => (state?.ranks ?? []).map((rank) => ({ ...rank, engine })));
  const line = byId('ranks');
  line.hidden = !all.length;
  line.replaceChildren(...all.map(({ engine, rank, pid, state, step_age: age, waits_in: place }) => {
    const isGood = state === 'running' || state === 'sleeping';
    const name = engines.length > 1 ? `engine ${engine} rank ${rank}` : `rank ${rank}`;
    const doing = age ? `step runs for ${age.toFixed(1)} s${place ? `, in ${place}` : ''}` : 'idle or on time';
    return element('span', { 'data-state': isGood ? 'good' : 'bad', title: doing }, `${name} · pid ${pid} · ${isGood ? 'alive' : state} · ${age.toFixed(1)} s`);
  }));
}

function showTiles(samples) {
  const tiles = byId('tiles');
  if (!tiles.children.length) {
    tiles.append(...TILES.map(([id, name, , , , title]) => element('div', { class: 'tile', id: `tile-${id}`, title },
      element('div', { class: 'name' }, name), element('div', { class: 'value' }, '–'), element('canvas', { 'aria-hidden': 'true' }))));
  }
  const newest = samples.at(-1);
  // A mean over two seconds is easier to read than a number that jumps.
  const late = samples.slice(-5), mean = (name) => late.reduce((sum, sample) => sum + sample[name], 0) / late.length;
  byId('tile-drafts').hidden = !newest?.allDrafts; // nothing to tell where nothing is drafted
  for (const [id, , value, spark, colour] of TILES) {
    const tile = byId(`tile-${id}`);
    if (newest) {
      const surroundings = { recent: shown.recent, memory: memoryOf(shown.server, chosen()) };
      const [number, unit] = value({ ...newest, generation: mean('generation'), prompt: mean('prompt') }, surroundings);
      tile.children[1].replaceChildren(number, element('small', {}, unit ?? ''));
    }
    const isHour = typeof spark === 'string', line = isHour ? hourOf(spark).map((number) => number ?? 0) : samples.slice(-120).map(spark);
    drawSpark(tile.children[2], line, colours[colour], isHour ? Math.max(line.length, 20) : 120);
  }
}

function chosen() {
  return (shown?.engines ?? []).filter(({ rank, state }) => state && (selected === null || rank === selected));
}

function draw() {
  if (!shown || document.hidden) return;
  const engines = chosen(), ranks = engines.map(({ rank }) => rank), samples = ranks.length ? combined(ranks) : [];
  showTiles(samples);
  showRanks(chosen());
  showRequests(engines);
  showAdapters(engines);
  showBlocks(engines);
  showSteps(engines, samples);
  drawHour();
  const times = samples.map(({ time }) => time);
  drawSeries(byId('rates'), times, [
    { colour: colours.prompt, values: samples.map(({ prompt }) => prompt) },
    { colour: colours.generation, values: samples.map(({ generation }) => generation) },
  ], { seconds: SECONDS, stacked: false, label: (value) => formatNumber(value) });
}

const ended = (id) => id.replace(/@\d+$/, '');

function newRow() {
  const bar = element('div', { class: 'race' }, ...['track', 'fill', 'hit', 'edge'].map((name) => element('i', { class: name })));
  return element('tr', {}, element('td', { class: 'id' }), element('td'), element('td', { class: 'wide' }, bar),
    ...['right extra', 'right', 'right extra', 'right extra'].map((name) => element('td', { class: name })));
}

function showRequests(engines) {
  const rows = engines.flatMap(({ rank, state }) => state.requests.map((request) => ({ ...request, rank })));
  const counts = engines.reduce((sum, { state }) => [sum[0] + state.stats.num_running, sum[1] + state.stats.num_waiting], [0, 0]);
  const cut = counts[0] + counts[1] - rows.length;
  byId('requests-count').textContent = `${counts[0]} running, ${counts[1]} waiting${cut > 0 ? `, the first ${rows.length} are shown` : ''}`;
  byId('idle').hidden = rows.length > 0;
  const body = byId('rows'), longest = Math.max(...rows.map(({ num_tokens: tokens }) => tokens), 1);
  while (body.children.length > rows.length) body.lastChild.remove();
  while (body.children.length < rows.length) body.append(newRow());
  const share = (count) => `${(100 * count) / longest}%`;
  rows.forEach((request, at) => {
    const cells = body.children[at].children, { num_tokens: tokens, num_computed_tokens: computed } = request;
    cells[0].textContent = engines.length > 1 ? `${request.rank}: ${ended(request.request_id)}` : ended(request.request_id);
    cells[0].title = request.request_id + (request.adapter ? `, adapter ${request.adapter}` : '');
    cells[1].textContent = request.status.toLowerCase() + (request.adapter ? ` · ${request.adapter}` : '') + (request.num_preemptions ? ` (preempted ${request.num_preemptions}×)` : '');
    cells[1].className = `state-${request.status.split('_')[0]}`;
    const [track, fill, hit, edge] = cells[2].firstChild.children;
    track.style.width = share(tokens);
    fill.style.width = share(Math.min(computed, tokens));
    hit.style.width = share(request.num_cached_tokens);
    edge.style.left = share(request.num_prompt_tokens);
    [computed, tokens, request.num_cached_tokens, request.num_blocks].forEach((value, index) => { cells[3 + index].textContent = formatNumber(value); });
  });
}

// The adapters that requests may name, those with requests first; engines have the same ones.
function showAdapters(engines) {
  const adapters = new Map();
  for (const row of engines.flatMap(({ state }) => state.adapters)) {
    const sum = adapters.get(row.name) ?? { ...row, num_running: 0, num_waiting: 0 };
    adapters.set(row.name, { ...sum, num_running: sum.num_running + row.num_running, num_waiting: sum.num_waiting + row.num_waiting });
  }
  const busy = ({ num_running: running, num_waiting: waiting }) => running + waiting;
  const rows = [...adapters.values()].sort((one, other) => busy(other) - busy(one));
  byId('adapters').hidden = rows.length === 0;
  byId('adapters-count').textContent = `${rows.length} loaded, ${rows.filter(busy).length} with requests`;
  byId('adapter-rows').replaceChildren(...rows.map(({ name, rank, num_running: running, num_waiting: waiting }) => element('tr', {},
    element('td', { class: 'wide', title: name ?? '' }, name ?? 'without a name'),
    ...[rank === null ? '' : formatNumber(rank), formatNumber(running), formatNumber(waiting)].map((text) => element('td', { class: 'right' }, text)))));
}

function showBlocks(engines) {
  const parts = engines.map(({ state }) => Uint8Array.from(atob(state.blocks.cells), (char) => char.charCodeAt(0)));
  const cells = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => { cells.set(part, at); return at + part.length; }, 0);
  drawCells(byId('map'), cells, USES.map((use) => colours[use]));
  const counts = USES.map((_, use) => engines.reduce((sum, { state }) => sum + state.blocks.counts[use], 0));
  const total = counts.reduce((sum, count) => sum + count, 0);
  const perCell = Math.max(...engines.map(({ state }) => state.blocks.blocks_per_cell), 1);
  const size = engines[0]?.state.limits.block_size;
  byId('blocks-count').textContent = total ? `${formatNumber(total)} of ${size} tokens, ${perCell > 1 ? `${perCell} per square` : 'one per square'}` : '';
  const said = { free: 'free', used: 'used by one', cached: 'cached, free to be reused', shared: 'shared', null: 'null block' };
  showLegend('map-legend', USES.map((use, at) => [use, said[use], formatNumber(counts[at])]));
}

function showSteps(engines, samples) {
  const phases = engines[0]?.state.steps.phases ?? [], newest = samples.findLast(({ steps }) => steps > 0);
  const overlaps = engines.some(({ state }) => state.limits.async_scheduling);
  const rate = samples.at(-1)?.steps ?? 0;
  byId('steps-count').textContent = `${formatNumber(Math.round(rate))} steps/s${overlaps ? ', steps overlap: wait holds the planning of the next one' : ''}`;
  showLegend('phase-legend', phases.map((phase, at) => [phase, phase, newest ? formatTime(newest.phases[at]) : '–']));
  drawSeries(byId('phases'), samples.map(({ time }) => time), phases.map((phase, at) => ({ colour: colours[phase], values: samples.map((sample) => sample.phases[at]) })),
    { seconds: SECONDS, stacked: true, label: formatTime });
  const bars = engines.length === 1 ? historyOf(engines[0].rank).bars : engines.flatMap(({ rank }) => historyOf(rank).bars.slice(-Math.floor(MAX_BARS / engines.length)));
  drawBars(byId('last-steps'), bars, phases.map((phase) => colours[phase]), formatTime);
}

function showLegend(id, entries) {
  const legend = byId(id);
  if (legend.children.length !== entries.length) {
    legend.replaceChildren(...entries.map(([colour, name]) => {
      const swatch = element('i', { class: 'swatch' });
      swatch.style.background = `var(--${colour})`;
      return element('span', {}, swatch, `${name} `, element('b'));
    }));
  }
  entries.forEach(([, , value], at) => { legend.children[at].lastChild.textContent = value ?? ''; });
}

// -- dark and light ------------------------------------------------------------------------------------------------

const THEMES = ['auto', 'dark', 'light'];

function setTheme(theme) {
  if (theme === 'auto') delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  byId('theme-name').textContent = theme;
  readColours();
  draw();
}

byId('theme').addEventListener('click', () => {
  const next = THEMES[(THEMES.indexOf(byId('theme-name').textContent) + 1) % THEMES.length];
  try { localStorage.setItem('rustvllm-theme', next); } catch { /* a browser that keeps nothing */ }
  setTheme(next);
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { readColours(); draw(); });
addEventListener('resize', draw);
document.addEventListener('visibilitychange', draw);
let theme = 'auto';
try { theme = localStorage.getItem('rustvllm-theme') ?? 'auto'; } catch { /* as above */ }
setTheme(THEMES.includes(theme) ? theme : 'auto');
follow();
