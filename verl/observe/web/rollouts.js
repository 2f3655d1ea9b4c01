"use strict";
// All responses or groups of a run: filter, sort, search, and the chosen one beside the list.

const Rollouts = (() => {
  const { h, fill, number, signed } = Dom;
  const states = new Map(); // run/kind -> what is chosen, kept while the page is open
  const tables = new WeakMap(); // index object -> table
  const TEXTS = ["finish", "source", "uid", null]; // columns aligned to the left
  let listed = null; // what the list shows, for the next and previous group

  function stateOf(run, kind) {
    const key = `${run.id}/${kind}`;
    if (!states.has(key)) states.set(key, { filter: Filters.blank(), mode: "responses", sort: { by: "step", down: true }, chosen: -1 });
    return states.get(key);
  }

  async function tableOf(run, kind) {
    const index = await Source.get(`run/${run.id}/index/${kind}.json`);
    if (!tables.has(index)) tables.set(index, Table.open(index));
    return tables.get(index);
  }

  function meter(score, [low, high]) {
    const share = Number.isNaN(score) ? 0 : high > low ? (score - low) / (high - low) : Number(score > 0);
    return [h("span", { class: "meter" }, h("i", { style: { width: `${100 * share}%` } })), h("span", {}, number(score))];
  }

  /** A preview in one line: its start gives way to its end, where answers are. */
  function peek(text) {
    const at = text.length > 80 ? text.length - 40 : text.length;
    return h("span", { class: "peek" }, h("span", { class: "start" }, text.slice(0, at) || "(empty)"), h("span", {}, text.slice(at)));
  }

  /** [key to sort by, heading, width, cell] of the columns; narrow screens get the first ones. */
  function columnsOf(run, table, mode, found) {
    const narrow = matchMedia("(max-width: 640px)").matches;
    const scores = Table.range(table.score);
    const cell = (value, more = "") => h("span", { class: `num ${more}` }, value);
    if (mode === "groups") {
      const groups = found.groups;
      return [
        ["step", "step", narrow ? "46px" : "52px", (g) => cell(number(groups.step[g]))],
        ["mean", run.score, narrow ? "90px" : "98px", (g) => cell(meter(groups.mean[g], scores), "metered")],
        ["std", "spread", "60px", (g) => cell(number(groups.std[g]))],
        ["n", "n", "34px", (g) => cell(number(groups.n[g]))],
        ["length", "tokens", "60px", (g) => cell(number(Math.round(groups.length[g])))],
        ...(narrow ? [] : [["error", "errors", "50px", (g) => cell(groups.error[g] ? h("span", { class: "bad" }, number(groups.error[g])) : "")],
          [null, "id", "minmax(60px, 1fr)", (g) => h("span", { class: "muted" }, table.names.uid[table.uid[groups.first[g]]])]]),
      ];
    }
    const turns = table.turns.some((value) => value > 1);
    return [
      ["step", "step", narrow ? "46px" : "52px", (r) => cell(number(table.step[r]))],
      ["score", run.score, narrow ? "90px" : "98px", (r) => cell(meter(table.score[r], scores), "metered")],
      ...(run.kind === "offline" ? [] : [["advantage", "adv", narrow ? "52px" : "62px", (r) => cell(signed(table.advantage[r]))]]),
      ["length", "tokens", "52px", (r) => cell(number(table.length[r]))],
      ...(table.names.finish.join("") === "" && !table.error.includes(1) ? [] : [["finish", run.kind === "offline" ? "answer" : "finish", "minmax(46px, 64px)", (r) => h("span", { class: table.error[r] ? "bad" : "" }, table.error[r] ? "error" : table.names.finish[table.finish[r]])]]),
      ...(narrow ? [] : [
        ...(turns ? [["turns", "turns", "44px", (r) => cell(number(table.turns[r]))]] : []),
        ...(table.names.source.length > 1 ? [["source", "source", "minmax(30px, 110px)", (r) => h("span", {}, table.names.source[table.source[r]])]] : []),
        ["uid", "id", "minmax(36px, 1fr)", (r) => h("span", { class: "muted" }, table.names.uid[table.uid[r]])]]),
    ];
  }

  /** What passes, in order: rows, or groups that have a row that passes. */
  function query(table, state) {
    const began = performance.now();
    let found;
    if (state.mode === "groups") {
      const rows = Table.select(table, state.filter, { by: "step", down: false });
      const groups = Table.groups(table, rows);
      const wanted = { mixed: (g) => groups.std[g] > 1e-9, equal: (g) => groups.std[g] <= 1e-9 }[state.filter.groups] || (() => true);
      const items = Table.sortGroups(groups, state.sort).filter(wanted);
      found = { items, groups, row: (item) => groups.first[item] };
    } else {
      found = { items: Table.select(table, state.filter, state.sort), groups: null, row: (item) => item };
    }
    return { ...found, ms: performance.now() - began };
  }

  /** The group before or after one in the list shown last. */
  function neighbour(run, kind, step, code, by) {
    if (!listed || listed.key !== `${run.id}/${kind}`) return null;
    const { table, found } = listed;
    const same = (item) => table.step[found.row(item)] === step && table.uid[found.row(item)] === code;
    const start = found.items.findIndex(same);
    for (let i = start; start >= 0 && i >= 0 && i < found.items.length; i += by)
      if (!same(found.items[i])) return { step: table.step[found.row(found.items[i])], uid: table.names.uid[table.uid[found.row(found.items[i])]] };
    return null;
  }

  /** What is opened first: training, or where that is empty or its rows were given, validation. */
  async function usualKind(run) {
    const [training, validation] = await Promise.all(["rollouts", "validation"].map((kind) => tableOf(run, kind)));
    return validation.count && (run.kind === "offline" || !training.count) ? "validation" : "rollouts";
  }

  async function page({ run, params, go }) {
    const kind = params.get("kind") || await usualKind(run);
    const state = stateOf(run, kind);
    let table = await tableOf(run, kind), rowAt = Table.rowFinder(table);
    let found = null, columns = [], ticket = { cancelled: false };
    const head = h("div", { class: "line head" }), status = h("span", { class: "found" }), timing = h("span", {}), pane = h("div", { class: "pane" });
    const filterBox = h("div", {});
    let filters = null;

    const groupOf = (position) => { const row = found.row(found.items[position]); return { row, step: table.step[row], uid: table.uid[row] }; };
    const open = (position) => { const { row, step, uid } = groupOf(position); go("group", { run: run.id, kind, step, uid: table.names.uid[uid], line: table.line[row] }); };
    const preview = Dom.later(async (position) => {
      const { row, step, uid } = groupOf(position);
      try {
        const group = await Source.group(run.id, kind, step, uid);
        if (list.chosen() !== position) return;
        const own = group.rows.find((each) => each.line === table.line[row]) || group.rows[0];
        fill(pane, h("div", { class: "row", style: { "margin-bottom": "8px" } }, h("strong", { class: "grow" }, `step ${number(step)}`), h("button", { type: "button", onclick: () => open(position) }, `Open group of ${group.rows.length} `, h("kbd", {}, "enter"))),
          ResponseCard.card(own, { colour: "", prompt: true, score: run.score }));
      } catch (error) {
        fill(pane, Dom.empty(error.message));
      }
    }, 60);
    const list = List.make({
      get columns() { return columns.map((column) => column[2]).join(" "); },
      line: (i) => [...columns.map((column) => column[3](found.items[i])), peek(state.mode === "groups" ? table.prompts[table.uid[found.row(found.items[i])]] : table.text[found.items[i]])],
      select: (position) => {
        state.chosen = position;
        if (getComputedStyle(pane).display === "none") open(position); else preview(position);
      },
      open,
    });

    function drawHead() {
      head.style.gridTemplateColumns = columns.map((column) => column[2]).join(" ");
      fill(head, columns.map(([by, title]) => h("button", { type: "button", disabled: by === null, "data-sort": by, class: TEXTS.includes(by) ? "left" : null, "aria-sort": state.sort.by === by ? (state.sort.down ? "descending" : "ascending") : null,
        onclick: () => { state.sort = { by, down: state.sort.by === by ? !state.sort.down : true }; update(); } },
      title, state.sort.by === by ? (state.sort.down ? " ↓" : " ↑") : "")));
    }

    function update(keep = -1) {
      const began = performance.now();
      found = query(table, state);
      listed = { key: `${run.id}/${kind}`, table, found };
      columns = columnsOf(run, table, state.mode, found);
      drawHead();
      filters.draw();
      list.set(found.items.length, keep < found.items.length ? keep : -1);
      const ms = performance.now() - began;
      const what = state.mode === "groups" ? "groups" : `of ${number(table.count)} responses`;
      fill(status, `${number(found.items.length)} ${what}`);
      fill(timing, `${ms.toFixed(ms < 10 ? 1 : 0)} ms`);
      Object.assign(status.dataset, { found: found.items.length, ms: ms.toFixed(2), queryMs: found.ms.toFixed(2) });
    }

    function changed(rebuild) {
      state.chosen = -1;
      if (rebuild) build();
      update();
      fill(pane, Dom.empty(found.items.length ? "Choose a response." : "No response passes the filter."));
    }

    async function search(text) {
      ticket.cancelled = true;
      ticket = { cancelled: false };
      state.filter.text = text;
      if (!text.trim()) { state.filter.matches = null; changed(); return; }
      const pass = new Uint8Array(table.count);
      try {
        await Source.search(run.id, kind, text, rowAt, ticket, (rows, share) => {
          for (const row of rows) if (row !== undefined) pass[row] = 1;
          state.filter.matches = pass;
          changed();
          if (share < 1) fill(timing, `searching, ${Math.round(100 * share)} %`);
        });
      } catch (error) {
        fill(timing, error.message);
      }
    }

    function build() {
      filters = Filters.make(run, table, state, { changed, search });
      fill(filterBox, filters.element);
    }

    async function refresh() {
      table = await tableOf(run, kind);
      rowAt = Table.rowFinder(table);
      if (state.filter.text) await search(state.filter.text);
      build();
      update(list.chosen());
    }

    if (!(state.sort.by in table) && state.mode === "responses") state.sort = { by: "step", down: true };
    if (state.filter.matches && state.filter.matches.length !== table.count) state.filter.matches = null;
    build();
    const modes = Dom.choice("Rows", [["responses", "Responses"], ["groups", "Groups"]], state.mode, (value) => { state.mode = value; state.sort = { by: "step", down: true }; changed(true); });
    const kinds = Dom.choice("Kind", [["rollouts", "Training"], ["validation", "Validation"]], kind, (value) => go("rollouts", { run: run.id, kind: value }));
    const keys = h("span", { class: "muted wide-only" }, h("kbd", {}, "j"), " ", h("kbd", {}, "k"), " move  ", h("kbd", {}, "enter"), " open  ", h("kbd", {}, "/"), " search");
    const element = h("div", {}, h("div", { class: "row", style: { "margin-bottom": "8px" } }, kinds, modes, h("span", { class: "grow" }), keys), filterBox,
      table.left_out ? h("p", { class: "muted left-out" }, table.left_out) : null,
      h("div", { class: "split" }, h("div", { class: "card list" }, head, list.element, h("div", { class: "status" }, status, timing)), pane));
    return {
      element: table.count ? element : h("div", {}, kinds, Dom.empty(table.left_out || (run.kind === "offline" ? `No sample was recorded: there are those of ${kind === "validation" ? "each validation (data.val_files)" : "the first step"}.` : "No response was recorded."))), refresh,
      shown() {
        update(state.chosen);
        fill(pane, Dom.empty("Choose a response."));
        if (table.count && getComputedStyle(pane).display !== "none" && found.items.length) list.choose(Math.max(0, state.chosen));
      },
      close: () => { ticket.cancelled = true; },
      key(name) {
        if (!table.count) return false;
        const moves = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: list.page(), PageUp: -list.page(), Home: -table.count, End: table.count };
        if (name in moves) list.move(moves[name]);
        else if (name === "Enter" && list.chosen() >= 0) open(list.chosen());
        else if (name === "/") filters.focus();
        else if (name === "Escape") { Object.assign(state.filter, Filters.blank()); changed(true); } else return false;
        return true;
      },
    };
  }

  return { page, neighbour, tableOf };
})();
