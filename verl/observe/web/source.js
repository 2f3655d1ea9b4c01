"use strict";
// Where the data comes from: elements of this page (report.html) or the server that served it (verl view --serve).

const Source = (() => {
  const embedded = new Map();
  for (const element of document.querySelectorAll("script[data-path]")) embedded.set(element.dataset.path, element);
  const fromServer = embedded.size === 0;
  const CHUNKS_KEPT = 8;
  const known = new Map(); // path -> promise of its object
  const chunks = new Map(); // the chunks opened last

  async function unpack(element) {
    const packed = atob(element.textContent);
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  async function load(path) {
    if (fromServer) {
      const answer = await fetch(path, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status === 404 ? "The run does not have what this address names." : await answer.text());
      return answer.json();
    }
    const element = embedded.get(path);
    if (element) return unpack(element);
    const group = /^run\/([^/]+)\/group\/([^/]+)\/(.+)\.json$/.exec(path);
    if (group) return embeddedGroup(group[1], group[2], group[3]);
    throw new Error("The report does not contain this part of the run.");
  }

  /**
   * The object at a path; asked for once until `forget`.
   * @param {string} path
   * @returns {Promise<Object>}
   */
  function get(path) {
    if (!known.has(path)) {
      const promise = load(path);
      promise.catch(() => known.delete(path));
      known.set(path, promise);
      if (known.size > 200) known.delete(known.keys().next().value);
    }
    return known.get(path);
  }

  /** Drop what is known below a path, so that the next `get` asks again. */
  function forget(prefix) {
    for (const path of [...known.keys()]) if (path.startsWith(prefix)) known.delete(path);
  }

  const groupsPath = (run, kind) => `run/${run}/groups/${kind}`;

  async function chunk(run, kind, number) {
    const path = `${groupsPath(run, kind)}/${number}`;
    const found = chunks.get(path) || unpack(embedded.get(path));
    chunks.delete(path);
    chunks.set(path, found);
    if (chunks.size > CHUNKS_KEPT) chunks.delete(chunks.keys().next().value);
    return (await found).groups;
  }

  async function embeddedGroup(run, kind, name) {
    const where = await get(`${groupsPath(run, kind)}.json`);
    if (!(name in where.of)) throw new Error("The report does not contain the texts of this step; `verl view RUN --serve` shows all.");
    return (await chunk(run, kind, where.of[name]))[name];
  }

  const group = (run, kind, step, code) => get(`run/${run}/group/${kind}/${step}/${code}.json`);

  /** All that a search compares, of one response. */
  function searchable(uid, row) {
    const turns = (row.turns || []).map((turn) => turn.content);
    return [uid, row.prompt, row.response, row.ground_truth, row.error, ...turns]
      .map((part) => (typeof part === "string" ? part : part === null || part === undefined ? "" : JSON.stringify(part)))
      .join("\n").toLowerCase();
  }

  /**
   * Rows of the index that contain a text. `found(rows, share)` is called as the search goes on.
   * @param {{cancelled: boolean}} ticket
   */
  async function search(run, kind, text, rowAt, ticket, found) {
    if (fromServer) {
      const answer = await load(`run/${run}/search/${kind}?q=${encodeURIComponent(text)}`);
      if (!ticket.cancelled) found(answer.matches, 1);
      return;
    }
    const wanted = text.toLowerCase();
    const where = await get(`${groupsPath(run, kind)}.json`).catch(() => ({ of: {} }));
    const numbers = [...new Set(Object.values(where.of))];
    let matches = [];
    for (const [i, number] of numbers.entries()) {
      const groups = await chunk(run, kind, number);
      if (ticket.cancelled) return;
      for (const each of Object.values(groups))
        for (const row of each.rows)
          if (searchable(each.uid, row).includes(wanted)) matches.push(rowAt(each.step, row.line));
      found(matches, (i + 1) / numbers.length);
    }
    if (!numbers.length) found(matches, 1);
  }

  return { get, group, search, forget, fromServer };
})();
