// Two rollouts side by side, item by item, with the first difference marked.

import { source } from "./api.js";
import { entryNode } from "./conversation.js";
import { el, say } from "./dom.js";
import { decimal, duration, isNumber, rewardText, runLabel, taskName, whole } from "./format.js";
import { entriesOf, firstDifference, warningsOf } from "./items.js";
import { placeLink, rolloutLink, runLink, sideLink } from "./places.js";
import { plain } from "./text.js";

export async function sidePage(place, signal) {
  const pair = ["a", "b"].map((name) => (place.parameters.get(name) || "").split("/"));
  const [runs, ...rollouts] = await Promise.all([
    source.runs(signal),
    ...pair.map(([run, id]) => source.rollout(run, id || "", {}, signal)),
  ]);
  const nameOf = (run) => runLabel(runs.runs.find((each) => each.id === run) || { name: run });
  const entries = rollouts.map((rollout) => entriesOf(rollout.record));
  const difference = firstDifference(entries[0], entries[1]);
  const rows = sideRows(rollouts, entries, difference, pair);
  const marked = rows.find((row) => row.classList.contains("first-difference"));
  const jump = () => {
    if (marked) {
      marked.scrollIntoView({ block: "center" });
      marked.focus({ preventScroll: true });
    } else say("There is no difference");
  };
  const swap = sideLink(pair[1], pair[0]);
  const node = el(
    "div.page.side",
    null,
    el("h1", null, "Side by side"),
    el(
      "div.rollout-bar",
      null,
      el("p.side-summary", { role: "status" }, summaryText(difference, entries)),
      el("span.spring"),
      difference ? el("button", { type: "button", onclick: jump }, "Go to the first difference") : null,
      el("a.button", { href: swap }, "Swap"),
    ),
    el(
      "div.side-heads",
      null,
      rollouts.map((rollout, side) => sideHead(rollout, pair, side, nameOf)),
    ),
    numbersTable(
      rollouts,
      pair.map(([run], side) => `${nameOf(run)}, ${taskName(rollouts[side].row)}`),
    ),
    el("div.side-rows", null, rows),
  );
  return {
    node,
    title: "Side by side",
    crumbs: [
      [nameOf(pair[0][0]), runLink(pair[0][0])],
      ["Side by side", location.hash],
    ],
    keys: [
      { key: "d", label: "the first difference", run: jump },
      {
        key: "s",
        label: "swap the sides",
        run: () => {
          location.hash = swap;
        },
      },
      {
        key: "u",
        label: "open the left one",
        run: () => {
          location.hash = placeLink(["rollouts", ...pair[0]]);
        },
      },
    ],
  };
}

function summaryText(difference, entries) {
  if (!difference) return `No difference in ${whole(entries[0].length)} items, ids aside.`;
  const where = difference.character === null ? "" : `, at character ${whole(difference.character + 1)}`;
  return `The first difference is in item ${whole(difference.place + 1)} of ${whole(Math.max(entries[0].length, entries[1].length))}${where}.`;
}

function sideHead(rollout, pair, side, nameOf) {
  const { row, repeats } = rollout;
  const [run, id] = pair[side];
  const options = repeats
    .filter((each) => !source.has || source.has(run, each.id))
    .map((each) =>
      el("option", { value: each.id, selected: each.id === id }, `repeat ${each.repeat} (${rewardText(each)})`),
    );
  const choose = el(
    "select",
    {
      "aria-label": `repeat on the ${side ? "right" : "left"}`,
      onchange() {
        const next = pair.map((each, place) => (place === side ? [run, choose.value] : each));
        location.hash = sideLink(next[0], next[1]);
      },
    },
    options,
  );
  return el(
    "div.side-head",
    null,
    el("h2", null, el("a", { href: rolloutLink(run, id) }, plain(taskName(row)))),
    el("p.sub", null, plain([nameOf(run), row.agent, row.model].filter(Boolean).join(" · "))),
    options.length > 1 ? choose : null,
  );
}

function numbersTable(rollouts, names) {
  const [left, right] = rollouts.map((rollout) => rollout.row);
  const facts = [
    ["Reward", (row) => (isNumber(row.reward) ? decimal(row.reward) : row.outcome)],
    ["Steps", (row) => whole(row.steps)],
    ["Tool calls", (row) => whole(row.tool_calls)],
    ["Output tokens", (row) => whole(row.output_tokens)],
    ["Duration", (row) => duration(row.duration_s)],
    ["Incomplete", (row) => (row.incomplete ? row.incomplete_reason || "yes" : "no")],
  ].map(([name, text]) => [name, text(left), text(right)]);
  const [one, other] = rollouts.map((rollout) => rollout.fields || {});
  const differing = [...new Set([...Object.keys(one), ...Object.keys(other)])]
    .filter((name) => !name.startsWith("_ng_") && name !== "reward" && one[name] !== other[name])
    .slice(0, 20)
    .map((name) => [
      name,
      ...[one[name], other[name]].map((value) => (value === undefined ? "–" : String(value).slice(0, 300))),
    ]);
  const rows = [...facts, ...differing].map(([name, first, second]) =>
    el(
      "tr",
      { class: first === second ? null : "differs" },
      el("th", { scope: "row" }, plain(name)),
      el("td", null, plain(first)),
      el("td", null, plain(second)),
    ),
  );
  return el(
    "div.scroll",
    null,
    el(
      "table.side-numbers",
      null,
      el(
        "thead",
        null,
        el(
          "tr",
          null,
          el("td"),
          names.map((name) => el("th", { scope: "col" }, plain(name))),
        ),
      ),
      el("tbody", null, rows),
    ),
  );
}

function sideRows(rollouts, entries, difference, pair) {
  const longest = Math.max(entries[0].length, entries[1].length);
  const rows = [];
  for (let place = 0; place < longest; place += 1) {
    const isFirst = difference && difference.place === place;
    const cells = entries.map((side, which) =>
      sideCell(side[place], rollouts[which], isFirst ? difference : null, pair[which]),
    );
    rows.push(
      el(
        "div",
        { class: `side-row${isFirst ? " first-difference" : ""}`, tabindex: isFirst ? "-1" : null },
        isFirst ? el("p.difference-label", null, "First difference") : null,
        cells,
      ),
    );
  }
  const warnings = rollouts.map((rollout) =>
    el(
      "div.side-cell",
      null,
      warningsOf(rollout.record).map((warning) => el("p.warning", null, plain(warning.text))),
    ),
  );
  if (warnings.some((cell) => cell.children.length)) rows.push(el("div.side-row", null, warnings));
  return rows;
}

function sideCell(entry, rollout, difference, [run, id]) {
  if (!entry) return el("div.side-cell.side-nothing", null, el("p.note", null, "nothing here"));
  const part = difference && difference.part !== null ? entry.parts[difference.part] : null;
  const mark = part && difference.character !== null ? { path: part.path, character: difference.character } : null;
  const view = {
    markdown: false,
    cut: new Map((rollout.cut || []).map((cut) => [cut.path, cut.length])),
    rest: () => el("a", { href: rolloutLink(run, id) }, "Open it"),
    mark,
  };
  const node = entryNode(entry, view, null);
  if (mark)
    for (const fold of node.querySelectorAll("details"))
      if (fold.fill && entry.kind === "reasoning") {
        fold.fill();
        fold.open = true;
      }
  return el("div.side-cell", null, node);
}
