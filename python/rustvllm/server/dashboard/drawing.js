// Drawing: canvases in the size they are shown in, with the colours of the style sheet; and numbers for people.

const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === 'class') made.className = value; else if (value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

let colours = {};

function readColours() {
  const probe = element('i');
  document.body.append(probe);
  const names = ['text', 'dim', 'line', 'faint', 'free', 'used', 'cached', 'shared', 'null', 'schedule', 'prepare',
    'forward', 'sample', 'wait', 'update', 'generation', 'prompt', 'accent', 'card', 'bad', 'warn', 'good'];
  colours = Object.fromEntries(names.map((name) => {
    probe.style.color = `var(--${name})`; // a canvas knows neither variables nor light-dark()
    return [name, getComputedStyle(probe).color];
  }));
  probe.remove();
}

// The context of a canvas, scaled so that a unit is a CSS pixel, and its size; null while it is not shown.
function prepare(canvas) {
  const width = canvas.clientWidth, height = canvas.clientHeight, ratio = window.devicePixelRatio || 1;
  if (!width || !height) return null;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = '11px system-ui, "DejaVu Sans", sans-serif';
  return { context, width, height };
}

// A round number of at least `value`.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= value * 0.999) * power;
}

function formatNumber(value) {
  if (!Number.isFinite(value)) return '–';
  if (Math.abs(value) >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString('en').replaceAll(',', ' ');
  return value.toPrecision(value < 1 ? 2 : 3);
}

function formatTime(nanoseconds) {
  if (!Number.isFinite(nanoseconds)) return '–';
  const [value, unit] = nanoseconds < 999.5e3 ? [nanoseconds / 1e3, 'µs']
    : nanoseconds < 999.5e6 ? [nanoseconds / 1e6, 'ms'] : [nanoseconds / 1e9, 's'];
  return `${value >= 99.95 ? Math.round(value) : Number(value.toPrecision(3))} ${unit}`;
}

// Two lines across and the label of the upper one; returns the height of a value.
function scale(area, top, label, left = 0) {
  const { context, width, height } = area, floor = height - 14, roof = 12;
  context.strokeStyle = colours.line;
  context.fillStyle = colours.dim;
  context.lineWidth = 1;
  for (const share of height < 80 ? [0, 1] : [0, 0.5, 1]) {
    const y = Math.round(floor - share * (floor - roof)) + 0.5;
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(width, y);
    context.stroke();
    if (share) context.fillText(label(share * top), left + 2, y - 3);
  }
  return (value) => floor - Math.min(value / top, 1) * (floor - roof);
}

// Seconds as a person says them.
function formatDuration(seconds) {
  if (!Number.isFinite(seconds)) return '–';
  const parts = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']], at = parts.findIndex(([size]) => seconds >= size);
  if (at < 0) return '0 s';
  const [size, unit] = parts[at], rest = parts[at + 1], whole = Math.floor(seconds / size);
  const more = rest && rest[0] > 1 ? Math.floor((seconds % size) / rest[0]) : 0;
  return `${whole} ${unit}${more ? ` ${more} ${rest[1]}` : ''}`;
}

function formatBytes(bytes) {
  if (!(bytes > 0)) return '–';
  const [value, unit] = bytes < 2 ** 30 ? [bytes / 2 ** 20, 'MiB'] : [bytes / 2 ** 30, 'GiB'];
  return `${value >= 100 ? Math.round(value) : Number(value.toPrecision(3))} ${unit}`;
}

function timeAxis(area, seconds) {
  const { context, width, height } = area;
  context.fillStyle = colours.dim;
  for (const ago of [seconds, seconds / 2, 0]) {
    const text = !ago ? 'now' : seconds > 60 ? `−${ago / 60} min` : `−${ago} s`, size = context.measureText(text).width;
    const x = width * (1 - ago / seconds);
    context.fillText(text, Math.min(Math.max(x - size / 2, 0), width - size), height - 2);
  }
}

// `series`: [{colour, values}], values from old to new at `times` (ms); stacked areas, or lines, which have a gap where
// a value is null. `now` is the time at the right edge.
function drawSeries(canvas, times, series, { seconds, stacked, label, now = times.at(-1) ?? 0, least = 0 }) {
  const area = prepare(canvas);
  if (!area) return;
  const { context, width } = area;
  const sums = times.map((_, at) => series.reduce((sum, { values }) => sum + (values[at] ?? 0), 0));
  const largest = stacked ? Math.max(...sums, 0) : Math.max(...series.flatMap(({ values }) => values.map((v) => v ?? 0)), 0);
  const y = scale(area, ceiling(Math.max(largest, least)), label), x = (time) => width * (1 - (now - time) / (seconds * 1000));
  timeAxis(area, seconds);
  if (times.length < 2) return;
  let below = times.map(() => 0);
  if (!stacked && series.some(({ values }) => values.includes(null))) {
    for (const { colour, values } of series) drawBroken(context, colour, times.map(x), values.map((value) => (value === null ? null : y(value))));
    return;
  }
  for (const { colour, values } of series) {
    const above = stacked ? below.map((base, at) => base + (values[at] ?? 0)) : values.map((value) => value ?? 0);
    context.beginPath();
    times.forEach((time, at) => (at ? context.lineTo(x(time), y(above[at])) : context.moveTo(x(time), y(above[at]))));
    if (!stacked) {
      context.strokeStyle = colour;
      context.lineWidth = 1.75;
      context.stroke();
      context.globalAlpha = 0.12;
    }
    for (let at = times.length - 1; at >= 0; at -= 1) context.lineTo(x(times[at]), y(stacked ? below[at] : 0));
    context.fillStyle = colour;
    context.fill();
    context.globalAlpha = 1;
    if (stacked) below = above;
  }
}

// A line with gaps; a value without neighbours is a dot.
function drawBroken(context, colour, xs, ys) {
  context.strokeStyle = colour;
  context.fillStyle = colour;
  context.lineWidth = 1.75;
  context.beginPath();
  ys.forEach((y, at) => {
    if (y === null) return;
    const follows = at > 0 && ys[at - 1] !== null;
    if (follows) context.lineTo(xs[at], y); else context.moveTo(xs[at], y);
    if (!follows && (ys[at + 1] ?? null) === null) context.fillRect(xs[at] - 1.5, y - 1.5, 3, 3);
  });
  context.stroke();
}

// Bars from old to new at the right; each a list of parts.
function drawBars(canvas, bars, partColours, label) {
  const area = prepare(canvas);
  if (!area) return;
  const { context, width, height } = area;
  const sums = bars.map((parts) => parts.reduce((sum, part) => sum + part, 0));
  // One long step is not to flatten all others.
  const sorted = sums.toSorted((a, b) => a - b), usual = sorted[Math.floor(sorted.length * 0.97)] ?? 0;
  const y = scale({ context, width, height: height + 14 }, ceiling(usual), label);
  const step = width / Math.max(96, bars.length);
  bars.forEach((parts, at) => {
    let base = 0;
    parts.forEach((part, index) => {
      const top = y(base + part), bottom = y(base);
      context.fillStyle = partColours[index];
      context.fillRect(width - (bars.length - at) * step, top, Math.max(step - 1, 1), bottom - top);
      base += part;
    });
  });
}

// A line from old to new at the right, which has room for `slots` values.
function drawSpark(canvas, values, colour, slots = 120) {
  const area = prepare(canvas);
  if (!area || values.length < 2) return;
  const { context, width, height } = area, top = Math.max(...values, 1e-9), step = width / (slots - 1);
  context.beginPath();
  values.forEach((value, at) => {
    const x = width - (values.length - 1 - at) * step, y = height - 2 - (value / top) * (height - 4);
    if (at) context.lineTo(x, y); else context.moveTo(x, y);
  });
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.stroke();
}

// One square per cell, as large as fits.
function drawCells(canvas, cells, cellColours) {
  const area = prepare(canvas);
  if (!area || !cells.length) return;
  const { context, width, height } = area;
  let size = Math.floor(Math.sqrt((width * height) / cells.length)) + 1;
  while (size > 1 && Math.floor(width / size) * Math.floor(height / size) < cells.length) size -= 1;
  size = Math.min(size, 16);
  const columns = Math.max(Math.floor(width / size), 1), gap = size > 3 ? 1 : 0;
  for (let at = 0; at < cells.length; at += 1) {
    context.fillStyle = cellColours[cells[at]];
    context.fillRect((at % columns) * size, Math.floor(at / columns) * size, size - gap, size - gap);
  }
}
