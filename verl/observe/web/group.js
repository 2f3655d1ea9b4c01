"use strict";
// The responses to one prompt side by side, with rewards, advantages and coloured tokens.

const Group = (() => {
  const { h, fill, number } = Dom;
  const chosen = { colour: "", layout: "columns", order: "line" };
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  function facts(rows, name) {
    const scores = rows.map((row) => row.score).filter((score) => typeof score === "number");
    const count = rows.length === 1 ? "one response" : `${number(rows.length)} responses`;
    if (!scores.length) return `${count} without a ${name}`;
    if (rows.length === 1) return `${count}, ${name} ${number(scores[0])}`;
    const average = mean(scores), spread = Math.sqrt(mean(scores.map((score) => (score - average) ** 2)));
    return `${count}, ${name} ${number(average)} ± ${number(spread)}, from ${number(Math.min(...scores))} to ${number(Math.max(...scores))}`;
  }

  const ORDERS = { line: (a, b) => a.line - b.line, score: (a, b) => (b.score === null ? -Infinity : b.score) - (a.score === null ? -Infinity : a.score) || a.line - b.line, length: (a, b) => a.length - b.length || a.line - b.line };

  async function page({ run, params, go, href }) {
    const kind = params.get("kind") === "validation" ? "validation" : "rollouts";
    const step = Number(params.get("step")), table = await Rollouts.tableOf(run, kind);
    const code = table.names.uid.indexOf(params.get("uid"));
    if (code < 0) throw new Error(`This run has no ${kind === "validation" ? "validation" : "training"} prompt with the id ${params.get("uid")}.`);
    const group = await Source.group(run.id, kind, step, code);
    const kinds = Tokens.available(group.rows);
    const samePrompt = group.rows.every((row) => row.prompt === group.rows[0].prompt);
    const columns = h("div", { class: "columns" }), legend = h("span", {});
    let at = 0;

    function draw() {
      const colour = kinds.includes(chosen.colour) ? chosen.colour : "";
      const limit = colour ? Tokens.limitOf(colour, group.rows) : 1;
      const rows = [...group.rows].sort(ORDERS[chosen.order]);
      columns.classList.toggle("stacked", chosen.layout === "stacked");
      fill(columns, rows.map((row) => ResponseCard.card(row, { colour, limit, number: group.rows.indexOf(row) + 1, prompt: !samePrompt, score: run.score })));
      fill(legend, colour ? Tokens.legend(colour, limit) : null);
      focus(at, false);
    }

    function focus(position, scroll = true) {
      at = Math.max(0, Math.min(columns.children.length - 1, position));
      [...columns.children].forEach((card, i) => { if (i === at) card.setAttribute("aria-current", "true"); else card.removeAttribute("aria-current"); });
      if (scroll && columns.children[at]) columns.children[at].scrollIntoView({ block: "nearest", inline: "nearest" });
    }

    const back = () => go("rollouts", { run: run.id, kind });
    function move(by) {
      const next = Rollouts.neighbour(run, kind, step, code, by);
      if (next) go("group", { run: run.id, kind, ...next });
    }

    const colours = Dom.choice("Colour", [["", "Text"], ...kinds.map((each) => [each, Tokens.KINDS[each].title])], kinds.includes(chosen.colour) ? chosen.colour : "", (value) => { chosen.colour = value; draw(); });
    colours.classList.add("colours");
    const layout = Dom.choice("Layout", [["columns", "Side by side"], ["stacked", "Stacked"]], chosen.layout, (value) => { chosen.layout = value; draw(); });
    const order = Dom.choice("Order", [["line", "As recorded"], ["score", "Best first"], ["length", "Shortest first"]], chosen.order, (value) => { chosen.order = value; draw(); });
    const line = Number(params.get("line"));
    at = params.has("line") ? Math.max(0, [...group.rows].sort(ORDERS[chosen.order]).findIndex((row) => row.line === line)) : 0;
    draw();
    const first = group.rows[0];
    return {
      element: h("div", { class: "group" },
        h("div", { class: "row" }, h("a", { href: href("rollouts", { run: run.id, kind }) }, "← ", kind === "validation" ? "Validation" : "Training"), h("strong", {}, `step ${number(group.step)}`),
          h("span", {}, facts(group.rows, run.score)), h("code", { class: "muted wide-only" }, group.uid), h("span", { class: "grow" }),
          h("button", { type: "button", onclick: () => move(-1) }, "Previous ", h("kbd", { class: "wide-only" }, "k")), h("button", { type: "button", onclick: () => move(1) }, "Next ", h("kbd", { class: "wide-only" }, "j"))),
        samePrompt && first ? h("div", { class: "card prompt", style: { margin: "10px 0" } }, ResponseCard.prompt(first.prompt), ResponseCard.field("ground truth", first.ground_truth)) : null,
        h("div", { class: "row", style: { margin: "10px 0" } }, kinds.length ? colours : null, legend, h("span", { class: "grow" }), order, layout),
        group.tokens || run.kind === "offline" ? null : group.tokens_note ? h("p", { class: "muted" }, group.tokens_note) : null, columns),
      shown: () => focus(at),
      key(name) {
        if (name === "ArrowRight") focus(at + 1); else if (name === "ArrowLeft") focus(at - 1);
        else if (name === "j") move(1); else if (name === "k") move(-1); else if (name === "Escape") back();
        else if (name === "c" && kinds.length) { const all = ["", ...kinds]; chosen.colour = all[(all.indexOf(kinds.includes(chosen.colour) ? chosen.colour : "") + 1) % all.length]; colours.mark(chosen.colour); draw(); } else return false;
        return true;
      },
    };
  }

  return { page };
})();
