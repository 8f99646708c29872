// Tables of what a run wrote: searched, sorted, grouped by prompt. page.js comes behind it, in one script.
"use strict";

// A table is {columns, rows}: of columns {name, label, kind, values, words}, where texts are places in `words`.
function openTable(data) {
  const columns = data.columns.map((column) => ({ ...column, label: labelOf(column.name) }));
  return { columns, rows: columns.length ? columns[0].values.map((_, row) => row) : [] };
}

function labelOf(name) {
  return ({ step: "iteration", length: "tokens" }[name] ?? name).replace(/^(reward|watch)\//, "").replaceAll("_", " ");
}

function columnOf(table, name) {
  return table.columns.find((column) => column.name === name);
}

function cell(column, row) {
  const value = column ? column.values[row] : null;
  return value === null || value === undefined || !column.words ? value ?? null : column.words[value];
}

// The rows with a text that has the query in it, in whatever case.
function search(table, rows, query) {
  const wanted = query.trim().toLowerCase();
  if (!wanted) return rows;
  const hits = table.columns.filter((column) => column.words).map((column) => {
    const hit = column.words.map((word) => word.toLowerCase().includes(wanted));
    return (row) => column.values[row] !== null && hit[column.values[row]];
  });
  return rows.filter((row) => hits.some((isHit) => isHit(row)));
}

// Rows in the order of a column, equals as they stood; where there is no value at the end either way.
function sort(column, rows, descending) {
  let key = (row) => column.values[row];
  if (column.words) {
    const order = column.words.map((_, place) => place).sort((a, b) => column.words[a].localeCompare(column.words[b]));
    const rank = new Map(order.map((place, at) => [place, at]));
    key = (row) => (column.values[row] === null ? null : rank.get(column.values[row]));
  }
  const sign = descending ? -1 : 1;
  const there = rows.filter((row) => key(row) !== null);
  return [...there.sort((a, b) => sign * (key(a) - key(b))), ...rows.filter((row) => key(row) === null)];
}

const isMeasure = (column) => /^(reward|watch)\//.test(column.name);

// Means of a measure over rows by iteration: [[iteration, mean, values], …], in order.
function history(table, rows, column) {
  const steps = columnOf(table, "step"), found = new Map();
  for (const row of rows) {
    const value = column.values[row];
    if (value === null) continue;
    const step = steps.values[row];
    found.set(step, [...(found.get(step) ?? []), value]);
  }
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return [...found].sort((a, b) => a[0] - b[0]).map(([step, values]) => [step, mean(values), values]);
}

// One row for each prompt: how often it was visited, each measure's mean when last seen, and since the first time.
function groupPrompts(table, pictures) {
  const prompts = columnOf(table, "prompt"), steps = columnOf(table, "step"), groups = new Map();
  if (!prompts) return { columns: [], rows: [], groups: [] };
  for (const row of table.rows) {
    const key = `${prompts.values[row]} ${pictures ? pictures[row] : ""}`;
    if (groups.has(key)) groups.get(key).push(row);
    else groups.set(key, [row]);
  }
  const members = [...groups.values()];
  const counted = (name, values) => ({ name, label: name, kind: "number", values });
  const columns = [
    { ...prompts, values: members.map((rows) => prompts.values[rows[0]]) },
    counted("iterations", members.map((rows) => new Set(rows.map((row) => steps.values[row])).size)),
    counted("completions", members.map((rows) => rows.length)),
  ];
  for (const column of table.columns.filter(isMeasure)) {
    const told = members.map((rows) => history(table, rows, column));
    columns.push(counted(`${column.label}, last`, told.map((points) => (points.length ? points.at(-1)[1] : null))));
    const change = (points) => (points.length > 1 ? points.at(-1)[1] - points[0][1] : null);
    columns.push(counted(`${column.label}, change`, told.map(change)));
  }
  const known = columns.filter((column) => column.values.some((value) => value !== null));
  return { columns: known, rows: members.map((_, place) => place), groups: members };
}

// Three significant digits, no exponent where that is readable.
function number(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e5) return String(value);
  if (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5) {
    return String(Number(value.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))))));
  }
  return value.toExponential(1).replace("e+", "e");
}

if (typeof module !== "undefined") module.exports = { openTable, cell, search, sort, history, groupPrompts, number };
