// Runs the playground's script without a browser: node playground_stub.js SCRIPT, with a list of tasks as JSON on
// standard input. Prints what the page offers for each, what it sends, and what it shows.

const fs = require('fs'), vm = require('vm');

class Element {
  constructor(attributes = {}, children = []) {
    Object.assign(this, { attributes, children, dataset: {}, value: '', textContent: '', hidden: false, classList: { remove() {} } });
  }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; this.value = children[0].attributes.value ?? ''; }
  querySelector() { return this.children.find(({ attributes }) => attributes.class === 'empty') ?? null; }
  appendData(text) { this.textContent += text; }
  addEventListener() {}
  remove() {}
}

const ANSWERS = {
  'v1/embeddings': { data: [{ embedding: Array.from({ length: 20 }, (_, at) => at / 7) }], usage: { prompt_tokens: 3, completion_tokens: 0 } },
  classify: { data: [{ label: 'good', probs: [0.1, 0.9] }], usage: { prompt_tokens: 3, completion_tokens: 0 } },
};
const EVENTS = ['{"choices":[{"delta":{"content":"hi"}}]}', '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}', '[DONE]'];
const elements = {}, sent = [];
const page = {
  byId: (id) => (elements[id] ??= new Element()),
  element: (name, attributes = {}, ...children) => new Element(attributes, children),
  document: { createTextNode: (text) => Object.assign(new Element(), { textContent: text }) },
  fetch: async (url, { body } = {}) => {
    if (!url.startsWith('dashboard')) sent.push([url, JSON.parse(body)]);
    return { ok: true, json: async () => ANSWERS[url], events: url.startsWith('v1/chat') ? EVENTS : [] };
  },
  readEvents: async ({ events }, take) => events.forEach((event) => take('', event)),
  formatTime: () => '1 ms', formatNumber: String, headers: (more) => more, address: (path) => path,
  shown: { server: { models: ['m'], max_model_len: 512 } },
  addEventListener() {}, setTimeout, encodeURIComponent, performance, AbortController, crypto: globalThis.crypto,
};

(async () => {
  const script = fs.readFileSync(process.argv[2], 'utf8');
  vm.runInNewContext(`${script}\nwatchJourney = async (id) => { fetch('dashboard'); }; page.run = { offer, send };`, Object.assign(page, { page }));
  const said = [];
  for (const task of JSON.parse(fs.readFileSync(0, 'utf8'))) {
    page.run.offer(task);
    sent.length = 0;
    await page.run.send('The sea');
    const turns = elements.conversation.children.map(({ children }) => children.map(({ textContent }) => textContent).join(''));
    said.push({ task, endpoints: elements.endpoint.children.map(({ children }) => children[0]), parameters: !elements.parameters.hidden, sent: [...sent], shown: turns.at(-1), usage: elements.usage.textContent });
  }
  console.log(JSON.stringify(said));
})();
