"use strict";
// Curves with uPlot: values under the pointer, drag to zoom, smoothing, several runs in one plot.

const Charts = (() => {
  const { h, fill, number, colour } = Dom;
  const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat(); // there is no half step
  const DOTS = 30; // a curve of so few values shows each of them

  /**
   * @typedef {{label: string, colour: string, xs: number[], ys: number[], dashed?: boolean}} Line
   * @typedef {{smooth: number, log: boolean, x: string}} Options
   */

  /** Exponential moving average that starts at the first value (weights sum to one at every step). */
  function smoothed(values, weight) {
    let sum = 0, mass = 0;
    return values.map((value) => {
      sum = weight * sum + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return sum / mass;
    });
  }

  /** Lines over one common axis, as uPlot wants them. */
  function aligned(lines) {
    const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
    const at = new Map(xs.map((x, i) => [x, i]));
    return [xs, ...lines.map((line) => {
      const column = new Array(xs.length).fill(null);
      line.xs.forEach((x, i) => { column[at.get(x)] = line.ys[i]; });
      return column;
    })];
  }

  /** What is drawn: with smoothing, the raw values faintly and the smoothed ones on them. */
  function drawn(lines, options) {
    const positive = (ys) => (options.log ? ys.map((y) => (y > 0 ? y : null)) : ys);
    const result = [];
    for (const line of lines) {
      const smooth = options.smooth > 0 && line.ys.length > 2;
      if (smooth) result.push({ ...line, ys: positive(line.ys), faint: true });
      result.push({ ...line, ys: positive(smooth ? smoothed(line.ys, options.smooth) : line.ys) });
    }
    return result;
  }

  /** Charts that share the zoom and the pointer. */
  function family(key) {
    const charts = new Set();
    const state = { range: null };
    const zoom = (range) => {
      state.range = range;
      for (const chart of charts) chart.zoom();
    };
    return { key, charts, state, zoom };
  }

  const axis = (extra) => ({
    stroke: () => colour("--muted"), font: "11px system-ui, sans-serif", gap: 4,
    grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { show: false }, ...extra,
  });

  /** uPlot's own range, but for a curve that is 0 throughout: it would go to 100. */
  const rangeOfY = (u, low, high) => (low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true));

  function seriesOf(line) {
    return {
      label: line.label, stroke: line.colour, spanGaps: true, alpha: line.faint ? 0.25 : line.dashed ? 0.6 : 1,
      width: line.faint ? 1 : 1.75, dash: line.dashed ? [5, 4] : undefined,
      points: line.faint ? { show: false } : { size: 5, show: line.xs.length <= DOTS ? true : undefined },
    };
  }

  /** A name in one line: of a long one the middle is left out, as its last parts tell it from others. */
  function nameOf(metric) {
    const at = metric.lastIndexOf("/", metric.lastIndexOf("/") - 1) + 1;
    return [h("span", { class: "start" }, metric.slice(0, at)), h("span", { class: "end" }, metric.slice(at))];
  }

  /**
   * A card with a curve.
   * @param {string} title
   * @param {{family: Object, height: number, about?: string, mark?: number[], onTitle?: Function}} place
   */
  function card(title, place) {
    const readout = h("div", { class: "readout" });
    const box = h("div", { class: "plot", style: { height: `${place.height}px` } });
    const heading = h(place.onTitle ? "button" : "span", { class: "title", type: place.onTitle ? "button" : null, onclick: () => place.onTitle && place.onTitle(chart) }, nameOf(title));
    Dom.described(heading, [h("strong", {}, title), place.about ? `\n${place.about}` : null, place.onTitle ? h("span", { class: "hint" }, "\nclick to enlarge or reduce") : null]);
    const element = h("figure", { class: "card curve", "data-metric": title, style: { margin: "0" } },
      h("header", {}, h("h3", {}, heading), readout), h("p", { class: "about" }, place.about || ""), box);
    let plot = null, shown = [], given = [[], {}], visible = false, height = place.height;

    const show = (index) => {
      const at = plot && index !== null && index !== undefined ? index : null;
      const parts = [];
      shown.forEach((line, i) => {
        if (line.faint) return;
        const column = plot.data[i + 1];
        let k = at === null ? column.length - 1 : at;
        while (k > 0 && (column[k] === null || column[k] === undefined) && (at === null || shown.length > 1)) k--;
        const value = column[k];
        if (line.dashed && (value === null || value === undefined || at === null)) return;
        parts.push(h("span", {}, h("i", { class: "dot", style: { background: line.colour } }), h("b", {}, number(value))));
      });
      const x = at === null ? null : plot.data[0][at];
      fill(readout, x === null ? null : given[1].x === "time" ? `${x.toFixed(2)} h` : `step ${number(x)}`, parts);
    };

    function draw() {
      if (!visible) return;
      const [lines, options] = given;
      shown = drawn(lines, options);
      element.classList.toggle("several", lines.length > 2);
      if (plot) plot.destroy();
      plot = null;
      if (!shown.length || shown.every((line) => !line.ys.some((y) => y !== null))) {
        fill(box, Dom.empty(options.log ? "no positive value" : "no value yet"));
        return;
      }
      fill(box);
      plot = new uPlot({
        width: Math.max(120, box.clientWidth), height, legend: { show: false }, padding: [8, 16, 0, 0],
        scales: { x: { time: false, range: (u, low, high) => place.family.state.range || (low === high ? [low - 1, high + 1] : [low, high]) },
          y: options.log ? { distr: 3 } : { range: rangeOfY } },
        axes: [axis({ size: 27, gap: 7, space: 46, incrs: options.x === "time" ? undefined : WHOLE }), axis({ size: 52, space: 28, values: (u, ticks) => ticks.map((v) => (v === null ? "" : number(v))) })],
        series: [{}, ...shown.map(seriesOf)],
        cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 },
          sync: { key: place.family.key, setSeries: false, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } } },
        hooks: {
          setCursor: [(u) => show(u.cursor.idx)],
          setSelect: [(u) => {
            if (u.select.width < 6) return;
            place.family.zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          }],
          draw: [(u) => marks(u, options.x === "time" ? [] : place.mark || [])],
        },
      }, aligned(shown), box);
      plot.over.addEventListener("dblclick", () => place.family.zoom(null));
      show(null);
    }

    const observer = new IntersectionObserver((entries) => {
      const now = entries.some((entry) => entry.isIntersecting);
      if (now && !visible) { visible = true; draw(); }
    }, { rootMargin: "300px" });
    const sizes = new ResizeObserver(() => {
      if (plot && box.clientWidth && Math.abs(box.clientWidth - plot.width) > 1) plot.setSize({ width: box.clientWidth, height });
    });
    observer.observe(element);
    sizes.observe(box);

    const chart = {
      element,
      set(lines, options) { given = [lines, options]; draw(); },
      zoom() { if (plot) plot.setData(plot.data, true); },
      redraw() { if (plot) plot.redraw(); },
      resize(value) { height = value; box.style.height = `${value}px`; draw(); },
      close() { observer.disconnect(); sizes.disconnect(); if (plot) plot.destroy(); place.family.charts.delete(chart); },
    };
    place.family.charts.add(chart);
    return chart;
  }

  /** Where runs were forked. */
  function marks(u, steps) {
    for (const step of steps) {
      const x = Math.round(u.valToPos(step, "x", true));
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      u.ctx.save();
      u.ctx.strokeStyle = colour("--muted");
      u.ctx.setLineDash([3, 4]);
      u.ctx.beginPath();
      u.ctx.moveTo(x, u.bbox.top);
      u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
      u.ctx.stroke();
      u.ctx.fillStyle = colour("--muted");
      u.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      u.ctx.fillText("fork", x + 4 * devicePixelRatio, u.bbox.top + 11 * devicePixelRatio);
      u.ctx.restore();
    }
  }

  /**
   * The lines of a metric for some runs: a fork continues the line of its parent.
   * @returns {Promise<Line[]>}
   */
  async function linesOf(runs, name, toX) {
    const lines = [];
    for (const run of runs) {
      const { own, before } = await Runs.series(run, name);
      const xs = await toX(run, own.xs);
      const joined = toX.steps && before.xs.length
        ? { xs: [before.xs[before.xs.length - 1], ...xs], ys: [before.ys[before.ys.length - 1], ...own.ys] } : { xs, ys: own.ys };
      const parent = Runs.parentOf(run);
      if (toX.steps && before.xs.length && !(parent && runs.includes(parent)))
        lines.push({ label: `${run.name} (before the fork)`, colour: Runs.colour(run), ...before, dashed: true });
      if (joined.xs.length) lines.push({ label: run.name, colour: Runs.colour(run), ...joined });
    }
    return lines;
  }

  const bySteps = Object.assign(async (run, steps) => steps, { steps: true });

  return { family, card, rangeOfY, linesOf, bySteps, smoothed };
})();
