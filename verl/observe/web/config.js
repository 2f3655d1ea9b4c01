"use strict";
// The settings of a run: what differs from the defaults, from its parent or from another run, and every key.

const Config = (() => {
  const { h, fill, text, number } = Dom;
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

  function table(heads, rows) {
    return h("table", { class: "keys mono" }, h("thead", {}, h("tr", {}, heads.map((head) => h("th", {}, head)))),
      h("tbody", {}, rows.map(([key, ...values]) => h("tr", {}, h("td", {}, Dom.breakable(key)),
        values.map((value, i) => h("td", { class: values.length < 2 ? "" : i ? "new" : "old" }, value === undefined ? "–" : Dom.breakable(text(value))))))));
  }

  /** Keys whose values differ between two runs. */
  function differences(mine, other) {
    const keys = [...new Set([...Object.keys(other), ...Object.keys(mine)])].sort();
    return keys.filter((key) => !same(mine[key], other[key])).map((key) => [key, other[key], mine[key]]);
  }

  async function page({ run }) {
    let search = "", against = "";
    const body = h("div", {});
    const others = Runs.all().filter((each) => each.id !== run.id);

    async function draw() {
      const summary = await Source.get(`run/${run.id}/summary.json`);
      const fits = ([key, ...values]) => `${key} ${values.map(text).join(" ")}`.toLowerCase().includes(search.toLowerCase());
      const other = against ? Runs.byId(against) : null;
      const base = other ? other.name : Runs.parentOf(run) || run.parent_name ? run.parent_name : "default";
      const changes = (other ? differences(summary.config, (await Source.get(`run/${other.id}/summary.json`)).config) : summary.config_changes).filter(fits);
      const all = Object.entries(summary.config).sort(([a], [b]) => a.localeCompare(b)).filter(fits);
      fill(body,
        h("h2", {}, other ? `Keys that differ from ${other.name}` : base === "default" ? "Keys that differ from the defaults" : `Keys that differ from its parent ${base}`,
          h("span", { class: "muted" }, ` ${number(changes.length)}`)),
        h("div", { class: "card changes" }, changes.length ? table(["key", base, run.name], changes) : Dom.empty("None.")),
        h("h2", {}, "All keys", h("span", { class: "muted" }, ` ${number(all.length)}`)),
        h("div", { class: "card" }, all.length ? table(["key", "value"], all) : Dom.empty("No key fits.")));
    }

    await draw();
    return {
      element: h("div", {}, h("div", { class: "row" },
        h("input", { type: "search", class: "keys-search", placeholder: "Search keys and values", "aria-label": "Search keys", oninput: (event) => { search = event.target.value; draw(); } }),
        others.length ? h("label", { class: "muted" }, "Compare with ", h("select", { "aria-label": "Compare with", onchange: (event) => { against = event.target.value; draw(); } },
          h("option", { value: "" }, run.parent_name ? "its parent" : "the defaults"), others.map((each) => h("option", { value: each.id }, each.name)))) : null), body),
    };
  }

  return { page };
})();
