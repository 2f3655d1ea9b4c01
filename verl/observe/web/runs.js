"use strict";
// The runs of this page, which one continues which, and their colours.

const Runs = (() => {
  const { h, number } = Dom;
  const PALETTE = ["#4c6ef5", "#e8590c", "#2b9348", "#c2255c", "#1098ad", "#9c36b5", "#b58900", "#7a5c3e"];
  let all = [];
  let live = false;

  async function load() {
    const found = await Source.get("runs.json");
    all = found.runs;
    live = found.live;
    return all;
  }

  const byId = (id) => all.find((run) => run.id === id) || null;
  const colour = (run) => PALETTE[Math.max(0, all.indexOf(byId(run.id))) % PALETTE.length];
  const parentOf = (run) => (run.parent === null || run.parent === undefined ? null : byId(run.parent));

  /**
   * The series of a run with that of its ancestors up to where each was forked.
   * @returns {Promise<{own: {xs: number[], ys: number[]}, before: {xs: number[], ys: number[]}}>}
   */
  async function series(run, name) {
    const own = points(await Source.get(`run/${run.id}/metrics.json`), name, -Infinity, Infinity);
    const before = { xs: [], ys: [] };
    const seen = new Set([run.id]);
    for (let child = run, parent = parentOf(run); parent && !seen.has(parent.id); child = parent, parent = parentOf(parent)) {
      seen.add(parent.id);
      const metrics = await Source.get(`run/${parent.id}/metrics.json`);
      const end = Math.min(child.fork_step, before.xs.length ? before.xs[0] - 1 : Infinity);
      const part = points(metrics, name, -Infinity, end);
      before.xs = [...part.xs, ...before.xs];
      before.ys = [...part.ys, ...before.ys];
    }
    return { own, before };
  }

  function points(metrics, name, low, high) {
    const xs = [], ys = [];
    const values = metrics.series[name] || [];
    metrics.step.forEach((step, i) => {
      const value = values[i];
      if (value !== null && value !== undefined && step > low && step <= high) { xs.push(step); ys.push(value); }
    });
    return { xs, ys };
  }

  const badge = (run) => h("span", { class: `badge ${run.state}`, title: run.state_text }, run.state);

  function progressText(run) {
    if (run.step === null) return "no step yet";
    return run.total_steps ? `step ${number(run.step)} of ${number(run.total_steps)}` : `step ${number(run.step)}`;
  }

  /** The page "Runs": forks below the run they came from. */
  function page({ href }) {
    const branch = (run) => {
      const forks = all.filter((each) => each.parent === run.id);
      return h("li", {},
        h("div", { class: "card row" },
          h("span", { class: "dot", style: { background: colour(run) } }),
          h("a", { href: href("overview", { run: run.id }) }, run.name), badge(run),
          h("span", { class: "muted" }, progressText(run)),
          run.fork_step !== null && run.parent_name ? h("span", { class: "muted" }, `forked from ${run.parent_name} at step ${number(run.fork_step)}`) : null,
          h("span", { class: "grow" }),
          parentOf(run) ? h("a", { href: href("curves", { run: run.id, with: run.parent }) }, "compare with its parent") : null,
          h("code", { class: "muted wide-only" }, run.path)),
        forks.length ? h("ul", { class: "tree" }, forks.map(branch)) : null);
    };
    const roots = all.filter((run) => !parentOf(run));
    return { element: h("div", {}, h("h2", {}, "Runs"), h("ul", { class: "tree" }, roots.map(branch))) };
  }

  return { load, byId, colour, parentOf, series, badge, progressText, page, all: () => all, live: () => live };
})();
