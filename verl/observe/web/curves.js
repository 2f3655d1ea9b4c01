"use strict";
// All metrics, by their prefix: choose, compare runs, smooth, logarithmic, by step or by time.

const Curves = (() => {
  const { h, fill, number } = Dom;
  const FIRST = ["reward", "val-core", "train", "val", "actor", "critic", "response_length"];
  const MOST_RUNS = 24; // of more, the first ones are drawn until others are ticked
  const settings = { text: "", smooth: 0, log: false, x: "step" };

  const prefix = (name) => (name.includes("/") ? name.slice(0, name.indexOf("/")) : "other");

  /** Sections of names: the main metrics, then by prefix. */
  function sections(names, shown) {
    const order = (key) => (FIRST.includes(key) ? FIRST.indexOf(key) : FIRST.length);
    const groups = new Map();
    for (const name of names) {
      const key = prefix(name);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(name);
    }
    const rest = [...groups].sort(([a], [b]) => order(a) - order(b) || a.localeCompare(b));
    return shown.length ? [["main", shown], ...rest] : rest;
  }

  /** Whether a name contains every word of the search. */
  const matches = (name, text) => text.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word));

  /** Hours of training until each step, from the seconds of the steps. */
  async function byTime(run, steps) {
    const metrics = await Source.get(`run/${run.id}/metrics.json`);
    const seconds = metrics.series["timing_s/step"] || [];
    const hours = new Map();
    let sum = 0;
    metrics.step.forEach((step, i) => { sum += (seconds[i] || 0) / 3600; hours.set(step, sum); });
    return steps.map((step) => hours.get(step));
  }

  async function page({ run, params }) {
    const family = Charts.family("curves");
    const asked = params.has("with") ? params.get("with").split(",") : Runs.all().slice(0, MOST_RUNS).map((each) => each.id);
    const chosen = new Set([run.id, ...asked.filter((id) => Runs.byId(id))]);
    const charts = new Map(); // section/name -> chart
    const body = h("div", {});
    let about = {};
    const runs = () => Runs.all().filter((each) => chosen.has(each.id));
    const forks = () => runs().map((each) => each.fork_step).filter((step) => step !== null && step !== undefined);

    async function metricsOf() {
      const all = await Promise.all(runs().map((each) => Source.get(`run/${each.id}/metrics.json`)));
      about = Object.assign({}, ...all.map((each) => each.about));
      return { names: [...new Set(all.flatMap((each) => Object.keys(each.series)))].sort(), shown: [...new Set(all.flatMap((each) => each.shown))] };
    }

    async function update(chart, name) {
      const toX = settings.x === "time" ? byTime : Charts.bySteps;
      chart.set(await Charts.linesOf(runs(), name, toX), settings);
    }

    const updateAll = () => Promise.all([...charts].map(([key, chart]) => update(chart, key.slice(key.indexOf("|") + 1))));

    function enlarge(chart) {
      const wide = chart.element.classList.toggle("wide");
      chart.resize(wide ? 380 : 190);
    }

    function sectionOf([title, names], open) {
      const grid = h("div", { class: "curves" });
      const fillGrid = () => {
        for (const name of names) {
          const key = `${title}|${name}`;
          if (charts.has(key)) continue;
          const chart = Charts.card(name, { family, height: 190, mark: forks(), onTitle: enlarge, about: about[name] });
          charts.set(key, chart);
          grid.append(chart.element);
          update(chart, name);
        }
      };
      if (open) fillGrid();
      return h("details", { class: "section", open, ontoggle: (event) => { if (event.target.open) fillGrid(); } },
        h("summary", {}, title, h("span", { class: "muted" }, ` ${number(names.length)}`)), grid);
    }

    async function rebuild() {
      charts.forEach((chart) => chart.close());
      charts.clear();
      const { names, shown } = await metricsOf();
      const found = settings.text.trim() ? [["found", names.filter((name) => matches(name, settings.text.trim()))]] : sections(names, shown);
      fill(body, found.map((section, i) => sectionOf(section, i === 0)));
      if (!names.length) fill(body, Dom.empty("No step has finished yet."));
      else if (!found[0][1].length) fill(body, Dom.empty("No metric has these words in its name."));
    }

    const legend = Runs.all().length < 2 ? null : h("div", { class: "legend" }, Runs.all().map((each) => h("label", {},
      h("input", { type: "checkbox", "data-run": each.id, checked: chosen.has(each.id), onchange: (event) => {
        if (event.target.checked) chosen.add(each.id); else chosen.delete(each.id);
        rebuild();
      } }), h("span", { class: "dot", style: { background: Runs.colour(each) } }), each.name)));
    const smoothText = h("output", {}, settings.smooth.toFixed(2));
    const tools = h("div", { class: "card tools" }, h("div", { class: "row" },
      h("input", { type: "search", placeholder: "Search metrics", "aria-label": "Search metrics", value: settings.text,
        oninput: Dom.later((event) => { settings.text = event.target.value; rebuild(); }, 150) }),
      h("label", {}, "Smoothing", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth, "aria-label": "Smoothing",
        oninput: (event) => { settings.smooth = Number(event.target.value); fill(smoothText, settings.smooth.toFixed(2)); updateAll(); } }), smoothText),
      h("label", {}, h("input", { type: "checkbox", checked: settings.log, onchange: (event) => { settings.log = event.target.checked; updateAll(); } }), "Log scale"),
      Dom.choice("Axis", [["step", "Steps"], ["time", "Hours"]], settings.x, (value) => { settings.x = value; family.zoom(null); updateAll(); }),
      h("button", { type: "button", onclick: () => family.zoom(null) }, "Reset zoom"),
      h("span", { class: "muted wide-only" }, "drag to zoom, double-click to reset")), legend);
    await rebuild();
    return {
      element: h("div", {}, tools, body), refresh: updateAll,
      theme: () => charts.forEach((chart) => chart.redraw()),
      close: () => charts.forEach((chart) => chart.close()),
    };
  }

  return { page, matches };
})();
