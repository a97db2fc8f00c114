// The keyboard: one table of keys for the page that is shown, a few that hold everywhere, and the page that explains them.

import { el } from "./dom.js";

// Entries of {key, also, label, run}; `isNative` marks what the browser does by itself and the help only names.
let pageKeys = [];
const EVERYWHERE = [
  { key: "?", label: "show these keys", run: showHelp },
  { key: "Escape", label: "leave a field, close what is open", run: () => {} },
];
const KEY_NAMES = { Escape: "Esc", Enter: "Enter", ArrowLeft: "←", ArrowRight: "→" };

export function setKeys(keys) {
  pageKeys = keys || [];
}

export function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const field = event.target.closest && event.target.closest("input:not([type=checkbox]), textarea, select");
    if (field && event.key === "Escape") field.blur();
    if (field || document.querySelector("dialog[open]")) return;
    const entry = [...pageKeys, ...EVERYWHERE].find(
      (each) => each.key === event.key || (each.also || []).includes(event.key),
    );
    if (!entry || entry.isNative) return;
    if (event.key !== "Escape") event.preventDefault();
    entry.run();
  });
}

export function showHelp() {
  const rows = [...pageKeys, ...EVERYWHERE].map((entry) =>
    el(
      "tr",
      null,
      el(
        "th",
        { scope: "row" },
        [entry.key, ...(entry.also || [])].map((key) => [el("kbd", null, KEY_NAMES[key] || key), " "]),
      ),
      el("td", null, entry.label),
    ),
  );
  const dialog = el(
    "dialog.help",
    {
      "aria-labelledby": "help-title",
      onclose: () => dialog.remove(),
      onclick: (event) => {
        if (event.target === dialog) dialog.close();
      },
    },
    el("h2", { id: "help-title" }, "Keys"),
    el("table", null, el("tbody", null, rows)),
    el(
      "p.note",
      null,
      "Texts of models are shown as they are: control and bidi characters are made visible, nothing is loaded from the network.",
    ),
    el("form", { method: "dialog" }, el("button", { type: "submit" }, "Close")),
  );
  document.body.append(dialog);
  dialog.showModal();
}
