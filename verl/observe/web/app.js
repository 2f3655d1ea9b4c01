"use strict";
// The bar, the address, the theme, keys, and asking again while a run runs.

const App = (() => {
  const { h, fill } = Dom;
  const POLL_MS = 4000;
  const PAGES = {
    overview: ["Overview", Overview.page], curves: ["Curves", Curves.page], timeline: ["Timeline", Timeline.page],
    rollouts: ["Rollouts", Rollouts.page], group: [null, Group.page], config: ["Config", Config.page], runs: ["Runs", Runs.page],
  };
  const main = document.getElementById("main");
  let view = null, turn = 0;

  /** `#/page?run=0&...` as {page, params}. */
  function address() {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
    const params = new URLSearchParams(query || "");
    return { page: path in PAGES ? path : "overview", params };
  }

  const href = (page, params) => `#/${page}?${new URLSearchParams(params)}`;
  const go = (page, params) => { location.hash = href(page, params); };
  const current = () => Runs.byId(address().params.get("run")) || Runs.all()[0] || null;

  async function bar() {
    const run = current();
    const { page } = address();
    if (!run) return;
    const runs = Runs.all();
    const summary = await Source.get(`run/${run.id}/summary.json`).catch(() => null);
    const recent = summary ? summary.findings.filter((each) => each.recent).length : 0;
    const name = runs.length < 2 ? h("span", { class: "name" }, run.name)
      : h("select", { class: "name", "aria-label": "Run", onchange: (event) => go(page === "group" ? "rollouts" : page, { run: event.target.value }) },
        runs.map((each) => h("option", { value: each.id, selected: each.id === run.id }, each.name)));
    const share = run.total_steps && run.step !== null ? Math.min(1, run.step / run.total_steps) : null;
    const tab = ([key, [title]]) => (!title || (key === "runs" && runs.length < 2) ? null
      : h("a", { href: href(key, { run: run.id }), "aria-current": key === page || (key === "rollouts" && page === "group") ? "page" : null }, key === "rollouts" && run.kind === "offline" ? "Samples" : title,
        key === "overview" && recent ? h("span", { class: "count", title: "recent findings" }, recent) : null));
    fill(document.getElementById("bar"), h("div", { class: "bar" },
      h("div", { class: "row" }, name, Runs.badge(run), h("span", { class: "muted" }, Runs.progressText(run)),
        share === null ? null : h("div", { class: "progress" }, h("div", { style: { width: `${100 * share}%` } })),
        h("span", { class: "grow" }), Dom.choice("Theme", [["", "Auto"], ["light", "Light"], ["dark", "Dark"]], chosenTheme, setTheme)),
      h("nav", { "aria-label": "Views" }, Object.entries(PAGES).map(tab))));
  }

  async function open() {
    const mine = ++turn;
    const { page, params } = address();
    const run = current();
    Dom.tip(null);
    await bar();
    if (!run) { fill(main, Dom.empty("No run to show.")); return; }
    let next;
    try {
      next = await PAGES[page][1]({ run, params, href, go });
    } catch (error) {
      const back = page === "group" ? "rollouts" : "overview";
      next = { element: h("div", { class: "empty" }, h("p", {}, error.message), h("a", { href: href(back, { run: run.id }) }, back === "rollouts" ? "All responses" : "Overview")) };
    }
    if (mine !== turn) { if (next.close) next.close(); return; }
    if (view && view.close) view.close();
    view = next;
    fill(main, view.element);
    main.dataset.page = page;
    scrollTo(0, 0);
    if (view.shown) view.shown();
  }

  // -- theme ------------------------------------------------------------------------------------------------------

  let chosenTheme = stored("verl-theme");
  const system = matchMedia("(prefers-color-scheme: dark)");

  function stored(key) {
    try { return localStorage.getItem(key) || ""; } catch { return ""; } // a page from a file may have no storage
  }

  function setTheme(value) {
    chosenTheme = value;
    try { localStorage.setItem("verl-theme", value); } catch { /* the choice lasts as long as the page */ }
    applyTheme();
  }

  function applyTheme() {
    document.documentElement.dataset.theme = chosenTheme || (system.matches ? "dark" : "light");
    if (view && view.theme) view.theme();
  }

  // -- keys and new steps -------------------------------------------------------------------------------------------

  function key(event) {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
    if (typing && event.key === "Escape") { event.target.blur(); return; }
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !view || !view.key) return;
    if (view.key(event.key)) event.preventDefault();
  }

  async function poll() {
    const before = current();
    Source.forget("runs.json");
    try {
      await Runs.load();
    } catch {
      return; // the server was stopped: what is shown stays
    }
    const after = current();
    if (!before || !after || (before.step === after.step && before.state_text === after.state_text)) return;
    for (const run of Runs.all()) Source.forget(`run/${run.id}/`);
    await bar();
    if (view && view.refresh) await view.refresh();
  }

  async function start() {
    applyTheme();
    system.addEventListener("change", applyTheme);
    addEventListener("hashchange", open);
    addEventListener("keydown", key);
    try {
      await Runs.load();
      await open();
    } catch (error) {
      fill(main, Dom.empty(`The run cannot be shown: ${error.message}`));
    }
    if (Source.fromServer && Runs.live()) setInterval(poll, POLL_MS);
    document.documentElement.dataset.ready = "true";
  }

  return { start };
})();

App.start();
