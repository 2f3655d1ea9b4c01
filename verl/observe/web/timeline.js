"use strict";
// Phases of every process over time, on a canvas: drag to move, wheel or buttons to zoom, a click on a step shows it.

const Timeline = (() => {
  const { h, fill, seconds, number, colour } = Dom;
  const LABEL = 92, TOP = 26, GAP = 10;
  const ROUND = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400]; // seconds between ticks

  let ROW = 20; // pixels; higher where there are few rows

  /** Rows below each other for spans that are inside another one of the same process. */
  function layout(spans) {
    const processes = new Map();
    for (const [process, name, start, end, step] of spans) {
      if (!processes.has(process)) processes.set(process, []);
      processes.get(process).push({ name, start, end, step, depth: 0 });
    }
    const tracks = [];
    const order = ([a], [b]) => (b === "controller") - (a === "controller") || a.localeCompare(b, "en", { numeric: true });
    for (const [process, found] of [...processes].sort(order)) {
      found.sort((a, b) => a.start - b.start || b.end - a.end);
      const open = [];
      let depth = 0;
      for (const span of found) {
        while (open.length && open[open.length - 1].end <= span.start + 1e-9) open.pop();
        span.depth = open.length;
        depth = Math.max(depth, open.length);
        open.push(span);
      }
      tracks.push({ process, rows: depth + 1, spans: found });
    }
    const rows = tracks.reduce((sum, track) => sum + track.rows, 0);
    ROW = rows <= 4 ? 36 : rows <= 10 ? 26 : 20;
    let y = TOP;
    for (const track of tracks) {
      Object.assign(track, { y, height: track.rows * ROW });
      y += track.height + GAP;
    }
    return { tracks, height: y + 6 };
  }

  /** Seconds per phase, most first, for the swatches. */
  function totals(tracks) {
    const sums = new Map();
    for (const track of tracks) for (const span of track.spans) sums.set(span.name, (sums.get(span.name) || 0) + span.end - span.start);
    return [...sums].sort((a, b) => b[1] - a[1]);
  }

  /** Seconds between ticks: round, and at least `width`. */
  function niceStep(width) {
    const power = 10 ** Math.floor(Math.log10(width));
    const round = width < 1 ? [1, 2, 5, 10].map((m) => m * power) : ROUND;
    return round.find((each) => each >= width) || Math.ceil(width / 86400) * 86400;
  }

  /** A time as a clock shows it, with as many digits as tell neighbouring ticks apart. */
  function clock(time, gap) {
    const digits = gap < 1 ? Math.ceil(-Math.log10(gap) - 1e-9) : 0;
    const rest = (time % 60).toFixed(digits), whole = Math.floor(time / 60);
    if (time < 60) return `${rest} s`;
    const padded = rest.padStart(digits ? digits + 3 : 2, "0");
    return whole < 60 ? `${whole}:${padded}` : `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}:${padded}`;
  }

  async function page({ run }) {
    const canvas = h("canvas", {});
    const box = h("div", { class: "card timeline" }, canvas);
    const note = h("p", { class: "muted" }), swatches = h("div", { class: "swatches" }), times = h("div", {});
    let tracks = [], height = 0, end = 1, from = 0, to = 1, steps = [];

    const isDark = () => document.documentElement.dataset.theme === "dark";
    const plotWidth = () => Math.max(50, box.clientWidth - LABEL - 8);
    const toX = (time) => LABEL + ((time - from) / (to - from)) * plotWidth();

    function draw() {
      const scale = devicePixelRatio || 1, width = box.clientWidth, dark = isDark();
      if (!width) return;
      canvas.width = width * scale;
      canvas.height = height * scale;
      canvas.style.height = `${height}px`;
      const ctx = canvas.getContext("2d");
      ctx.scale(scale, scale);
      ctx.font = "11px system-ui, sans-serif";
      ctx.textBaseline = "middle";
      const gap = niceStep((to - from) / Math.max(2, plotWidth() / 80));
      ctx.strokeStyle = colour("--grid");
      ctx.fillStyle = colour("--muted");
      const ticks = [];
      for (let k = Math.ceil(from / gap); k * gap <= to; k++) {
        const time = k * gap, x = Math.round(toX(time)) + 0.5;
        ctx.beginPath(); ctx.moveTo(x, TOP - 6); ctx.lineTo(x, height); ctx.stroke();
        ticks.push(clock(time, gap));
        ctx.fillText(ticks[ticks.length - 1], x + 3, 11);
      }
      canvas.dataset.ticks = ticks.join(" ");
      for (const track of tracks) {
        ctx.save();
        ctx.beginPath(); ctx.rect(LABEL, track.y, plotWidth(), track.height); ctx.clip();
        let covered = []; // per depth: the pixel up to which something narrow was drawn
        for (const span of track.spans) {
          if (span.end < from || span.start > to) continue;
          const x = toX(span.start), w = toX(span.end) - x;
          if (w < 1 && x < (covered[span.depth] || -1)) continue;
          covered[span.depth] = x + Math.max(w, 1);
          const y = track.y + span.depth * ROW;
          ctx.fillStyle = StepTime.paint(span.name);
          ctx.fillRect(x, y, Math.max(w - (w > 4 ? 1 : 0), 0.75), ROW - 2);
          const left = Math.max(x, LABEL), visible = x + w - left;
          if (visible > 34) {
            ctx.save();
            ctx.beginPath(); ctx.rect(left, y, visible - 3, ROW); ctx.clip();
            ctx.fillStyle = dark ? "#eef2f7" : "#18202b";
            ctx.fillText(span.name, left + 4, y + ROW / 2 - 1);
            ctx.restore();
          }
        }
        ctx.restore();
        ctx.fillStyle = colour("--ink");
        ctx.fillText(track.process, 8, track.y + ROW / 2 - 1, LABEL - 12);
      }
    }

    function show(a, b) {
      const width = Math.min(Math.max(b - a, end * 1e-5), end);
      from = Math.max(0, Math.min(a, end - width));
      to = from + width;
      draw();
    }

    function showSteps(first, last) {
      const all = tracks.flatMap((track) => track.spans).filter((span) => span.step >= first && span.step <= last);
      if (all.length) show(Math.min(...all.map((s) => s.start)), Math.max(...all.map((s) => s.end)));
    }

    function spanAt(event) {
      const bounds = canvas.getBoundingClientRect();
      const x = event.clientX - bounds.left, y = event.clientY - bounds.top;
      const track = tracks.find((each) => y >= each.y && y < each.y + each.height);
      if (!track || x < LABEL) return null;
      const time = from + ((x - LABEL) / plotWidth()) * (to - from), slack = (to - from) / plotWidth();
      const depth = Math.floor((y - track.y) / ROW);
      const span = track.spans.find((each) => each.depth === depth && time >= each.start - slack && time <= each.end + slack);
      return span ? { ...span, process: track.process } : null;
    }

    let dragged = null;
    canvas.addEventListener("pointerdown", (event) => { dragged = { x: event.clientX, from, to }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { dragged = null; });
    canvas.addEventListener("pointercancel", () => { dragged = null; });
    canvas.addEventListener("pointerleave", () => Dom.tip(null));
    canvas.addEventListener("pointermove", (event) => {
      if (dragged && Math.abs(event.clientX - dragged.x) > 2) {
        const moved = ((dragged.x - event.clientX) / plotWidth()) * (dragged.to - dragged.from);
        show(dragged.from + moved, dragged.to + moved);
      }
      const span = spanAt(event);
      Dom.tip(span && [h("strong", {}, span.name), `\n${span.process}, step ${number(span.step)}\n${seconds(span.end - span.start)}`], event.clientX, event.clientY);
    });
    canvas.addEventListener("dblclick", (event) => { const span = spanAt(event); if (span) showSteps(span.step, span.step); });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY) && !event.altKey) return; // the page scrolls
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { const by = ((event.deltaX || event.deltaY) / plotWidth()) * (to - from); show(from + by, to + by); return; }
      zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - canvas.getBoundingClientRect().left - LABEL) / plotWidth());
    }, { passive: false });

    function zoom(factor, at = 0.5) {
      const middle = from + at * (to - from), width = (to - from) * factor;
      show(middle - at * width, middle + (1 - at) * width);
    }

    async function refresh() {
      const [data, metrics] = await Promise.all([Source.get(`run/${run.id}/timeline.json`), Source.get(`run/${run.id}/metrics.json`)]);
      const whole = to >= end;
      ({ tracks, height } = layout(data.spans));
      const names = totals(tracks);
      end = data.spans.reduce((most, span) => Math.max(most, span[3]), 0) || 1;
      steps = [...new Set(data.spans.map((span) => span[4]))].sort((a, b) => a - b);
      box.hidden = !data.spans.length;
      fill(note, data.spans.length ? `${number(steps.filter((step) => step > 0).length)} steps, ${seconds(end)}. Drag to move, double-click a phase to see its step.` : "No phase was recorded.");
      fill(times, StepTime.card(run, metrics));
      const named = StepTime.names(run, metrics);
      fill(swatches, names.filter(([name]) => !named.includes(name)).slice(0, 24).map(([name, sum]) => StepTime.swatch(name, seconds(sum))));
      if (whole) showSteps(steps[Math.max(0, steps.length - 3)], steps[steps.length - 1]);
      else draw();
    }

    const sizes = new ResizeObserver(draw);
    sizes.observe(box);
    await refresh();
    const button = (name, action) => h("button", { type: "button", onclick: action }, name);
    return {
      element: h("div", {}, times, h("div", { class: "row" },
        button("All", () => show(0, end)), button("Newest step", () => showSteps(steps[steps.length - 1], steps[steps.length - 1])),
        button("Zoom in", () => zoom(0.5)), button("Zoom out", () => zoom(2)),
        button("Earlier", () => show(from - (to - from) * 0.6, to - (to - from) * 0.6)), button("Later", () => show(from + (to - from) * 0.6, to + (to - from) * 0.6))),
      note, box, swatches),
      refresh, shown: refresh, theme: refresh, close: () => sizes.disconnect(),
      key(name) {
        const by = (to - from) * 0.3;
        if (name === "ArrowLeft") show(from - by, to - by); else if (name === "ArrowRight") show(from + by, to + by);
        else if (name === "+") zoom(0.5); else if (name === "-") zoom(2); else return false;
        return true;
      },
    };
  }

  return { page, layout, clock, niceStep };
})();
