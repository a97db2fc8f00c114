// The beginning: which page belongs to the address, the frame around it, light or dark.

import { source } from "./api.js";
import { comparePage } from "./compare.js";
import { byId, el, replaceContent, say } from "./dom.js";
import { moment } from "./format.js";
import { listenToKeys, setKeys, showHelp } from "./keys.js";
import { placeNow, runLink } from "./places.js";
import { rolloutPage } from "./rollout.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";
import { sidePage } from "./side.js";

// A page is made by a function of the place and a signal that ends its requests. It returns {node, title, crumbs, keys,
// dispose, update}: crumbs are [text, link] pairs; `update(place)` is true when the page can go to a place by itself.
const PAGES = { runs: runPage, rollouts: rolloutPage, compare: comparePage, side: sidePage };
const THEMES = ["auto", "light", "dark"];
let page = null;
let pageName = null;
let loading = null;

async function go() {
  const place = placeNow();
  const name = place.parts.join("/");
  if (page && pageName === name && page.update && page.update(place)) return;
  if (loading) loading.abort();
  loading = new AbortController();
  const { signal } = loading;
  const main = byId("main");
  main.setAttribute("aria-busy", "true");
  let next;
  try {
    next = await (place.parts.length ? PAGES[place.parts[0]] || unknownPage : runsPage)(place, signal);
  } catch (error) {
    if (signal.aborted) return;
    next = errorPage(error);
  }
  if (signal.aborted) return (next.dispose || (() => {}))();
  if (page && page.dispose) page.dispose();
  const isFirst = page === null;
  page = next;
  pageName = name;
  main.removeAttribute("aria-busy");
  replaceContent(main, next.node);
  showFrame(next);
  setKeys(next.keys);
  window.scrollTo(0, 0);
  if (!isFirst) main.focus({ preventScroll: true });
  say(next.title);
  if (next.shown) next.shown();
  return undefined;
}

function showFrame({ title, crumbs }) {
  document.title = `${title} · ng_view`;
  const all = [["Runs", "#/"], ...(crumbs || [])];
  const items = all.map(([text, link], place) =>
    el(
      "li",
      null,
      place === all.length - 1 ? el("span", { "aria-current": "page" }, text) : el("a", { href: link }, text),
    ),
  );
  replaceContent(byId("crumbs"), el("ol", null, items));
}

function errorPage(error) {
  const node = el(
    "div.page",
    null,
    el("h1", null, "This cannot be shown"),
    el("p.problem", { role: "alert" }, error.message),
    el(
      "p",
      null,
      el("a.button", { href: "#/" }, "All runs"),
      " ",
      el(
        "button",
        {
          type: "button",
          onclick: () => {
            page = null;
            go();
          },
        },
        "Try again",
      ),
    ),
  );
  return { node, title: "Error", crumbs: [["Error", "#/"]] };
}

function unknownPage() {
  throw new Error("There is no such page.");
}

function readTheme() {
  try {
    return localStorage.getItem("ng_view theme") || "auto";
  } catch {
    return "auto";
  }
}

function showTheme(theme, button) {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = theme;
  button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
  button.setAttribute("aria-label", `Colours: ${theme}`);
  button.title = `Colours: ${theme}`;
  document.dispatchEvent(new Event("themechange"));
}

function showTools() {
  let theme = readTheme();
  const button = el("button.icon", {
    type: "button",
    onclick() {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      try {
        localStorage.setItem("ng_view theme", theme);
      } catch {
        /* a file from disk may keep nothing */
      }
      showTheme(theme, button);
      say(`Colours: ${theme}`);
    },
  });
  showTheme(theme, button);
  const origin = source.exported
    ? el("span.origin", { title: `Exported ${moment(source.exported.at)}` }, "exported file")
    : null;
  replaceContent(
    byId("tools"),
    origin,
    button,
    el("button.icon", { type: "button", "aria-label": "Keys", title: "Keys (?)", onclick: showHelp }, "?"),
  );
}

// A list of one run says little: whoever asked for no place in particular sees that run.
async function openOnlyRun() {
  if (location.hash) return;
  const { runs } = await source.runs();
  if (runs.length === 1 && !location.hash) history.replaceState(null, "", runLink(runs[0].id));
}

async function start() {
  showTools();
  listenToKeys();
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  await openOnlyRun().catch(() => {}); // the page itself says what is wrong
  window.addEventListener("hashchange", go);
  go();
}

start();
