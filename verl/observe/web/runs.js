"use strict";
// The runs of this page, which one continues which, and their colours.

const Runs = (() => {
  const { h, fill, number } = Dom;
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

  // -- the page "Runs" ------------------------------------------------------------------------------------------------

  const sorting = { by: null, down: true };
  const MARKS = { reward: "of the newest step", validation: "mean of the main scores, newest", validation_first: "of the first validation", loss: "of the newest step", validation_loss: "newest", accuracy: "share of held-out pairs, newest", step_seconds: "of the newest steps, with validation and checkpoints" };
  const RESULTS = [["reward", "reward"], ["validation", "validation"], ["validation_first", "at first"], ["loss", "loss"], ["validation_loss", "validation loss"], ["accuracy", "accuracy"], ["step_seconds", "s per step"]];
  const LOW_IS_BEST = ["loss", "validation_loss", "step_seconds"];

  /** Runs with their depth: forks below the run they came from. */
  function family(run, depth = 0) {
    return [[run, depth], ...all.filter((each) => each.parent === run.id).flatMap((each) => family(each, depth + 1))];
  }

  /** In the order given with forks below their parents, or by a number; runs without it come last. */
  function ordered() {
    const roots = all.filter((run) => !parentOf(run)).flatMap((run) => family(run));
    if (!sorting.by) return roots;
    const value = ([run]) => (sorting.by === "step" ? run.step : run.results[sorting.by]);
    const missing = (each) => value(each) === null || value(each) === undefined;
    return roots.map(([run]) => [run, 0]).sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : (value(a) - value(b)) * (sorting.down ? -1 : 1)));
  }

  function page({ href }) {
    const body = h("div", { class: "card wide-table" });
    const columns = RESULTS.filter(([key]) => all.some((run) => run.results[key] !== null));

    function heading(key, title, about) {
      const chosen = sorting.by === key;
      return h("th", { class: key ? "num" : null, "aria-sort": chosen && key ? (sorting.down ? "descending" : "ascending") : null }, Dom.described(h("button", { type: "button", "data-sort": key || "given", onclick: () => {
        Object.assign(sorting, { by: key, down: chosen ? !sorting.down : !LOW_IS_BEST.includes(key) });
        draw();
      } }, title, chosen && key ? (sorting.down ? " ↓" : " ↑") : ""), about));
    }

    /** Of the runs that have a number, the best one; none where all have the same, or for where a run began. */
    const best = new Map(columns.filter(([key]) => key !== "validation_first").map(([key]) => {
      const values = all.map((run) => run.results[key]).filter((value) => value !== null);
      return [key, new Set(values).size < 2 ? null : LOW_IS_BEST.includes(key) ? Math.min(...values) : Math.max(...values)];
    }));

    function line([run, depth]) {
      return h("tr", { "data-run": run.id, "data-depth": depth },
        h("td", { style: { "padding-left": `${10 + 22 * depth}px` } }, h("span", { class: "dot", style: { background: colour(run) } }), h("a", { href: href("overview", { run: run.id }) }, Dom.breakable(run.name)),
          run.fork_step !== null && run.parent_name ? h("div", { class: "muted small" }, `forked from ${run.parent_name} at step ${number(run.fork_step)} `, parentOf(run) ? h("a", { href: href("curves", { run: run.id, with: run.parent }) }, "compare") : null) : null),
        columns.map(([key]) => h("td", { class: `num ${run.results[key] !== null && run.results[key] === best.get(key) ? "best" : ""}`, "data-result": key }, number(run.results[key]))),
        h("td", { class: "num" }, run.step === null ? "–" : number(run.step), run.total_steps ? h("span", { class: "muted" }, ` / ${number(run.total_steps)}`) : null), h("td", {}, badge(run)));
    }

    const draw = () => fill(body, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, heading(null, "run", "in the order given, forks below the run they came from"), columns.map(([key, title]) => heading(key, title, MARKS[key])), heading("step", "step"), h("th", {}, "state"))), h("tbody", {}, ordered().map(line))));
    draw();
    return { element: h("div", {}, h("div", { class: "row" }, h("h2", {}, "Runs"), h("a", { href: href("curves", { run: all[0].id }) }, "curves of all")), body), refresh: draw };
  }

  return { load, byId, colour, parentOf, series, badge, progressText, page, all: () => all, live: () => live };
})();
