// Charts that answer to the pointer, and tables that sort by a click.
//
// Each panel of a chart is an SVG whose lines are groups of class "line line-N", and has data-tips, in
// which a point is [x, y, N, value, place, difference from each dense model] (eval/report/pictures.py).
"use strict";

const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

// -------------------------------------------------------------------------------- the charts

const hidden = new Set(); // numbers of lines, in all charts

function showLines() {
  for (const button of all("[data-line]")) {
    button.setAttribute("aria-pressed", !hidden.has(button.dataset.line));
  }
  for (const line of all(".panels .line")) {
    line.classList.toggle("off", hidden.has(line.classList[1].slice("line-".length)));
  }
}

function highlight(number) {
  for (const line of all(".panels .line")) {
    line.classList.toggle("faint", number !== null && !line.classList.contains(`line-${number}`));
  }
}

function setUpPanel(panel) {
  const [svg, tip] = [panel.querySelector("svg"), panel.querySelector(".tip")];
  const { title, axis, dense, points } = JSON.parse(panel.dataset.tips);

  function showTip(event) {
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const away = ([x, y]) =>
      Math.hypot(x * scale - event.clientX + box.left, y * scale - event.clientY + box.top);
    const shown = points.filter((point) => !hidden.has(String(point[2])));
    const nearest = shown.reduce((a, b) => (a && away(a) <= away(b) ? a : b), null);
    if (!nearest) return;
    const [x, y, number, value, place, ...differences] = nearest;
    const name = document.querySelector(`[data-line="${number}"]`).innerText;
    const lines = [name, `${title}: ${value}`, `${axis}: ${place}`];
    lines.push(...dense.map((model, n) => `${differences[n]} from ${model}`));
    tip.replaceChildren(...lines.map((text) => {
      return Object.assign(document.createElement("div"), { textContent: text });
    }));
    tip.hidden = false;
    // Beside the point, on the side that has more room.
    const left = x * scale < box.width / 2 ? x * scale + 12 : x * scale - 12 - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(left, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${y * scale + 12}px`;
    highlight(number);
  }

  svg.addEventListener("pointermove", showTip);
  svg.addEventListener("pointerdown", showTip);
  svg.addEventListener("pointerleave", () => ((tip.hidden = true), highlight(null)));
}

function setUpLegend(legend) {
  const buttons = all("[data-line]", legend);
  for (const button of all("button", legend)) {
    const number = button.dataset.line;
    button.addEventListener("click", () => {
      const many = buttons.map((one) => one.dataset.line);
      if (number !== undefined) hidden.delete(number) || hidden.add(number);
      else many.forEach((one) => (button.dataset.all === "true" ? hidden.delete(one) : hidden.add(one)));
      showLines();
    });
    button.addEventListener("pointerenter", () => highlight(number ?? null));
    button.addEventListener("pointerleave", () => highlight(null));
  }
}

function setUpChoice(select) {
  const show = () => all(".chart").forEach((chart, n) => (chart.hidden = n !== select.selectedIndex));
  select.addEventListener("change", show);
  show();
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

all("select").forEach(setUpChoice);
all(".panels figure").forEach(setUpPanel);
all(".legend").forEach(setUpLegend);
all("table").forEach(makeSortable);
