// What the tables of these pages share: headers that sort, rows that the keyboard reaches, focus that survives an update.

import { el } from "./dom.js";

// A header whose button goes from ascending to descending to unsorted; `choose` gets the new value of `sort`.
export function sortHeader(column, sort, choose) {
  const isSorted = sort.replace(/^-/, "") === column.key;
  const isDown = sort.startsWith("-");
  const next = !isSorted
    ? column.number
      ? `-${column.key}`
      : column.key
    : isDown === Boolean(column.number)
      ? isDown
        ? column.key
        : `-${column.key}`
      : "";
  const order = isSorted ? (isDown ? "descending" : "ascending") : "none";
  return el(
    column.number ? "th.number" : "th",
    { scope: "col", "aria-sort": order },
    el(
      "button.sort",
      { type: "button", "data-key": `sort ${column.key}`, onclick: () => choose(next) },
      column.label,
      el("span.arrow", { "aria-hidden": "true" }, isSorted ? (isDown ? "↓" : "↑") : ""),
    ),
  );
}

// The focus goes to the link of the next or previous row.
export function focusStep(table, step) {
  const links = [...table.querySelectorAll("a.row-link")];
  if (!links.length) return;
  const current = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
  const next =
    current < 0 ? (step > 0 ? 0 : links.length - 1) : Math.max(0, Math.min(links.length - 1, current + step));
  links[next].focus();
  links[next].scrollIntoView({ block: "nearest" });
}

export function keepingFocus(box, draw) {
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  draw();
  if (!focused) return;
  const again = [...box.querySelectorAll("[data-key]")].find((node) => node.dataset.key === focused);
  if (again) again.focus({ preventScroll: true });
}
