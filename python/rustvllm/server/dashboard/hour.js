// The last hour: asks the server for the points that are new, and draws them.

const HOUR = 3600;
const MAX_POINTS = 240;
const hour = { columns: [], points: [], since: 0 };
const CHARTS = [
  ['Tokens per second', [['generation', 'generation', 'generated'], ['prompt', 'prompt', 'of prompts']], formatNumber],
  ['Time to first token', [['ttft_p99', 'wait', 'p99'], ['ttft_p90', 'sample', 'p90'], ['ttft_p50', 'used', 'p50']], (value) => formatTime(value * 1e9)],
  ['Time between tokens', [['itl_p99', 'wait', 'p99'], ['itl_p90', 'sample', 'p90'], ['itl_p50', 'used', 'p50']], (value) => formatTime(value * 1e9)],
  ['Requests', [['waiting', 'wait', 'waiting'], ['running', 'used', 'running']], formatNumber],
  ['Errors and preemptions', [['preemptions', 'warn', 'preempted'], ['refused', 'shared', 'refused'], ['errors', 'bad', 'failed']], formatNumber],
  ['KV cache in use', [['kv_cache_usage', 'shared', 'of the blocks']], (value) => `${Number((100 * value).toFixed(1))} %`],
];

// The row of the engine that is shown, or of all.
const rowOf = (point) => (selected === null ? point?.all : point?.engines[String(selected)]) ?? null;
const numberOf = (row, columns, name) => row?.[columns.indexOf(name)] ?? null;

// One of the hour's numbers, from old to new; null where there is none.
const hourOf = (name) => hour.points.map((point) => numberOf(rowOf(point), hour.columns, name));

async function followHour() {
  for (;;) {
    let wait = 15;
    try {
      const response = document.hidden || !shown ? null : await fetch(address(`dashboard/history?since=${hour.since}`), { headers: headers(), cache: 'no-store' });
      if (response?.ok) takeHour(await response.json()); else wait = 1;
    } catch { /* the server is away; the feed says so */ }
    await pause(wait * 1000);
  }
}

function takeHour({ columns, points }) {
  hour.columns = columns;
  // Numbers begin again when the server does, or when another API process answers: what is older stays, in its order.
  const newest = hour.points.at(-1)?.time ?? 0;
  hour.points.push(...points.filter(({ time }) => time > newest));
  hour.since = points.at(-1)?.number ?? hour.since;
  hour.points.splice(0, hour.points.length - MAX_POINTS);
  drawHour();
}

function drawHour() {
  const charts = byId('hour');
  if (!charts.children.length) {
    charts.append(...CHARTS.map(([title, series]) => element('figure', { class: 'chart' },
      element('h3', {}, title),
      element('div', { class: 'legend', id: `legend-${series[0][0]}` }),
      element('canvas', { role: 'img', 'aria-label': `${title}, since an hour ago at most` }))));
  }
  const times = hour.points.map(({ time }) => time * 1000), now = Date.now();
  byId('hour-count').textContent = times.length ? `a point every 15 s, ${formatDuration((now - times[0]) / 1000)} known` : 'the first point comes 15 s after the start';
  // A young server's hour would be a dot at the edge.
  const known = times.length ? (now - times[0]) / 1000 : 0, seconds = [300, 900, 1800].find((span) => known < span) ?? HOUR;
  CHARTS.forEach(([, series, label], at) => {
    const lines = series.map(([name, colour, said]) => ({ name, said, colour: colours[colour], values: hourOf(name), key: colour }));
    showLegend(`legend-${series[0][0]}`, lines.map(({ key, said, values }) => [key, said, label(values.findLast((value) => value !== null) ?? NaN)]));
    drawSeries(charts.children[at].lastChild, times, lines, { seconds, stacked: false, label, now: Math.max(now, times.at(-1) ?? 0), least: ['errors', 'preemptions', 'waiting'].includes(series[0][0]) ? 4 : 0 });
  });
}
followHour();
