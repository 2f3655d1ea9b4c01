"use strict";
// The first page of a run: what it is, how it goes, what the rules found, its main curves.

const Overview = (() => {
  const { h, fill, number } = Dom;

  function when(finding) {
    if (!finding.last) return "at start";
    if (finding.times === 1) return `step ${number(finding.last)}`;
    return `steps ${number(finding.first)} to ${number(finding.last)}, ${number(finding.times)} times`;
  }

  /** Of an advice the keys, metrics, files and commands stand out from the words. */
  const coded = (text) => text.split(/(`[^`]+`|\+?[a-z_]\w*(?:[./]\w+)+(?:=[^\s,;()]+)?)/).map((part, i) => (i % 2 ? h("code", {}, part.replaceAll("`", "")) : part));

  function findingCard(finding) {
    return h("article", { class: `card finding ${finding.recent ? "" : "past"}`, "data-rule": finding.rule },
      h("div", { class: "row" }, h("span", { class: "seen grow" }, finding.seen), h("span", { class: "when" }, when(finding))),
      finding.meaning ? h("p", {}, coded(finding.meaning)) : null,
      finding.try ? h("p", { class: "try" }, h("span", { class: "muted" }, "Try "), coded(finding.try)) : null);
  }

  function findings(list) {
    if (!list.length) return null;
    const recent = list.filter((each) => each.recent);
    const past = list.filter((each) => !each.recent);
    return [
      h("h2", {}, "Findings"),
      recent.map(findingCard),
      past.length ? h("details", { class: "section", open: recent.length === 0 }, h("summary", {}, `Earlier findings (${past.length})`), past.map(findingCard)) : null,
    ];
  }

  const crashCard = (crash) => crash && h("article", { class: "card crash" }, h("strong", { class: "bad" }, "The run crashed"),
    h("pre", {}, crash.cause), crash.fix ? h("p", { class: "try" }, "What to do: ", crash.fix) : null);

  /** Names and numbers stand out; paths are long, and break between folders. */
  function fact([label, text]) {
    const [name, path] = label === "run" ? text.split("   ") : [text, null];
    return h("div", {}, h("dt", {}, label), h("dd", { class: label === "model" ? "path" : null }, Dom.breakable(name), path ? h("span", { class: "path" }, Dom.breakable(path)) : null));
  }

  /** @returns {Promise<{element: HTMLElement, refresh: Function, close: Function, theme: Function}>} */
  async function page({ run, href }) {
    const family = Charts.family("overview");
    const top = h("div", {});
    const grid = h("div", { class: "curves" });
    const charts = new Map();
    const mark = run.fork_step === null || run.fork_step === undefined ? [] : [run.fork_step];

    async function refresh() {
      const [summary, metrics] = await Promise.all([Source.get(`run/${run.id}/summary.json`), Source.get(`run/${run.id}/metrics.json`)]);
      fill(top, crashCard(summary.crash),
        h("dl", { class: "card facts" }, summary.facts.map(fact)),
        summary.notes.map((note) => h("p", { class: "muted" }, note)),
        findings(summary.findings),
        StepTime.card(run, metrics),
        h("h2", {}, "Curves ", h("a", { class: "muted", href: href("curves", { run: run.id }) }, `all ${number(Object.keys(metrics.series).length)}`)));
      for (const name of metrics.shown) {
        if (!charts.has(name)) {
          charts.set(name, Charts.card(name, { family, height: 150, mark, about: metrics.about[name] }));
          grid.append(charts.get(name).element);
        }
        charts.get(name).set(await Charts.linesOf([run], name, Charts.bySteps), { smooth: 0, log: false, x: "step" });
      }
      if (!metrics.shown.length) fill(grid, Dom.empty("No step has finished yet."));
    }

    await refresh();
    return {
      element: h("div", {}, top, grid), refresh,
      theme: () => charts.forEach((chart) => chart.redraw()),
      close: () => charts.forEach((chart) => chart.close()),
    };
  }

  return { page };
})();
