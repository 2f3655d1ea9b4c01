"use strict";
// The controls above the list of responses; they write one filter object and call back.

const Filters = (() => {
  const { h, fill, number } = Dom;
  const BINS = 30;

  const blank = () => ({ step: null, score: null, length: null, turns: null, finish: null, source: null, error: false, matches: null, text: "", groups: "" });

  /** Two fields for the ends of a range; empty means open. */
  function rangeField(label, filter, name, changed) {
    const read = (value, open) => (value.trim() === "" || Number.isNaN(Number(value)) ? open : Number(value));
    const inputs = ["from", "to"].map((end, i) => h("input", { type: "number", step: "any", placeholder: end, "aria-label": `${label} ${end}`, "data-filter": `${name}-${end}`,
      value: filter[name] && Number.isFinite(filter[name][i]) ? String(filter[name][i]) : "", oninput: () => {
        const range = [read(inputs[0].value, -Infinity), read(inputs[1].value, Infinity)];
        filter[name] = range[0] === -Infinity && range[1] === Infinity ? null : range;
        changed();
      } }));
    return h("label", {}, label, inputs);
  }

  function selectField(label, filter, name, names, changed) {
    if (names.length < 2) return null;
    return h("label", {}, label, h("select", { "aria-label": label, "data-filter": name, onchange: (event) => {
      filter[name] = event.target.value === "" ? null : Number(event.target.value);
      changed();
    } }, h("option", { value: "" }, "any"), names.map((each, code) => h("option", { value: code, selected: filter[name] === code }, each || "none"))));
  }

  function chip(label, on, toggle) {
    const button = h("button", { type: "button", class: "chip", "aria-pressed": String(on), onclick: () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(now));
      toggle(now);
    } }, label);
    return button;
  }

  /**
   * Rewards of the rows that pass the other filters; a click on a bar keeps those of the bar.
   * @returns {{element: HTMLElement, draw: function()}}
   */
  function rewardBars(table, filter, changed) {
    const bars = h("div", { class: "histogram", role: "group", "aria-label": "Rewards" });
    const range = Table.range(table.score);
    const width = (range[1] - range[0]) / BINS;
    const ends = (i) => [range[0] + i * width, i === BINS - 1 ? range[1] : range[0] + (i + 1) * width];
    const chosen = (i) => filter.score && filter.score[0] === ends(i)[0] && filter.score[1] === ends(i)[1];
    function draw() {
      const counts = Table.histogram(table.score, Table.mask(table, { ...filter, score: null }), range, BINS);
      const most = Math.max(1, ...counts);
      fill(bars, counts.map((count, i) => {
        const [low, high] = ends(i), middle = (low + high) / 2;
        const off = filter.score && !chosen(i) && !(middle >= filter.score[0] && middle <= filter.score[1]);
        return h("button", { type: "button", class: off ? "off" : null, title: `reward ${number(low)} to ${number(high)}: ${number(count)} responses`,
          style: { height: `${count ? Math.max(6, (100 * count) / most) : 0}%` }, onclick: () => { filter.score = chosen(i) ? null : [low, high]; changed(true); } });
      }));
    }
    return { element: h("div", { class: "row grow" }, h("span", { class: "muted" }, number(range[0])), bars, h("span", { class: "muted" }, number(range[1]))), draw };
  }

  /** All controls. `changed(rebuild)` is called after every change; `search` when the text changed. */
  function make(run, table, state, { changed, search }) {
    const { filter } = state;
    const now = Dom.later(changed, 30);
    const bars = rewardBars(table, filter, changed);
    const input = h("input", { type: "search", placeholder: "Search texts, then Enter", "aria-label": "Search texts", value: filter.text,
      onkeydown: (event) => { if (event.key === "Enter") search(event.target.value); }, onsearch: (event) => search(event.target.value) });
    const names = table.names;
    const element = h("div", { class: "card filters" },
      h("div", { class: "row" }, input, bars.element),
      h("details", { class: "more", open: !matchMedia("(max-width: 640px)").matches || state.more, ontoggle: (event) => { state.more = event.target.open; } }, h("summary", {}, "Filters"), h("div", { class: "row" },
        rangeField("step", filter, "step", now), rangeField(run.score, filter, "score", now), rangeField("tokens", filter, "length", now),
        selectField(run.kind === "offline" ? "answer" : "finish", filter, "finish", names.finish, changed), selectField("source", filter, "source", names.source, changed),
        chip("with error", filter.error, (on) => { filter.error = on; changed(); }),
        state.mode === "groups" ? [["mixed", "mixed rewards"], ["equal", "all equal"]].map(([value, label]) =>
          chip(label, filter.groups === value, (on) => { filter.groups = on ? value : ""; changed(true); })) : null,
        h("button", { type: "button", class: "chip", onclick: () => { Object.assign(filter, blank()); changed(true); } }, "Reset"))));
    return { element, draw: bars.draw, focus: () => input.focus() };
  }

  return { make, blank };
})();
