"use strict";
// One response: its scores, then its text, its conversation or its coloured tokens.

const ResponseCard = (() => {
  const { h, number, signed, text } = Dom;

  const plain = (value) => (typeof value === "string" ? value : value === null || value === undefined ? "" : JSON.stringify(value, null, 1));

  /** A prompt; the markers of its chat template are there, but do not stand out. */
  const prompt = (value) => h("details", { class: "given", open: true }, h("summary", {}, "prompt"),
    h("p", { class: "text fold" }, plain(value).split(/(<\|[^|<>\s]{1,40}\|>)/).map((part, i) => (i % 2 ? h("span", { class: "marker" }, part) : part))));

  const field = (name, value) => (value === null || value === undefined || value === "" ? null
    : h("div", { class: "field" }, h("div", { class: "role" }, name), h("p", { class: "text" }, plain(value))));

  const EMPTY = () => h("span", { class: "muted" }, "(empty)");

  const isTool = (turn) => turn.role === "tool" || turn.role === "environment";

  function toolCalls(turn) {
    return (turn.tool_calls || []).map((call) => h("details", { class: "turn tool" },
      h("summary", {}, call && call.name ? `call ${call.name}` : "call", h("span", { class: "peek" }, plain(call && (call.failure || call.arguments)).slice(0, 80))),
      h("p", { class: "text mono" }, JSON.stringify(call, null, 1))));
  }

  function turnCard(turn) {
    const reward = (typeof turn.reward === "number" ? `, reward ${number(turn.reward)}` : "") + (turn.note ? `: ${turn.note}` : "");
    const content = plain(turn.content);
    if (!isTool(turn)) return h("div", { class: `turn ${turn.role === "assistant" ? "assistant" : "user"}` }, h("div", { class: "role" }, `${turn.role}${reward}`), h("p", { class: "text" }, content || EMPTY()), toolCalls(turn));
    return h("details", { class: "turn tool" },
      h("summary", {}, `${turn.role}${reward}`, h("span", { class: "peek" }, content.trim().replace(/\s+/g, " ").slice(0, 80))), h("p", { class: "text" }, content), toolCalls(turn));
  }

  /** What the whole conversation earned beyond its turns. */
  function finalReward(row) {
    const turns = row.turns.map((turn) => turn.reward).filter((reward) => typeof reward === "number");
    if (typeof row.score !== "number") return null;
    const own = turns.reduce((sum, reward) => sum + reward, 0);
    const final = Number((row.score - own).toFixed(6)) + 0; // scores are of single precision, and + 0 makes 0 of -0
    return h("p", { class: "turn final" }, h("strong", {}, `final reward ${signed(final)}`), turns.length ? h("span", { class: "muted" }, ` and of its turns ${signed(own)}: ${number(row.score)} in all`) : null);
  }

  function scores(row, name) {
    const tone = name === "log-prob" ? "" : row.score > 0 ? "good" : "bad";
    return [
      typeof row.score === "number" ? h("span", { class: `score ${tone}`, title: name === "log-prob" ? "mean log-probability of a token" : name }, number(row.score)) : null,
      typeof row.advantage === "number" ? h("span", { class: `advantage ${row.advantage > 0 ? "good" : row.advantage < 0 ? "bad" : "muted"}`, title: "advantage, mean over the tokens" }, `adv ${signed(row.advantage)}`) : null,
      h("span", { class: "muted" }, `${number(row.length)} tokens`),
      row.finish_reason ? h("span", { class: row.finish_reason === "length" ? "badge stopped" : "badge" }, row.finish_reason) : null,
      row.extra && row.extra.answer ? h("span", { class: `badge ${row.extra.answer === "chosen" ? "finished" : "crashed"}` }, row.extra.answer) : null,
    ];
  }

  function extras(row) {
    const entries = Object.entries(row.extra || {}).filter(([name]) => name !== "answer");
    if (!entries.length) return null;
    return h("div", { class: "field row" }, entries.map(([name, value]) => h("span", { class: "muted" }, `${name} `, h("span", { class: "mono" }, text(value)))));
  }

  /**
   * @param {Object} row a row of a group
   * @param {{colour: string, limit: number, number: number, prompt: boolean, score: string}} options
   */
  function card(row, options) {
    const coloured = options.colour && row.tokens && row.tokens[options.colour] !== null && row.tokens[options.colour] !== undefined;
    const body = coloured ? Tokens.view(row.tokens, options.colour, options.limit)
      : row.turns && row.turns.length ? [row.turns.map(turnCard), finalReward(row)] : h("p", { class: "text" }, row.response === "" ? EMPTY() : row.response);
    return h("article", { class: "card response", "data-line": row.line },
      h("header", {}, options.number ? h("span", { class: "muted" }, `#${options.number}`) : null, scores(row, options.score)),
      h("div", { class: "body" }, row.error ? h("p", { class: "error" }, plain(row.error)) : null,
        options.prompt ? [prompt(row.prompt), field("ground truth", row.ground_truth)] : null,
        options.prompt ? h("h3", {}, row.turns && row.turns.length ? "conversation" : "response") : null, h("div", { class: "answer" }, body), extras(row)));
  }

  return { card, field, prompt };
})();
