"use strict";
// The index of all responses as typed columns: filter, sort and grouping over numbers, without texts.

const Table = (() => {
  const COLUMNS = ["step", "line", "score", "advantage", "length", "turns", "error"];
  const missing = (value) => (value === null || value === undefined ? NaN : value);

  /**
   * @param {Object} index what index/KIND.json holds
   * @returns {Object} typed columns, `codes` and `names` of uid, finish and source
   */
  function open(index) {
    const table = { count: index.count, names: {}, text: index.text, prompts: index.uid.prompts, left_out: index.left_out || "", orders: new Map() };
    for (const name of COLUMNS) table[name] = Float64Array.from(index[name] || [], missing);
    for (const name of ["uid", "finish", "source"]) {
      table[name] = Int32Array.from(index[name].codes);
      table.names[name] = index[name].names;
    }
    return table;
  }

  /** The row of a line of a step's file. */
  function rowFinder(table) {
    let rows = null;
    const key = (step, line) => step * 2 ** 22 + line;
    return (step, line) => {
      if (!rows) {
        rows = new Map();
        for (let i = 0; i < table.count; i++) rows.set(key(table.step[i], table.line[i]), i);
      }
      return rows.get(key(step, line));
    };
  }

  /**
   * One byte per row: whether it passes the filter.
   * @param {{step, score, length, turns: [number, number]|null, finish, source: number|null, error: boolean, matches: Uint8Array|null}} filter
   */
  function mask(table, filter) {
    const pass = filter.matches ? Uint8Array.from(filter.matches) : new Uint8Array(table.count).fill(1);
    for (const name of ["step", "score", "advantage", "length", "turns"]) {
      if (!filter[name]) continue;
      const [low, high] = filter[name], column = table[name];
      for (let i = 0; i < pass.length; i++) if (!(column[i] >= low && column[i] <= high)) pass[i] = 0;
    }
    for (const name of ["finish", "source"]) {
      if (filter[name] === null || filter[name] === undefined) continue;
      const column = table[name], wanted = filter[name];
      for (let i = 0; i < pass.length; i++) if (column[i] !== wanted) pass[i] = 0;
    }
    if (filter.error) for (let i = 0; i < pass.length; i++) if (!table.error[i]) pass[i] = 0;
    return pass;
  }

  /** Positions in rising order of a column, missing values last; ties stay in the order of the files. */
  function order(column) {
    // Sorting numbers without a comparator is many times quicker; each value then has its first place.
    const values = Float64Array.from(column, (value) => (Number.isNaN(value) ? Infinity : value));
    const sorted = values.slice().sort(), places = new Map(), positions = new Uint32Array(values.length);
    for (let i = 0; i < sorted.length; i++) if (i === 0 || sorted[i] !== sorted[i - 1]) places.set(sorted[i], i);
    for (let i = 0; i < values.length; i++) {
      const place = places.get(values[i]);
      positions[place] = i;
      places.set(values[i], place + 1);
    }
    return positions;
  }

  /** Rows that pass, sorted. Each column is sorted once and remembered. */
  function select(table, filter, sort) {
    const pass = mask(table, filter);
    if (!table.orders.has(sort.by)) table.orders.set(sort.by, order(table[sort.by]));
    const positions = table.orders.get(sort.by);
    const found = new Uint32Array(pass.length);
    let n = 0;
    for (let k = 0; k < positions.length; k++) {
      const row = positions[sort.down ? positions.length - 1 - k : k];
      if (pass[row]) found[n++] = row;
    }
    return sort.down ? missingLast(table[sort.by], found.subarray(0, n)) : found.subarray(0, n);
  }

  function missingLast(column, rows) {
    let blank = 0;
    while (blank < rows.length && Number.isNaN(column[rows[blank]])) blank++;
    if (!blank) return rows;
    const turned = new Uint32Array(rows.length);
    turned.set(rows.subarray(blank));
    turned.set(rows.subarray(0, blank), rows.length - blank);
    return turned;
  }

  /**
   * Groups (same step and uid) of the rows: count, mean, spread.
   * @returns {Object} columns like a table's, with `first` (a row) and `count` of each group
   */
  function groups(table, rows) {
    const at = new Map(), first = [], n = [], sum = [], square = [], low = [], high = [], length = [], errors = [], scored = [];
    for (const row of rows) {
      const key = table.step[row] * 2 ** 22 + table.uid[row];
      let g = at.get(key);
      if (g === undefined) {
        g = first.length;
        at.set(key, g);
        first.push(row); n.push(0); sum.push(0); square.push(0); low.push(Infinity); high.push(-Infinity); length.push(0); errors.push(0); scored.push(0);
      }
      n[g]++;
      length[g] += table.length[row];
      errors[g] += table.error[row] ? 1 : 0;
      const score = table.score[row];
      if (Number.isNaN(score)) continue;
      scored[g]++;
      sum[g] += score;
      square[g] += score * score;
      low[g] = Math.min(low[g], score);
      high[g] = Math.max(high[g], score);
    }
    const column = (make) => Float64Array.from(first, (_, g) => make(g));
    return {
      count: first.length, first: Uint32Array.from(first), step: column((g) => table.step[first[g]]), n: column((g) => n[g]),
      mean: column((g) => (scored[g] ? sum[g] / scored[g] : NaN)),
      std: column((g) => (scored[g] ? Math.sqrt(Math.max(0, square[g] / scored[g] - (sum[g] / scored[g]) ** 2)) : NaN)),
      low: column((g) => (scored[g] ? low[g] : NaN)), high: column((g) => (scored[g] ? high[g] : NaN)),
      length: column((g) => length[g] / n[g]), error: column((g) => errors[g]), orders: new Map(),
    };
  }

  /** Positions of groups, sorted as `select` sorts rows. */
  function sortGroups(found, sort) {
    const positions = order(found[sort.by]);
    return sort.down ? missingLast(found[sort.by], positions.reverse()) : positions;
  }

  /** Smallest and largest finite value. */
  function range(column) {
    let low = Infinity, high = -Infinity;
    for (const value of column) { if (value < low) low = value; if (value > high) high = value; }
    return low <= high ? [low, high] : [0, 1];
  }

  /** How many of the rows that pass are in each of `bins` equal parts of [low, high]. */
  function histogram(column, pass, [low, high], bins) {
    const counts = new Array(bins).fill(0), width = (high - low) / bins || 1;
    for (let i = 0; i < column.length; i++)
      if (pass[i] && column[i] >= low && column[i] <= high) counts[Math.min(bins - 1, Math.floor((column[i] - low) / width))]++;
    return counts;
  }

  return { open, rowFinder, mask, select, groups, sortGroups, range, histogram };
})();
