"use strict";
// A list of any length of which only the visible lines are elements.

const List = (() => {
  const { h, fill } = Dom;
  const HEIGHT = 54, EXTRA = 6, MOST_PX = 8_000_000; // browsers limit the height of an element

  /**
   * @param {{columns: string, line: function(number): Array, select: function(number), open: function(number)}} parts
   *   `columns` is a grid template, `line` makes the cells of the item at a position
   */
  function make(parts) {
    const space = h("div", { class: "space", role: "presentation" });
    const element = h("div", { class: "scroll", tabindex: 0, role: "listbox", "aria-label": "Responses" }, space);
    let count = 0, chosen = -1, pending = false;

    const scale = () => Math.min(1, MOST_PX / Math.max(1, count * HEIGHT));
    const firstVisible = () => Math.floor(element.scrollTop / scale() / HEIGHT);

    function draw() {
      pending = false;
      const shown = Math.ceil((element.clientHeight || 600) / HEIGHT) + 2 * EXTRA;
      const from = Math.max(0, Math.min(firstVisible() - EXTRA, count - shown));
      const offset = element.scrollTop - element.scrollTop / scale();
      const lines = [];
      for (let i = from; i < Math.min(count, from + shown); i++)
        lines.push(h("div", { class: "line", role: "option", "data-at": i, "aria-selected": String(i === chosen),
          style: { top: `${i * HEIGHT + offset}px`, "grid-template-columns": parts.columns } }, parts.line(i)));
      fill(space, lines);
    }

    element.addEventListener("scroll", () => { if (!pending) { pending = true; requestAnimationFrame(draw); } });
    const at = (event) => { const line = event.target.closest(".line"); return line ? Number(line.dataset.at) : -1; };
    element.addEventListener("click", (event) => { if (at(event) >= 0) choose(at(event)); });
    element.addEventListener("dblclick", (event) => { if (at(event) >= 0) parts.open(at(event)); });

    function reveal() {
      const most = chosen * HEIGHT * scale(), least = (chosen * HEIGHT + HEIGHT - element.clientHeight) * scale();
      if (element.scrollTop > most) element.scrollTop = most;
      else if (element.scrollTop < least) element.scrollTop = least;
    }

    function choose(position) {
      if (!count) return;
      chosen = Math.max(0, Math.min(count - 1, position));
      reveal();
      draw();
      parts.select(chosen);
    }

    /** Show `n` items, from the top unless a position is to stay chosen. */
    function set(n, keep = -1) {
      count = n;
      chosen = keep;
      space.style.height = `${count * HEIGHT * scale() + element.clientHeight * (1 - scale())}px`;
      if (keep < 0) element.scrollTop = 0; else reveal();
      draw();
    }

    const page = () => Math.max(1, Math.floor(element.clientHeight / HEIGHT) - 1);
    return { element, set, draw, choose, move: (by) => choose(chosen + by), chosen: () => chosen, count: () => count, page };
  }

  return { make };
})();
