"use strict";
// A response token by token, coloured by one of its numbers; the numbers of a token under the pointer.

const Tokens = (() => {
  const { h, append, number, signed } = Dom;
  const AT_ONCE = 3000, FOLD = 12;
  const RED = [224, 70, 50], BLUE = [60, 110, 235], GREEN = [30, 160, 90], PURPLE = [140, 70, 220], ORANGE = [240, 140, 20], GREY = [128, 138, 150];

  const paint = ([r, g, b], strength) => `rgb(${r} ${g} ${b} / ${(0.72 * Math.max(0, Math.min(1, strength))).toFixed(3)})`;
  const diverging = (low, high) => (share) => (share < 0 ? paint(low, -share) : paint(high, share));

  /** How a number becomes a colour: `share` puts it on [0, 1] or [-1, 1]; `limit` depends on the group. */
  const KINDS = {
    log_prob: { title: "log-prob", share: (v) => -v / 6, paint: (s) => paint(RED, s), from: 0, ends: () => ["p = 1", "p < 0.3 %"] },
    entropy: { title: "entropy", share: (v, limit) => v / limit, paint: (s) => paint(PURPLE, s), from: 0, least: 1, ends: (limit) => ["0", number(limit)] },
    ratio: { title: "ratio", share: (v) => Math.log2(Math.max(v, 1e-9)), paint: diverging(BLUE, ORANGE), from: -1, ends: () => ["½", "1", "2"] },
    advantage: { title: "advantage", share: (v, limit) => v / limit, paint: diverging(RED, GREEN), from: -1, least: 1e-6, ends: (limit) => [number(-limit), "0", number(limit)] },
    mask: { title: "mask", share: (v) => v, paint: (s) => (s > 0 ? paint(GREEN, 0.55) : paint(GREY, 0.4)), from: 0, ends: () => ["not trained", "trained"] },
    age: { title: "age", share: (v, limit) => v / limit, paint: (s) => paint(ORANGE, s), from: 0, least: 1, ends: (limit) => ["0 updates", number(limit)] },
    computed: { title: "computed", share: (v) => v, paint: (s) => (s > 0 ? paint(GREEN, 0.55) : paint(GREY, 0.4)), from: 0, ends: () => ["left out", "computed"] },
  };

  const valueAt = (tokens, kind, i) => {
    const column = tokens[kind];
    if (column === null || column === undefined) return null;
    return typeof column === "number" ? column : column[i];
  };

  /** The kinds that rows of a group have numbers for. */
  const available = (rows) => Object.keys(KINDS).filter((kind) => rows.some((row) => row.tokens && row.tokens[kind] !== null && row.tokens[kind] !== undefined));

  /** The number of full colour, common to the responses of a group. */
  function limitOf(kind, rows) {
    let most = KINDS[kind].least || 1;
    for (const { tokens } of rows) {
      if (!tokens || tokens[kind] === null || tokens[kind] === undefined) continue;
      for (const value of [tokens[kind]].flat()) if (Math.abs(value) > most) most = Math.abs(value);
    }
    return most;
  }

  function legend(kind, limit) {
    const { from, ends } = KINDS[kind];
    const canvas = h("canvas", { width: 150, height: 1 }), ctx = canvas.getContext("2d");
    for (let x = 0; x < 150; x++) {
      ctx.fillStyle = KINDS[kind].paint(from + (x / 149) * (1 - from));
      ctx.fillRect(x, 0, 1, 1);
    }
    const [low, ...rest] = ends(limit);
    return h("span", { class: "scale", "data-kind": kind }, low, canvas, rest.length > 1 ? `${rest[1]} (middle ${rest[0]})` : rest[0]);
  }

  function shownBlank(text) {
    if (text === "") return "·";
    return /^\s+$/.test(text) && text.includes("\n") ? "↵" : "";
  }

  function span(tokens, kind, limit, i) {
    const value = valueAt(tokens, kind, i), text = tokens.texts[i], blank = shownBlank(text);
    const element = h("span", { "data-i": i, class: blank ? "blank" : null, "data-shown": blank || null }, text);
    if (typeof value === "number") element.style.backgroundColor = KINDS[kind].paint(KINDS[kind].share(value, limit));
    return element;
  }

  /** [from, to, trained] of runs of tokens with the same mask. */
  function segments(tokens) {
    const n = tokens.texts.length, parts = [];
    for (let i = 0, from = 0; i < n; i++) {
      const trained = valueAt(tokens, "mask", i) !== 0;
      const next = i + 1 < n ? valueAt(tokens, "mask", i + 1) !== 0 : !trained;
      if (next !== trained) { parts.push([from, i + 1, trained]); from = i + 1; }
    }
    return parts;
  }

  function block(tokens, kind, limit, from, to) {
    const element = h("p", { class: "tokens" });
    const more = (start) => {
      const end = Math.min(to, start + AT_ONCE);
      for (let i = start; i < end; i++) element.append(span(tokens, kind, limit, i));
      if (end < to) {
        const button = h("button", { type: "button", onclick: () => { button.remove(); more(end); } }, `${number(to - end)} more tokens`);
        element.append(button);
      }
    };
    more(from);
    return element;
  }

  function lines(tokens, i) {
    const log = valueAt(tokens, "log_prob", i);
    const rows = [["token", JSON.stringify(tokens.texts[i])], ["position", number(i)]];
    for (const kind of Object.keys(KINDS)) {
      const value = valueAt(tokens, kind, i);
      if (value === null || value === undefined) continue;
      rows.push([KINDS[kind].title, kind === "advantage" ? signed(value) : number(value)]);
      if (kind === "log_prob") rows.push(["probability", `${number(100 * Math.exp(log))} %`]);
    }
    return h("table", {}, rows.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", {}, value))));
  }

  /** The response; what the model did not write (tool answers, templates) is folded where it is long. */
  function view(tokens, kind, limit) {
    const element = h("div", { class: "coloured" });
    for (const [from, to, trained] of segments(tokens)) {
      if (trained || to - from <= FOLD) { element.append(block(tokens, kind, limit, from, to)); continue; }
      const peek = tokens.texts.slice(from, to).join("").trim().replace(/\s+/g, " ").slice(0, 70);
      const details = h("details", { class: "turn tool", ontoggle: () => { if (details.open && details.children.length < 2) append(details, [block(tokens, kind, limit, from, to)]); } },
        h("summary", {}, `${number(to - from)} tokens the model did not write`, h("span", { class: "peek" }, peek)));
      element.append(details);
    }
    const hover = (event) => {
      const at = event.target.closest("[data-i]");
      Dom.tip(at ? lines(tokens, Number(at.dataset.i)) : null, event.clientX, event.clientY);
    };
    element.addEventListener("pointermove", hover);
    element.addEventListener("pointerdown", hover);
    element.addEventListener("pointerleave", () => Dom.tip(null));
    return element;
  }

  return { KINDS, available, limitOf, legend, view, segments };
})();
