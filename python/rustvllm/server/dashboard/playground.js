// The playground: streams a chat or a completion, or shows the vector or the class of a text, next to the request's
// journey.

const MAX_JOURNEY_ROWS = 400;
const DEFAULT_COMPLETION = 256; // tokens; of a chat: all that the context has room for, or this in a long context
const DEFAULT_CHAT = 2048;
let conversation = []; // of the chat: {messages, tokens} of each turn
let flight = null; // {abort, stopped} of the request under way

// What a server's engines do (`task` of its state) → what the playground offers there.
const TASKS = {
  generate: { endpoints: ['chat', 'completion'], hint: 'Ask something, for example: Tell me a story about a fox.', empty: 'Ask something.' },
  embed: { endpoints: ['embedding'], hint: 'A text whose vector you want, for example: The sea was calm.', empty: 'Send a text: its vector comes here.' },
  classify: { endpoints: ['classification'], hint: 'A text to classify, for example: The sea was calm.', empty: 'Send a text: its class comes here.' },
};
const MAX_SHOWN_NUMBERS = 12;

// Endpoints that answer with a vector of a text: their paths, how their ids begin, and what is shown of an answer.
const POOLED = {
  embedding: {
    path: 'v1/embeddings', prefix: 'embd-',
    said: ({ embedding }) => `${embedding.length} numbers: ${someNumbers(embedding)}`,
  },
  classification: {
    path: 'classify', prefix: 'classify-',
    said: ({ label, probs }) => `${label}: ${shortNumber(Math.max(...probs))}${probs.length > 1 ? `\nall ${probs.length} labels: ${someNumbers(probs)}` : ''}`,
  },
};

const shortNumber = (number) => String(Number(number.toPrecision(4)));
const someNumbers = (numbers) => numbers.slice(0, MAX_SHOWN_NUMBERS).map(shortNumber).join(', ') + (numbers.length > MAX_SHOWN_NUMBERS ? ', …' : '');

// Offers what the server's engines do.
function offer(task) {
  const form = byId('ask'), { endpoints, hint, empty } = TASKS[task];
  if (form.dataset.task === task) return;
  form.dataset.task = task;
  byId('endpoint').replaceChildren(...endpoints.map((name) => element('option', { value: name }, name)));
  byId('parameters').hidden = task !== 'generate'; // they are those of generated text
  byId('prompt').placeholder = hint;
  const note = byId('conversation').querySelector('.empty');
  if (note && task !== 'generate') note.textContent = empty;
}

const numberIn = (id) => (byId(id).value === '' ? undefined : Number(byId(id).value));

function turn(role, text, kind = '') {
  const words = element('p', { class: `turn ${kind}` }, element('b', {}, role));
  const content = document.createTextNode(text);
  words.append(content);
  const log = byId('conversation');
  log.querySelector('.empty')?.remove();
  log.append(words);
  log.scrollTop = log.scrollHeight;
  return {
    words,
    add(more) {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      content.appendData(more);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    },
  };
}

// The most tokens of an answer where the user says nothing; undefined leaves it to the server: all that fit.
function defaultMaxTokens(isChat) {
  const room = shown?.server.max_model_len ?? 0;
  if (!isChat) return Math.min(DEFAULT_COMPLETION, Math.max(Math.floor(room / 2), 1));
  return room > 4 * DEFAULT_CHAT && knownTokens() + 2 * DEFAULT_CHAT < room ? DEFAULT_CHAT : undefined;
}

const knownTokens = () => conversation.reduce((sum, { tokens }) => sum + tokens, 0);

// A conversation that would fill the context loses its oldest turns; says how many.
function forgetOldest(prompt) {
  const room = shown?.server.max_model_len ?? Infinity, wanted = Math.min(numberIn('max_tokens') ?? 64, room / 2);
  let forgotten = 0;
  while (conversation.length && knownTokens() + prompt.length / 2 + wanted > room) {
    conversation.shift();
    forgotten += 1;
  }
  return forgotten;
}

function responseFormat(text) {
  if (text === '') return undefined;
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    throw new Error(`JSON schema: ${error.message}`);
  }
  return { type: 'json_schema', json_schema: { name: 'answer', schema } };
}

function bodyOf(prompt, id) {
  if (byId('endpoint').value in POOLED) return { model: shown?.server.models[0], input: prompt, request_id: id };
  const isChat = byId('endpoint').value === 'chat', stop = byId('stop-text').value;
  const body = {
    model: shown?.server.models[0],
    stream: true,
    stream_options: { include_usage: true },
    request_id: id,
    temperature: numberIn('temperature'),
    max_tokens: numberIn('max_tokens') ?? defaultMaxTokens(isChat),
    top_p: numberIn('top_p'),
    seed: numberIn('seed'),
    stop: stop === '' ? undefined : stop.replaceAll('\\n', '\n'),
    response_format: responseFormat(byId('schema').value.trim()),
  };
  return isChat ? { ...body, messages: [...conversation.flatMap(({ messages }) => messages), { role: 'user', content: prompt }] } : { ...body, prompt };
}

async function send(prompt) {
  const abort = new AbortController(), endpoint = byId('endpoint').value, isChat = endpoint === 'chat', pooled = POOLED[endpoint];
  flight = { abort, stopped: false };
  byId('send').disabled = true;
  byId('stop').disabled = false;
  byId('usage').textContent = '';
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, '0')).join('');
  turn(isChat ? 'you' : pooled ? 'text' : 'prompt', prompt);
  const forgotten = isChat ? forgetOldest(prompt) : 0;
  if (forgotten) turn('note', `The context of ${shown.server.max_model_len} tokens is full: the oldest ${forgotten === 1 ? 'turn is' : `${forgotten} turns are`} left out.`, 'note');
  const answer = turn(isChat ? 'model' : endpoint, '', 'live');
  let text = '', isThinking = false;
  const clock = { sent: 0, first: 0, last: 0, tokens: 0, finish: '', usage: null };
  try {
    await watchJourney(`${pooled ? pooled.prefix : isChat ? 'chatcmpl-' : 'cmpl-'}${id}`, abort.signal);
    clock.sent = performance.now();
    const response = await fetch(address(pooled ? pooled.path : isChat ? 'v1/chat/completions' : 'v1/completions'), {
      method: 'POST', headers: headers({ 'Content-Type': 'application/json' }), body: JSON.stringify(bodyOf(prompt, id)), signal: abort.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    if (pooled) {
      const { data: [first], usage } = await response.json();
      answer.add(pooled.said(first));
      Object.assign(clock, { first: performance.now(), usage });
    } else await readEvents(response, (_, data) => {
      if (data === '[DONE]') return;
      const { choices, usage, error } = JSON.parse(data);
      if (error) throw new Error(error.message);
      if (usage) clock.usage = usage;
      for (const { delta, text: more, finish_reason: finish } of choices) {
        const piece = more ?? delta?.content ?? '', thought = delta?.reasoning ?? '';
        if (piece || thought) {
          clock.first ||= performance.now();
          clock.last = performance.now();
          // What was thought is shown, and no part of the conversation.
          answer.add(thought + (piece && isThinking ? '\n\n' : '') + piece);
          isThinking = Boolean(thought);
          text += piece;
        }
        if (finish) clock.finish = finish;
      }
    });
  } catch (error) {
    if (flight.stopped) clock.finish = 'stopped here';
    else turn('error', error.message, 'error');
  } finally {
    answer.words.classList.remove('live');
    if (isChat && text) rememberTurn(prompt, text, clock.usage);
    if (clock.finish === 'length') noteLength(answer.words, clock.usage);
    showUsage(clock);
    flight = null;
    byId('send').disabled = false;
    byId('stop').disabled = true;
  }
}

function rememberTurn(prompt, text, usage) {
  const tokens = usage ? Math.max(usage.total_tokens - knownTokens(), 0) : (prompt.length + text.length) / 3;
  conversation.push({ messages: [{ role: 'user', content: prompt }, { role: 'assistant', content: text }], tokens });
}

// An answer that was cut is to look like one.
function noteLength(words, usage) {
  const tokens = usage?.completion_tokens, room = shown?.server.max_model_len;
  const isFull = usage && usage.total_tokens >= room;
  const why = isFull ? `the context of ${room} tokens is full` : 'max_tokens, under Parameters, allows more';
  words.after(element('p', { class: 'cut' }, `stopped at ${tokens ?? '?'} tokens: ${why}`));
}

function showUsage({ sent, first, last, finish, usage }) {
  const parts = [];
  const isText = (byId('ask').dataset.task ?? 'generate') === 'generate';
  if (first) parts.push(`${isText ? 'first token' : 'answer'} after ${formatTime((first - sent) * 1e6)}`);
  if (usage) {
    parts.push(isText ? `${usage.prompt_tokens} + ${usage.completion_tokens} tokens` : `${usage.prompt_tokens} tokens`);
    if (last > first && usage.completion_tokens > 1) parts.push(`${formatNumber(((usage.completion_tokens - 1) * 1000) / (last - first))} tokens/s`);
  }
  if (finish) parts.push(finish === 'length' ? `stopped at ${usage?.completion_tokens ?? '?'} tokens` : finish);
  byId('usage').textContent = parts.join(' · ');
}

function stop() {
  if (!flight) return;
  flight.stopped = true;
  flight.abort.abort();
}

byId('ask').addEventListener('submit', (event) => {
  event.preventDefault();
  const prompt = byId('prompt').value;
  if (flight || !prompt.trim() || !event.target.reportValidity()) return;
  byId('prompt').value = '';
  send(prompt);
});
byId('prompt').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId('ask').requestSubmit();
  }
});
byId('stop').addEventListener('click', stop);
addEventListener('keydown', (event) => { if (event.key === 'Escape') stop(); });
byId('clear').addEventListener('click', () => {
  conversation = [];
  byId('conversation').replaceChildren(element('p', { class: 'empty' }, TASKS[byId('ask').dataset.task ?? 'generate'].empty));
  byId('usage').textContent = '';
});

// -- the journey ---------------------------------------------------------------------------------------------------

let journey = null;

// Resolves when the engines watch, so that nothing of the request is missed; a journey that cannot be had is said.
async function watchJourney(id, signal) {
  const mine = { id, began: 0, steps: new Map(), rows: 0, marks: {}, end: '' };
  journey = mine;
  byId('journey-rows').replaceChildren();
  byId('stages').hidden = true;
  byId('stage-legend').replaceChildren();
  byId('journey-id').textContent = id;
  byId('journey-empty').hidden = true;
  // The journey outlives its request by what the engine has still to say of it.
  const own = new AbortController();
  signal.addEventListener('abort', () => setTimeout(() => own.abort(), 2000));
  try {
    const response = await fetch(address(`dashboard/journey?request_id=${encodeURIComponent(id)}`), { headers: headers(), cache: 'no-store', signal: own.signal });
    if (!response.ok) throw new Error(await errorOf(response));
    await new Promise((resolve, reject) => {
      readEvents(response, (name, data) => {
        if (name === 'begun') resolve();
        if (journey !== mine) { own.abort(); return; }
        if (name === 'records') takeRecords(mine, JSON.parse(data));
        if (name === 'end') {
          const { reason } = JSON.parse(data);
          if (reason !== 'finished') noteJourney(mine, `the watch has ended: ${reason}`);
          resolve();
        }
      }).then(resolve, reject);
    });
  } catch (error) {
    if (error.name !== 'AbortError') noteJourney(mine, `the journey cannot be shown: ${error.message}`);
  }
}

function noteJourney(mine, words) {
  if (journey !== mine) return;
  addRow(mine, ['', '', words, '', '', '', '', '', ''], 'quiet');
}

const CELLS = ['right', 'step', '', 'right', 'right extra', 'right extra', 'right', 'right extra', 'right extra'];

function addRow(mine, cells, kind = '') {
  const row = element('tr', { class: kind }, ...cells.map((cell, at) => element('td', { class: CELLS[at] }, cell)));
  const body = byId('journey-rows'), scroll = byId('journey-scroll');
  const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
  body.append(row);
  mine.rows += 1;
  if (mine.rows > MAX_JOURNEY_ROWS) body.firstChild.remove();
  if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
  return row;
}

function stepOf(mine, number) {
  if (!mine.steps.has(number)) mine.steps.set(number, { number, row: null, tokens: 0 });
  return mine.steps.get(number);
}

const EVENTS = {
  waiting: 'enters the queue', preempted: 'preempted: gives its blocks back', swapped: 'preempted: its blocks go to CPU memory', finished: 'finished',
};

function takeRecords(mine, { records }) {
  for (const record of records) {
    mine.began ||= record.timestamp_ns;
    const { event, step, timestamp_ns: time, duration_ns: duration, extras = {}, num_computed_tokens: computed, num_tokens: tokens } = record;
    const at = formatTime(time - mine.began), counters = tokens === undefined ? '' : `${computed} / ${tokens}`;
    if (event === 'waiting') mine.marks.arrived ??= time;
    if (event === 'finished') mine.marks.finished = time;
    if (event in EVENTS) {
      const why = event === 'finished' ? ` (${record.status.replace('FINISHED_', '').toLowerCase().replaceAll('_', ' ')})` : '';
      addRow(mine, [at, '', EVENTS[event] + why, counters, '', '', '', '', ''], 'quiet');
    } else if (event === 'scheduled') {
      const known = stepOf(mine, step), cached = extras.num_cached_tokens && !mine.marks.scheduled ? `, ${extras.num_cached_tokens} from the prefix cache` : '';
      mine.marks.scheduled ??= time;
      const isPrompt = !mine.marks.token;
      const drafts = extras.num_draft_tokens ? `, ${extras.num_draft_tokens} of them drafted` : '';
      const runs = `${extras.num_scheduled_tokens} token${extras.num_scheduled_tokens === 1 ? '' : 's'}${isPrompt ? ' of the prompt' : ''}${cached}${drafts}`;
      const added = extras.new_block_ids?.length ? ` +${extras.new_block_ids.length}` : '';
      known.row = addRow(mine, [at, String(step), runs, counters, `${extras.num_blocks}${added}`, '', '', '', '']);
      if (extras.new_block_ids?.length) known.row.children[4].title = `new blocks: ${extras.new_block_ids.join(' ')}`;
      if (known.schedule !== undefined) known.row.children[5].textContent = formatTime(known.schedule);
    } else if (event === 'verified') {
      const { row } = stepOf(mine, step);
      if (row) row.children[2].append(` (${extras.num_accepted_tokens} accepted, ${extras.num_rejected_tokens} rejected)`);
    } else if (event === 'token') {
      mine.marks.token ??= time;
      const { row } = stepOf(mine, step);
      if (row) row.children[2].append(' → ', element('span', { class: 'token', title: `token id ${extras.token_id}` }, JSON.stringify(extras.text ?? extras.token_id)));
    } else if (step !== undefined) {
      const known = stepOf(mine, step), place = { planned: 5, ran: 6, sampled: 7, updated: 8 }[event];
      if (event === 'planned') known.schedule = duration;
      if (known.row && place) {
        known.row.children[place].textContent = formatTime(duration);
        if (extras.num_reqs !== undefined) known.row.children[1].title = `with ${extras.num_reqs} requests and ${extras.num_scheduled_tokens} tokens`;
      }
      if (event === 'updated') mine.steps.delete(step);
    }
    mine.marks.latest = Math.max(mine.marks.latest ?? 0, time);
  }
  showStages(mine);
}

// Queue, prompt and generation as parts of one bar.
function showStages({ marks: { arrived, scheduled, token, finished, latest } }) {
  if (arrived === undefined || latest === undefined) return;
  const end = finished ?? latest;
  const stages = [
    ['queue', 'queue', (scheduled ?? end) - arrived],
    ['prefill', 'prompt', scheduled === undefined ? 0 : (token ?? end) - scheduled],
    ['decode', 'generation', token === undefined ? 0 : end - token],
  ];
  const bar = byId('stages');
  bar.hidden = false;
  if (!bar.children.length) bar.append(...stages.map(([name]) => element('i', { class: `stage-${name}` })));
  stages.forEach(([, , spent], at) => { bar.children[at].style.flexGrow = String(Math.max(spent, 0)); });
  showLegend('stage-legend', stages.map(([name, said, spent]) => [{ queue: 'wait', prefill: 'prompt', decode: 'generation' }[name], said, formatTime(Math.max(spent, 0))]));
}
