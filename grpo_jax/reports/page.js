// What report.html does, behind tables.js: values under the pointer, the browser of completions. Nothing is fetched.
// What a run wrote reaches the page as text nodes alone, never as HTML.

const ROWS = 50;  // of one page of the completions

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

function drawn(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Text with what was searched for marked; of a folded line, what is far before the first place is left out.
function marked(text, query) {
  const wanted = query.trim().toLowerCase(), lower = text.toLowerCase();
  if (!wanted || lower.length !== text.length) return [text];
  const parts = [];
  let from = Math.max(0, lower.indexOf(wanted) - 60);
  if (from) parts.push(element("span", { class: "lead" }, text.slice(0, from)), element("span", { class: "dots" }, "…"));
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), element("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}

// ----------------------------------------------------------------------------------------------------- values of curves

// Shows the values of a figure's nearest iteration: under the pointer or finger, or by the arrow keys.
function readable(figure) {
  const svg = figure.querySelector("svg:not(.swatch)");
  const { frame: [first, last, left, right, low, high, bottom, top], lines } = JSON.parse(figure.dataset.points);
  lines.forEach((line, place) => { line.x ??= lines[place - 1].x; });
  const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const toX = (step) => left + ((step - first) / (last - first || 1)) * (right - left);
  const toY = (value) => bottom + ((value - low) / (high - low)) * (top - bottom);
  const readout = element("output", { class: "readout", hidden: true });
  const mark = drawn("g", { class: "mark" });
  figure.append(readout);
  svg.append(mark);
  let at = steps.length - 1;

  function show(place) {
    at = Math.max(0, Math.min(steps.length - 1, place));
    const step = steps[at], x = toX(step);
    mark.replaceChildren(drawn("line", { x1: x, x2: x, y1: top, y2: bottom }));
    readout.replaceChildren(element("b", {}, `iteration ${number(step)}`));
    for (const line of lines) {
      const value = line.y[line.x.indexOf(step)];
      if (value === undefined) continue;
      const colour = `var(--series-${(line.place % 6) + 1})`;
      mark.append(drawn("circle", { cx: x, cy: toY(value), r: 3.5, style: `fill: ${colour}` }));
      const dot = element("i", { style: `background: ${colour}` });
      readout.append(element("span", {}, dot, `${line.name} `, element("b", {}, number(value))));
    }
    readout.hidden = false;
    readout.classList.toggle("left", x > (left + right) / 2);
    readout.style.top = `${svg.getBoundingClientRect().top - figure.getBoundingClientRect().top}px`;
  }
  function hide() {
    mark.replaceChildren();
    readout.hidden = true;
  }
  function follow(event) {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const away = steps.map((step) => Math.abs(toX(step) - x));
    show(away.indexOf(Math.min(...away)));
  }
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  svg.addEventListener("focus", () => { if (readout.hidden) show(at); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const place = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (place === undefined) return;
    event.preventDefault();
    show(place);
  });
}

// A small curve: the mean of each iteration as a line, each completion as a dot.
function smallCurve(column, points, place) {
  const values = points.flatMap(([, , all]) => all), frame = [points[0][0], points.at(-1)[0], 54, 306, 0, 0, 90, 10];
  const margin = Math.min(...values) === Math.max(...values) ? Math.abs(values[0]) * 0.1 || 1 : 0;
  [frame[4], frame[5]] = [Math.min(...values) - margin, Math.max(...values) + margin];
  const [first, last, left, right, low, high, bottom, top] = frame;
  const toX = (step) => left + ((step - first) / (last - first || 1)) * (right - left);
  const toY = (value) => bottom + ((value - low) / (high - low)) * (top - bottom);
  const colour = `var(--series-${(place % 6) + 1})`;
  const words = (attributes, text) => drawn("text", { class: "tick", ...attributes }, text);
  const svg = drawn("svg", { viewBox: "0 0 320 112", role: "img", "aria-label": column.label });
  for (const value of [low, high]) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: right, y1: toY(value), y2: toY(value) }));
    svg.append(words({ x: left - 5, y: toY(value) + 3.5, "text-anchor": "end" }, number(value)));
  }
  svg.append(words({ x: left, y: 106 }, number(first)), words({ x: right, y: 106, "text-anchor": "end" }, number(last)));
  for (const [step, , all] of points) {
    for (const value of all) {
      svg.append(drawn("circle", { class: "one", cx: toX(step), cy: toY(value), r: 2.5, style: `fill: ${colour}` }));
    }
  }
  const path = points.map(([step, mean]) => `${toX(step).toFixed(1)} ${toY(mean).toFixed(1)}`).join("L");
  svg.append(drawn("path", { class: "smooth", d: `M${path}`, style: `stroke: ${colour}` }));
  const lines = [{ name: "mean", place, x: points.map((point) => point[0]), y: points.map((point) => point[1]) }];
  const figure = element("figure", { class: "chart", "data-points": JSON.stringify({ frame, lines }) });
  figure.append(element("figcaption", {}, column.label), svg);
  readable(figure);
  return figure;
}

// ------------------------------------------------------------------------------------------------ the completions

// The browser: the completions, or the prompts; those of one prompt with its history.
function browse(root, data) {
  const all = openTable(data), prompts = groupPrompts(all, data.pictures);
  const state = { table: all, chosen: null, query: "", column: null, descending: false, page: 0, open: false };
  let before = {};  // where a prompt was chosen
  const say = "search in all texts", box = element("input", { type: "search", placeholder: say, "aria-label": say });
  const tabs = element("div", { class: "tabs" }), count = element("span", { class: "count", "aria-live": "polite" });
  const about = element("div"), pager = element("div", { class: "pager" });
  const table = element("table", { class: "data browser" });
  root.replaceChildren(
    element("div", { class: "bar-of-tools" }, tabs, box, count), about, element("div", { class: "wide" }, table), pager);
  box.addEventListener("input", () => change({ query: box.value, page: 0 }));

  function change(values) {
    Object.assign(state, values);
    render();
  }
  function choose(place) {
    const { table, column, descending, page, query } = state;
    before = { table, column, descending, page, query };
    change({ table: all, chosen: place, column: null, page: 0, query: "" });
    root.scrollIntoView({ block: "start" });
  }
  function rowsNow() {
    const rows = state.chosen === null ? state.table.rows : prompts.groups[state.chosen];
    const found = search(state.table, rows, state.query);
    return state.column ? sort(state.column, found, state.descending) : found;
  }

  function render() {
    const rows = rowsNow(), pages = Math.max(1, Math.ceil(rows.length / ROWS));
    state.page = Math.min(state.page, pages - 1);
    const shown = rows.slice(state.page * ROWS, (state.page + 1) * ROWS);
    const focused = root.contains(document.activeElement) ? document.activeElement.textContent : "";
    if (box.value !== state.query) box.value = state.query;
    tabs.replaceChildren(...tabButtons());
    const what = state.table === prompts ? "prompt" : "completion";
    count.textContent = `${rows.length} ${what}${rows.length === 1 ? "" : "s"}`;
    about.replaceChildren(...(state.chosen === null ? [] : [promptPanel()]));
    const columns = state.table.columns.filter(isColumn);
    table.replaceChildren(header(columns), element("tbody", {}, ...shown.map((row) => line(columns, row))));
    pager.replaceChildren(...(pages > 1 ? pageButtons(pages) : []));
    const again = [...root.querySelectorAll("button")].find((button) => button.textContent === focused);
    if (again) again.focus({ preventScroll: true });  // what was pressed has been made anew
  }

  function isColumn(column) {
    return !["text", "answer", ...(state.chosen === null ? [] : ["prompt"])].includes(column.name);
  }

  function tabButtons() {
    const tab = (label, table) => element("button", {
      "aria-pressed": String(state.table === table && state.chosen === null),
      onclick: () => change({ table, chosen: null, column: null, page: 0, query: "" }),
    }, label);
    const fold = { "aria-pressed": String(state.open), onclick: () => change({ open: !state.open }) };
    return [tab("completions", all), tab("prompts", prompts), element("button", fold, "unfold")];
  }

  function header(columns) {
    const cells = columns.map((column) => {
      const sorted = state.column === column ? (state.descending ? "descending" : "ascending") : "none";
      const descending = sorted === "none" ? column.kind !== "text" && column.name !== "step" : !state.descending;
      const title = column.name.startsWith("watch/") ? "watched, never trained on" : null;
      const button = element("button", { title, onclick: () => change({ column, descending, page: 0 }) }, column.label);
      return element("th", { "aria-sort": sorted, class: column.kind }, button);
    });
    return element("thead", {}, element("tr", {}, ...cells));
  }

  function line(columns, row) {
    const cells = columns.map((column) =>
      element("td", { class: column.kind, "data-label": column.label }, ...content(column, row)));
    const made = element("tr", { tabindex: "0", onclick: act }, ...cells);
    made.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target === made) act(); });
    made.classList.toggle("later", isLater(row));
    if (state.table === all) fold(state.open);

    function act() {
      if (!getSelection().isCollapsed) return;  // text is being selected
      if (state.table === prompts) choose(row);
      else fold(!made.classList.contains("open"));
    }
    function fold(open) {
      made.classList.toggle("open", open);
      made.setAttribute("aria-expanded", String(open));
    }
    return made;
  }

  // Whether a row goes on with the episode above it.
  function isLater(row) {
    return state.table === all && !state.column && !state.query && cell(columnOf(all, "turn"), row) > 1;
  }

  function content(column, row) {
    const value = cell(column, row);
    if (column.kind === "flag") return [value === null ? "" : value ? "yes" : "no"];
    if (column.kind === "number") return [number(value)];
    if (column.name === "prompt" && isLater(row)) return [];
    const parts = column.name === "prompt" ? pictures(state.table === prompts ? prompts.groups[row][0] : row) : [];
    parts.push(element("div", { class: "clip" }, ...marked(value ?? "", state.query)));
    if (column.name === "prompt" && state.table === all) {
      const toHistory = (event) => {
        event.stopPropagation();
        choose(prompts.groups.findIndex((rows) => rows.includes(row)));
      };
      parts.push(element("button", { class: "link", onclick: toHistory }, "history"));
    }
    if (column.name !== "completion") return parts;
    for (const [name, label] of [["text", "judged"], ["answer", "answer"]]) {
      const told = cell(columnOf(all, name), row);
      if (told === null) continue;
      parts.push(element("div", { class: "clip aside" }, element("b", {}, `${label} `), ...marked(told, state.query)));
    }
    return parts;
  }

  function pictures(row) {
    return (data.pictures?.[row] ?? []).map((place) => {
      const source = data.images[place];
      if (!source.startsWith("data:")) return element("p", { class: "note" }, source);  // a file that is gone
      return element("img", { src: source, alt: "shown by the prompt" });
    });
  }

  function promptPanel() {
    const rows = prompts.groups[state.chosen], prompt = cell(columnOf(all, "prompt"), rows[0]) ?? "";
    const told = all.columns.filter(isMeasure).map((column) => [column, history(all, rows, column)]);
    const curves = told.filter(([, points]) => points.length > 1)
      .map(([column, points], place) => smallCurve(column, points, place));
    const note = curves.length ? "A dot is a completion; the line is the mean of an iteration." : "Seen in one iteration.";
    return element("div", { class: "about" },
      element("button", { onclick: () => change({ ...before, chosen: null }) }, "← back"), ...pictures(rows[0]),
      element("p", { class: "whole" }, prompt), element("p", { class: "note" }, note),
      element("div", { class: "charts" }, ...curves));
  }

  function pageButtons(pages) {
    const to = (label, page, name) => element("button", {
      disabled: page < 0 || page >= pages, "aria-label": name, onclick: () => change({ page }),
    }, label);
    const where = `page ${state.page + 1} of ${pages}`;
    return [to("‹", state.page - 1, "page before"), where, to("›", state.page + 1, "next page")];
  }

  render();
}

document.querySelectorAll("figure[data-points]").forEach(readable);
const given = document.getElementById("data");
if (given) browse(document.getElementById("completions"), JSON.parse(given.textContent));
