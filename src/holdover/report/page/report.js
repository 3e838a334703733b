"use strict";
const images = document.getElementById("images");
for (const choice of document.querySelectorAll("input[name=show]"))
  choice.addEventListener("change", () => images.classList.toggle("differences", choice.value === "differences"));

for (const tile of document.querySelectorAll("button.tile"))
  tile.addEventListener("click", () => tile.setAttribute("aria-pressed", tile.getAttribute("aria-pressed") !== "true"));

// On a phone all rows scroll sideways together, so that a column stays one prompt.
const rows = [...document.querySelectorAll(".tiles")];
for (const row of rows)
  row.addEventListener("scroll", () => {
    for (const other of rows)
      if (Math.abs(other.scrollLeft - row.scrollLeft) > 1) other.scrollLeft = row.scrollLeft;
  }, { passive: true });

const body = document.querySelector("#table tbody");
const heads = [...document.querySelectorAll("#table thead th")];
const key = (row, column) => {
  const text = row.children[Math.min(column, row.children.length - 1)].dataset.key;
  return column === 0 ? text : Number(text);
};
const compare = (a, b) => {
  if (typeof a === "string") return a.localeCompare(b, "en", { numeric: true });
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
  return a === b ? 0 : a - b;
};
heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of heads) other.setAttribute("aria-sort", other === head ? order : "none");
  const sign = order === "ascending" ? 1 : -1;
  body.append(...[...body.rows].sort((a, b) => sign * compare(key(a, column), key(b, column))));
}));

// A long table shows its first rows, which are those that the header was sorted by, until it is unfolded.
const SHOWN = 14, unfold = document.getElementById("unfold");
if (body.rows.length > SHOWN + 4) {
  body.classList.add("folded");
  unfold.hidden = false;
  unfold.addEventListener("click", () => { body.classList.remove("folded"); unfold.hidden = true; });
}
