"use strict";
document.documentElement.classList.add("scripted");

const said = document.getElementById("said");

function say(words) {
  said.textContent = words;
}

async function copy(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The browser may deny clipboard access to a page that was opened from a file.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  const words = button.textContent;
  button.textContent = done ? "Copied" : "Select and copy by hand";
  say(button.textContent);
  setTimeout(() => { button.textContent = words; }, 1600);
}

function cellText(cell) {
  return (cell.dataset.text ?? cell.textContent).trim();
}

function tableText(table, form) {
  // A spreadsheet gets the hidden columns, too.
  const isCopied = (cell) => form === "tsv" || getComputedStyle(cell).display !== "none";
  const rows = [...table.rows].map((row) => [...row.cells].filter(isCopied).map(cellText));
  if (form === "tsv") return rows.map((row) => row.join("\t")).join("\n") + "\n";
  rows.splice(1, 0, rows[0].map(() => "---"));
  return rows.map((row) => `| ${row.map((cell) => cell.replaceAll("|", "\\|")).join(" | ")} |`).join("\n") + "\n";
}

function compareCells(a, b) {
  const numbers = [Number(a), Number(b)];
  return numbers.every(Number.isFinite) ? numbers[0] - numbers[1] : a.localeCompare(b);
}

function sortBy(table, column) {
  const head = table.tHead.rows[0].cells[column];
  const isText = head.classList.contains("text") || column === 0;
  const before = head.getAttribute("aria-sort");
  // Number columns are first sorted in descending order.
  const way = before ? (before === "ascending" ? "descending" : "ascending") : isText ? "ascending" : "descending";
  for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", way);
  const value = (row) => row.cells[column].dataset.sort ?? cellText(row.cells[column]);
  const rows = [...table.tBodies[0].rows].sort((first, second) => {
    const [a, b] = [value(first), value(second)];
    if (a === "" || b === "") return (a === "") - (b === "");
    return way === "ascending" ? compareCells(a, b) : compareCells(b, a);
  });
  table.tBodies[0].append(...rows);
  say(`sorted by ${cellText(head)}, ${way}`);
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    button.addEventListener("click", () => sortBy(table, column));
    cell.replaceChildren(button);
  });
}
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy(document.getElementById(button.dataset.copy).textContent, button));
}
for (const button of document.querySelectorAll("[data-copy-table]")) {
  const { copyTable, form } = button.dataset;
  button.addEventListener("click", () => copy(tableText(document.getElementById(copyTable), form), button));
}
function hintAtScrolling() {
  for (const region of document.querySelectorAll(".hinted")) {
    region.classList.toggle("overflows", region.scrollWidth > region.clientWidth);
  }
}

for (const button of document.querySelectorAll("[data-more]")) {
  const words = button.textContent;
  button.addEventListener("click", () => {
    const isOpen = document.getElementById(button.dataset.more).classList.toggle("all");
    button.setAttribute("aria-expanded", String(isOpen));
    button.textContent = isOpen ? "Fewer columns" : words;
    hintAtScrolling();
  });
}
addEventListener("resize", hintAtScrolling);
hintAtScrolling();
// Printed pages show the content of closed sections.
const opened = new Set();
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not([open])")) {
    part.open = true;
    opened.add(part);
  }
});
addEventListener("afterprint", () => {
  for (const part of opened) part.open = false;
  opened.clear();
});
