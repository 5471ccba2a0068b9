// The chart of a report, which answers to the pointer, and tables that sort by a click.
//
// The data is in <script id="data">, a list of charts (eval/report/page.py makes it):
//   {group, title, unit, dense: {label: height},
//    lines: [{name, x: {axis: [...]}, y, low, high, shown}]}
// Axes are tokens, flops and hours of a training, or ratio. low and high: the 95% interval; null
// where it is unknown. shown: the same as text, as in the tables.
"use strict";

const AXES = {
  tokens: { label: "training tokens", show: withLetter },
  flops: { label: "FLOPs of the training", show: (count) => count && count.toExponential(1) },
  hours: { label: "hours of training, without evaluations", show: shortNumber },
  ratio: { label: "share of groups on the window", show: shortNumber },
};
const NUM_COLORS = 10; // in report.css; further lines are dashed
const DASHES = ["", "7 4", "2 4", "9 3 2 3"];
const MARKERS = ["circle", "square", "diamond", "triangle"];
const MOST_BANDS = 4; // more of them would cover each other
const MARGIN = { top: 28, right: 16, bottom: 46, left: 52 };

// ------------------------------------------------------------------------------------ numbers

function shortNumber(number) {
  return String(Number(number.toPrecision(3)));
}

function withLetter(count) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (count >= size) return shortNumber(count / size) + letter;
  }
  return shortNumber(count);
}

// About `wanted` round numbers from `low` to `high`.
function roundTicks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  const tick = (place) => Number(((first + place) * step).toPrecision(12));
  return Array.from({ length: count }, (_, place) => tick(place));
}

// ---------------------------------------------------------------------------------- the chart

function setUpChart(section, charts) {
  const [scoreChoice, axisChoice] = section.querySelectorAll("select");
  const [plot, svg] = [section.querySelector(".plot"), section.querySelector(".plot svg")];
  const [legend, tip] = [section.querySelector(".legend"), section.querySelector(".tip")];
  const names = [...new Set(charts.flatMap((chart) => chart.lines.map((line) => line.name)))];
  const hidden = new Set();
  let points = []; // of the lines that are shown, with their places on the screen

  const chosen = () => charts[scoreChoice.value];

  function element(tag, attributes, parent = svg) {
    const made = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    parent.append(made);
    return made;
  }

  function write(text, x, y, anchor, parent = svg) {
    element("text", { x, y, "text-anchor": anchor }, parent).textContent = text;
  }

  // The color, dashes and marker of a line: the same in all charts.
  function look(name) {
    const place = names.indexOf(name);
    const color = `var(--line-${place % NUM_COLORS})`;
    const dashes = DASHES[Math.floor(place / NUM_COLORS) % DASHES.length];
    return { color, dashes, marker: MARKERS[place % MARKERS.length] };
  }

  function drawMarker(x, y, { marker, color }, parent) {
    const shapes = {
      circle: `M${x - 4} ${y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z`,
      square: `M${x - 3.5} ${y - 3.5}h7v7h-7z`,
      diamond: `M${x} ${y - 5}l5 5l-5 5l-5 -5z`,
      triangle: `M${x} ${y - 5}l5 8.5h-10z`,
    };
    element("path", { d: shapes[marker], fill: color, class: "marker" }, parent);
  }

  function draw() {
    const chart = chosen();
    const axis = axisChoice.value;
    const lines = chart.lines.filter((line) => line.x[axis] && !hidden.has(line.name));
    const width = plot.clientWidth;
    const height = Math.max(260, Math.min(440, width * 0.6));
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", `${chart.title} over ${AXES[axis].label}`);
    hideTip();

    // The whole chart decides the scales, so that nothing moves when a line is hidden.
    const all = chart.lines.filter((line) => line.x[axis]);
    const heights = all.flatMap((line) => [...line.y, ...line.low, ...line.high]);
    const known = [...heights, ...Object.values(chart.dense)].filter((value) => value !== null);
    const top = Math.max(...known);
    const least = Math.min(...known);
    const low = least < top ? least : top - Math.abs(top) / 20; // room below a single height
    const yTicks = roundTicks(low, top, 5);
    const yStep = yTicks.length > 1 ? yTicks[1] - yTicks[0] : 1;
    const lowest = Math.floor(low / yStep + 1e-9) * yStep;
    const highest = Math.max(Math.ceil(top / yStep - 1e-9) * yStep, lowest + yStep);
    const xs = all.flatMap((line) => line.x[axis]);
    const [first, last] = [Math.min(...xs), Math.max(...xs)];
    const yPlace = (y) => bottom - ((y - lowest) / (highest - lowest)) * (bottom - MARGIN.top);
    // Where all points have one x (one ratio, say), the lines stand side by side.
    const xPlace = (x, line) => {
      const column = (all.indexOf(line) + 1) / (all.length + 1);
      const share = first < last ? (x - first) / (last - first) : column;
      return MARGIN.left + 8 + share * (right - MARGIN.left - 16);
    };

    const grid = element("g", { class: "grid" });
    for (const y of roundTicks(lowest, highest, 5)) {
      element("path", { d: `M${MARGIN.left} ${yPlace(y)}H${right}` }, grid);
      write(shortNumber(y), MARGIN.left - 8, yPlace(y) + 4, "end", grid);
    }
    const xTicks = first < last ? roundTicks(first, last, width < 500 ? 4 : 8) : [];
    for (const x of xTicks) write(AXES[axis].show(x), xPlace(x), bottom + 20, "middle", grid);
    const under = first < last ? "" : ` ${AXES[axis].show(first)}`;
    write(AXES[axis].label + under, (MARGIN.left + right) / 2, height - 6, "middle", grid);
    write(chart.unit, 0, 12, "start", grid);
    for (const [label, y] of Object.entries(chart.dense)) {
      element("path", { d: `M${MARGIN.left} ${yPlace(y)}H${right}`, class: "dense" });
      write(`${label} ${shortNumber(y)}`, MARGIN.left + 4, yPlace(y) - 5, "start");
    }

    points = [];
    for (const line of lines) {
      const { color, dashes, marker } = look(line.name);
      const group = element("g", { class: "line" });
      group.dataset.name = line.name;
      const at = line.x[axis].map((x, place) => [xPlace(x, line), yPlace(line.y[place])]);
      drawInterval(line, axis, group, color, xPlace, yPlace, lines.length);
      element("path", { d: "M" + at.join("L"), stroke: color, "stroke-dasharray": dashes }, group);
      if (at.length < 60) for (const [x, y] of at) drawMarker(x, y, { marker, color }, group);
      at.forEach(([x, y], place) => points.push({ line, place, x, y, group }));
    }
    svg.querySelectorAll("text").forEach((text) => svg.append(text)); // above the lines
    drawLegend(chart, axis);
  }

  function drawInterval(line, axis, group, color, xPlace, yPlace, numLines) {
    const known = line.y.map((_, place) => place).filter((place) => line.low[place] !== null);
    const places = (ys) => known.map((n) => [xPlace(line.x[axis][n], line), yPlace(ys[n])]);
    const around = [...places(line.high), ...places(line.low).reverse()];
    const path = around.length ? `M${around.join("L")}z` : "";
    const kind = known.length < 2 ? "whisker" : numLines > MOST_BANDS ? "band on-touch" : "band";
    if (path) element("path", { d: path, class: kind, fill: color, stroke: color }, group);
  }

  function drawLegend(chart, axis) {
    legend.replaceChildren();
    const shown = chart.lines.filter((line) => line.x[axis]).map((line) => line.name);
    const button = (text, pressed, act) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = text;
      if (pressed !== null) made.setAttribute("aria-pressed", pressed);
      made.addEventListener("click", () => (act(), draw()));
      legend.append(made);
      return made;
    };
    for (const name of shown) {
      const made = button(name, !hidden.has(name), () => hidden.delete(name) || hidden.add(name));
      const key = element("svg", { width: 28, height: 12, "aria-hidden": true }, made);
      made.prepend(key);
      const { color, dashes, marker } = look(name);
      const stroke = { stroke: color, "stroke-width": 2, "stroke-dasharray": dashes };
      element("path", { d: "M0 6H28", ...stroke }, key);
      drawMarker(14, 6, { marker, color }, key);
      made.addEventListener("pointerenter", () => highlight(name));
      made.addEventListener("pointerleave", () => highlight(null));
    }
    if (shown.length > 2) {
      button("show all", null, () => hidden.clear());
      button("hide all", null, () => shown.forEach((name) => hidden.add(name)));
    }
  }

  function highlight(name) {
    for (const group of svg.querySelectorAll(".line")) {
      group.classList.toggle("faint", name !== null && group.dataset.name !== name);
      group.classList.toggle("touched", group.dataset.name === name);
    }
  }

  function showTip(event) {
    const box = svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const distance = (point) => Math.hypot(point.x - x, point.y - y);
    const nearest = points.reduce((a, b) => (a && distance(a) <= distance(b) ? a : b), null);
    if (!nearest) return;
    const { line, place } = nearest;
    const chart = chosen();
    const axis = axisChoice.value;
    const rows = [line.name, `${chart.title}: ${line.shown[place]}`];
    rows.push(`${AXES[axis].label}: ${AXES[axis].show(line.x[axis][place])}`);
    for (const [label, height] of Object.entries(chart.dense)) {
      const change = line.y[place] - height;
      const size = Math.abs(change).toFixed(chart.unit === "%" ? 1 : 4);
      rows.push(`${change < 0 ? "−" : "+"}${size} from ${label}`);
    }
    tip.replaceChildren(...rows.map(() => document.createElement("div")));
    rows.forEach((row, place) => (tip.children[place].textContent = row));
    tip.firstChild.style.borderColor = look(line.name).color;
    tip.hidden = false;
    // Beside the point, or below it where a narrow screen has no room there.
    const width = tip.offsetWidth;
    const widest = plot.clientWidth - width;
    const beside = nearest.x + 14 <= widest ? nearest.x + 14 : nearest.x - 14 - width;
    const inside = Math.max(0, Math.min(nearest.x - width / 2, widest));
    tip.style.left = `${beside >= 0 ? beside : inside}px`;
    tip.style.top = `${beside >= 0 ? Math.max(0, nearest.y - 20) : nearest.y + 16}px`;
    highlight(line.name);
  }

  function hideTip() {
    tip.hidden = true;
    highlight(null);
  }

  // Axes that a line of the chart has. The one chosen stays chosen where it can.
  function offerAxes() {
    const before = axisChoice.value;
    const offered = Object.keys(AXES).filter((axis) => chosen().lines.some((line) => line.x[axis]));
    axisChoice.replaceChildren(...offered.map((axis) => new Option(AXES[axis].label, axis)));
    if (offered.includes(before)) axisChoice.value = before;
    axisChoice.disabled = offered.length < 2;
    draw();
  }

  for (const label of new Set(charts.map((chart) => chart.group))) {
    const group = Object.assign(document.createElement("optgroup"), { label });
    charts.forEach((chart, place) => {
      if (chart.group === label) group.append(new Option(chart.title, place));
    });
    scoreChoice.append(group);
  }
  scoreChoice.addEventListener("change", offerAxes);
  axisChoice.addEventListener("change", draw);
  svg.addEventListener("pointermove", showTip);
  svg.addEventListener("pointerdown", showTip);
  svg.addEventListener("pointerleave", hideTip);
  window.addEventListener("resize", () => plot.clientWidth !== svg.viewBox.baseVal.width && draw());
  section.hidden = false;
  offerAxes();
}

// -------------------------------------------------------------------------------- the tables

// What a cell is sorted by: `31.2 → 88.0 (95.8)` by 88.0, `1.25M` by 1,250,000. null: empty.
function sortKey(text) {
  if (text === "" || text.startsWith("–")) return null;
  if (text.startsWith("not reached")) return Infinity;
  const number = /^([+-]?[\d,]*\.?\d+)(%|k|M|B| s| min| h)?(?![\w.-])/;
  const found = text.split("→").at(-1).trim().match(number);
  if (!found) return text;
  const size = { k: 1e3, M: 1e6, B: 1e9, " min": 60, " h": 3600 }[found[2]] ?? 1;
  return Number(found[1].replaceAll(",", "")) * size;
}

function sortBy(table, column, isRising) {
  const key = (row) => sortKey(row.cells[column].textContent.trim());
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, key: key(row) }));
  const areNumbers = rows.every(({ key }) => typeof key !== "string");
  const byName = new Intl.Collator("en", { numeric: true }).compare;
  const compare = (a, b) => (areNumbers ? a - b || 0 : byName(a, b));
  const isEmpty = ({ key }) => key === null; // empty cells come last
  const inOrder = (a, b) => (isRising ? compare(a.key, b.key) : compare(b.key, a.key));
  rows.sort((a, b) => isEmpty(a) - isEmpty(b) || inOrder(a, b));
  table.tBodies[0].append(...rows.map(({ row }) => row));
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const isRising = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", isRising ? "ascending" : "descending");
      sortBy(table, column, isRising);
    });
  });
}

const charts = JSON.parse(document.getElementById("data").textContent);
if (charts.length) setUpChart(document.getElementById("chart"), charts);
document.querySelectorAll("table").forEach(makeSortable);
