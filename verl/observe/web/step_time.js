"use strict";
// Where the time of a step goes, as one bar, and the colour of each phase, which is the same in every run.

const StepTime = (() => {
  const { h, seconds, percent } = Dom;
  const NEWEST = 50; // steps that are averaged
  const PREFIX = "timing_s/";
  const HUES = {
    gen: 222, reward: 48, old_log_prob: 190, ref: 275, teacher: 290, values: 310, adv: 340, implicit_reward: 80, update_actor: 25, update_critic: 0,
    update_implicit_reward: 60, refresh_reference: 255, data: 100, testing: 145, save_checkpoint: 170, prepare: 235, train: 25,
  };
  const GREY = ["step", "other"];

  /** Of a phase without a fixed colour: from its name. */
  function hueOf(name) {
    let sum = 7;
    for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) % 360;
    return sum;
  }

  function paint(name) {
    const dark = document.documentElement.dataset.theme === "dark";
    const hue = name in HUES ? HUES[name] : hueOf(name);
    return GREY.includes(name) ? (dark ? "hsl(215 10% 38%)" : "hsl(215 14% 78%)") : `hsl(${hue} ${dark ? "48% 42%" : "62% 66%"})`;
  }

  /**
   * Mean seconds of each phase over the newest steps, longest first; what is in no phase is `other`.
   * @returns {{parts: Array<[string, number]>, total: number, steps: number}|null}
   */
  function partsOf(metrics, offline) {
    const whole = metrics.series[`${PREFIX}step`] || [];
    const rows = whole.map((value, i) => (value === null ? -1 : i)).filter((i) => i >= 0).slice(-NEWEST);
    if (!rows.length) return null;
    const mean = (values) => rows.reduce((sum, i) => sum + (values[i] || 0), 0) / rows.length;
    const outside = ["testing", "save_checkpoint", ...(offline ? ["data"] : [])];
    const names = Object.keys(metrics.series).filter((name) => name.startsWith(PREFIX) && !name.slice(PREFIX.length).includes("/"));
    const parts = names.map((name) => [name.slice(PREFIX.length), mean(metrics.series[name])]).filter(([name, value]) => name !== "step" && value > 0);
    const inside = parts.filter(([name]) => !outside.includes(name)).reduce((sum, [, value]) => sum + value, 0);
    parts.push([offline && !inside ? "train" : "other", Math.max(0, mean(whole) - inside)]);
    return { parts: parts.filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]), total: parts.reduce((sum, [, value]) => sum + value, 0), steps: rows.length };
  }

  /** The newest value of a share, where the run measured one. */
  function share(metrics, name, label) {
    const values = metrics.series[name] || [];
    const at = values.findLastIndex((value) => value !== null);
    return at < 0 ? null : Dom.described(h("span", { "data-share": name }, `${label} `, h("b", {}, percent(values[at])), h("span", { class: "muted" }, ` step ${metrics.step[at]}`)), metrics.about[name]);
  }

  /** The phases that the card has a swatch for, and `step`, which it is about. */
  const names = (run, metrics) => ["step", ...((partsOf(metrics, run.kind === "offline") || { parts: [] }).parts.map(([name]) => name))];

  function card(run, metrics) {
    const found = partsOf(metrics, run.kind === "offline");
    if (!found || !found.total) return null;
    const described = (element, name, value) => Dom.described(element, [h("strong", {}, name), `\n${seconds(value)}, ${percent(value / found.total)}\n${metrics.about[PREFIX + name] || ""}`]);
    return h("section", { class: "card steptime" },
      h("div", { class: "row" }, h("h3", {}, "Where a step's time goes"), h("span", { class: "muted" }, `${seconds(found.total)}, mean of ${found.steps === 1 ? "one step" : `${found.steps} steps`} with validation and checkpoints`), h("span", { class: "grow" }),
        share(metrics, "perf/gpu_busy", "GPU busy"), share(metrics, "perf/mfu/actor", "of peak arithmetic"),
        share(metrics, "perf/wait_share/trainer", "trainer waits"), share(metrics, "perf/wait_share/generation", "generation waits")),
      h("div", { class: "stack" }, found.parts.map(([name, value]) => described(h("i", { "data-phase": name, style: { "flex-grow": value / found.total, background: paint(name) } }, value > 0.09 * found.total ? name : ""), name, value))),
      h("div", { class: "swatches" }, found.parts.map(([name, value]) => described(swatch(name, `${seconds(value)} ${percent(value / found.total)}`), name, value))));
  }

  const swatch = (name, text) => h("span", {}, h("i", { style: { background: paint(name) } }), name, h("span", { class: "muted" }, ` ${text}`));

  return { card, names, paint, swatch };
})();
