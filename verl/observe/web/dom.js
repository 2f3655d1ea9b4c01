"use strict";
// Elements and texts. Text enters the page only as text nodes: nothing a run contains is parsed as HTML.

const Dom = (() => {
  /**
   * Make an element. Attributes: `class`, `on*` functions, `style` as an object, true/false/null for switches.
   * @param {string} tag
   * @param {Object<string, *>} [attributes]
   * @param {...*} children strings, numbers, nodes, arrays of them; null and false are left out
   * @returns {HTMLElement}
   */
  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "value") element.value = value;
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    append(element, children);
    return element;
  }

  function append(element, children) {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : String(child));
    }
    return element;
  }

  function fill(element, ...children) {
    element.replaceChildren();
    return append(element, children);
  }

  /** A number for people: four digits that count, thousands apart. */
  function number(value) {
    if (typeof value !== "number" || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US");
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
    return String(Number(value.toPrecision(4)));
  }

  function signed(value) {
    return typeof value === "number" && value > 0 ? `+${number(value)}` : number(value);
  }

  function seconds(value) {
    if (!Number.isFinite(value)) return "–";
    if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
    if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
    return value < 7200 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
  }

  /** A value of a config or of a reward function as one text. */
  function text(value) {
    if (value === null || value === undefined) return "null";
    if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(6)));
    return typeof value === "string" ? value : JSON.stringify(value);
  }

  /** Call `action` when calls have stopped coming for `wait` milliseconds. */
  function later(action, wait) {
    let timer = 0;
    return (...values) => {
      clearTimeout(timer);
      timer = setTimeout(() => action(...values), wait);
    };
  }

  /** A row of buttons of which one is chosen. */
  function choice(label, options, chosen, choose) {
    const buttons = options.map(([value, name, title]) =>
      h("button", { type: "button", "data-value": value, title, "aria-pressed": String(value === chosen),
        onclick: () => { mark(value); choose(value); } }, name));
    const mark = (value) => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === String(value)));
    };
    return Object.assign(h("div", { class: "choice", role: "group", "aria-label": label }, buttons), { mark });
  }

  /** Show `lines` at the pointer; null hides them. */
  function tip(lines, x, y) {
    const box = document.getElementById("tip");
    box.hidden = !lines;
    if (!lines) return;
    fill(box, lines);
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    box.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
  }

  /** Show a description at the pointer. */
  function described(element, description) {
    if (!description) return element;
    element.addEventListener("pointerenter", (event) => tip(description, event.clientX, event.clientY));
    element.addEventListener("pointerleave", () => tip(null));
    return element;
  }

  /** A path or a key, which breaks between its parts before it breaks elsewhere. */
  const breakable = (value) => String(value).split(/(?<=[/._])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));

  const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

  const empty = (message) => h("p", { class: "empty" }, message);

  /** A colour of the theme. */
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  return { h, append, fill, number, signed, seconds, text, later, choice, tip, described, breakable, percent, empty, colour };
})();
