// One rollout: its conversation, and beside it what became of it.

import { source } from "./api.js";
import { conversationNode, folded } from "./conversation.js";
import { copyText, el, replaceContent, saveFile, say } from "./dom.js";
import {
  bytes,
  countOf,
  decimal,
  duration,
  isNumber,
  moment,
  rewardText,
  runLabel,
  taskName,
  whole,
} from "./format.js";
import { rewardColour } from "./grid.js";
import { isMapping } from "./items.js";
import { rolloutLink, runLink, sideLink } from "./places.js";
import { TextFinder } from "./finder.js";
import { jsonBlock, plain } from "./text.js";
import { observedCards } from "./trajectory.js";

const CALLS_SHOWN = 60;
const LEAST_SHARE = 0.005;
let wantsMarkdown = false; // kept from rollout to rollout

export async function rolloutPage(place, signal) {
  const [, run, id] = place.parts;
  const list = { where: place.parameters.get("where") || "", sort: place.parameters.get("sort") || "" };
  const [rollout, runs] = await Promise.all([source.rollout(run, id, list, signal), source.runs(signal)]);
  const runName = runLabel(runs.runs.find((each) => each.id === run) || { name: run });
  const linkTo = (other) => rolloutLink(run, other, place.parameters);
  const visit = (other, what) => (other ? (location.hash = linkTo(other)) : say(`There is no ${what}`));
  const conversation = el("section.conversation-column", { "aria-label": "Conversation" });
  const finder = new TextFinder(conversation);
  const view = {
    markdown: wantsMarkdown,
    cut: new Map(rollout.cut.map((cut) => [cut.path, cut.length])),
    rest: () => rawLink(run, id),
  };
  const draw = () => {
    view.markdown = wantsMarkdown;
    replaceContent(
      conversation,
      failureNote(rollout),
      rollout.record === null ? damagedNode(rollout) : conversationNode(rollout.record, view),
    );
    finder.again();
  };
  const markdown = el(
    "button",
    {
      type: "button",
      "aria-pressed": String(wantsMarkdown),
      onclick() {
        wantsMarkdown = !wantsMarkdown;
        markdown.setAttribute("aria-pressed", String(wantsMarkdown));
        draw();
      },
    },
    "Markdown",
  );
  draw();
  const compare = compareChooser(run, rollout, runs.runs);
  const node = el(
    "div.page.rollout",
    null,
    headNode(rollout),
    el(
      "div.rollout-bar",
      { role: "toolbar", "aria-label": "Rollout" },
      stepLink("← Previous", rollout.previous, linkTo, "previous"),
      stepLink("Next →", rollout.next, linkTo, "next"),
      repeatStrip(rollout, linkTo),
      el("span.spring"),
      finder.node,
      markdown,
      compare,
    ),
    el("div.columns", null, conversation, asideNode(run, id, rollout, linkTo)),
  );
  return {
    node,
    title: taskName(rollout.row),
    crumbs: [
      [runName, runLink(run, list)],
      [taskName(rollout.row), location.hash],
    ],
    dispose: () => finder.clear(),
    keys: [
      { key: "j", label: "next rollout of the list", run: () => visit(rollout.next, "next rollout") },
      { key: "k", label: "previous rollout of the list", run: () => visit(rollout.previous, "previous rollout") },
      {
        key: "l",
        also: ["]"],
        label: "next repeat of this task",
        run: () => visit(neighbour(rollout, 1), "next repeat"),
      },
      {
        key: "h",
        also: ["["],
        label: "previous repeat of this task",
        run: () => visit(neighbour(rollout, -1), "previous repeat"),
      },
      { key: "/", label: "search in this rollout", run: () => finder.focus() },
      { key: "n", label: "next match", run: () => finder.step(1) },
      { key: "m", label: "Markdown and code on or off", run: () => markdown.click() },
      { key: "c", label: "side by side with another rollout", run: () => compare.focus() },
      {
        key: "u",
        label: "back to the list",
        run: () => {
          location.hash = runLink(run, list);
        },
      },
      { key: "Escape", label: "end the search", run: () => finder.clear() },
    ],
  };
}

function neighbour(rollout, step) {
  const place = rollout.repeats.findIndex((row) => row.id === rollout.row.id);
  return place < 0 || !rollout.repeats[place + step] ? null : rollout.repeats[place + step].id;
}

function stepLink(text, id, linkTo, rel) {
  return id
    ? el("a.button", { href: linkTo(id), rel }, text)
    : el("span.button.off", { "aria-disabled": "true" }, text);
}

function headNode(rollout) {
  const { row } = rollout;
  const kind = row.outcome === "scored" ? "scored" : row.outcome === "unscored" ? "unscored" : "failed";
  const [low, high] = rewardRange(rollout.repeats);
  return el(
    "div.rollout-head",
    null,
    el(
      "div",
      null,
      el("h1", null, plain(taskName(row))),
      el("p.sub", null, plain([row.agent, row.model].filter(Boolean).join(" · "))),
    ),
    coloured(
      el(
        `div.verdict.verdict-${kind}`,
        null,
        el("span.verdict-label", null, isNumber(row.reward) ? "Reward" : "Outcome"),
        el("b", null, plain(rewardText(row))),
        row.failure_class ? el("span.verdict-label", null, plain(row.failure_class)) : null,
        row.incomplete
          ? el(
              "span.verdict-label.is-warning",
              null,
              `incomplete${row.incomplete_reason ? `: ${row.incomplete_reason}` : ""}`,
            )
          : null,
      ),
      "borderLeftColor",
      row.reward,
      low,
      high,
    ),
  );
}

function coloured(node, property, reward, low, high) {
  if (isNumber(reward)) node.style[property] = rewardColour(reward, low, high);
  return node;
}

function rewardRange(rows) {
  const rewards = rows.map((each) => each.reward).filter(isNumber);
  return [Math.min(0, ...rewards), Math.max(1, ...rewards)];
}

function repeatStrip(rollout, linkTo) {
  const { repeats, row } = rollout;
  if (repeats.length < 2) return null;
  const [low, high] = rewardRange(repeats);
  const links = repeats.slice(0, 64).map((each) => {
    return coloured(
      el(
        "a.repeat",
        {
          href: linkTo(each.id),
          "aria-current": each.id === row.id ? "page" : null,
          "aria-label": `repeat ${each.repeat}: ${rewardText(each)}`,
          title: `repeat ${each.repeat}: ${rewardText(each)}`,
        },
        isNumber(each.reward) ? null : "×",
      ),
      "background",
      each.reward,
      low,
      high,
    );
  });
  return el(
    "nav.repeats",
    { "aria-label": "Repeats of this task" },
    el("span.note", null, "Repeats"),
    links,
    repeats.length > 64 ? el("span.note", null, `of ${whole(repeats.length)}`) : null,
  );
}

function compareChooser(run, rollout, runs) {
  const { row } = rollout;
  const others = rollout.repeats.filter((each) => each.id !== row.id && (!source.has || source.has(run, each.id)));
  const select = el(
    "select",
    { "aria-label": "Side by side with", onchange: () => choose(select.value) },
    el("option", { value: "" }, "Side by side with…"),
    others.map((each) => el("option", { value: `repeat ${each.id}` }, `repeat ${each.repeat} (${rewardText(each)})`)),
    row.task === null
      ? null
      : runs
          .filter((each) => each.id !== run)
          .slice(0, 100)
          .map((each) => el("option", { value: `run ${each.id}` }, `the same task in ${each.path || each.name}`)),
  );
  const choose = async (value) => {
    const [kind, id] = value.split(" ");
    if (kind === "repeat") location.hash = sideLink([run, row.id], [run, id]);
    if (kind !== "run") return;
    const same = await source
      .rollouts(id, { where: `task == ${JSON.stringify(row.task)}`, limit: 50 })
      .catch(() => ({ rows: [] }));
    const match = same.rows.find((each) => each.repeat === row.repeat) || same.rows[0];
    if (match) {
      location.hash = sideLink([run, row.id], [id, match.id]);
      return;
    }
    select.value = "";
    say("That run has no rollout of this task");
    select.options[0].textContent = "not in that run";
  };
  return select;
}

// Why there is no answer, before whatever there is of the conversation.
function failureNote(rollout) {
  const { row, attempts } = rollout;
  const last = attempts.find((attempt) => attempt.id === row.id);
  if (row.outcome !== "failed" || !last) return null;
  return el(
    "div.warning.warning-error.failure",
    null,
    el("b", null, plain(`Failed: ${last.failure_class || row.failure_class || "no class given"}`)),
    last.message ? el("p", null, plain(last.message.slice(0, 4000))) : null,
    isMapping(rollout.record) && rollout.record.responses_create_params === undefined
      ? el("p", null, "The line of a failure does not hold its prompt: another repeat shows it (keys h and l).")
      : null,
  );
}

function damagedNode(rollout) {
  return el(
    "div",
    null,
    el("p.warning", null, plain(rollout.problem || "This line is no record.")),
    rollout.raw ? el("div.code", null, plain(rollout.raw.slice(0, 20000))) : null,
  );
}

function asideNode(run, id, rollout, linkTo) {
  const { row } = rollout;
  return el(
    "aside.facts",
    { "aria-label": "About this rollout" },
    rollout.problem && rollout.record !== null ? el("p.warning", null, plain(rollout.problem)) : null,
    factsCard(
      "Numbers",
      [
        ["Reward", isNumber(row.reward) ? decimal(row.reward) : null],
        ["Outcome", row.outcome],
        ["Steps", whole(row.steps)],
        ["Tool calls", whole(row.tool_calls)],
        ["Tools", (row.tools || []).join(", ") || null],
        ["Input tokens", whole(row.input_tokens)],
        ["Output tokens", whole(row.output_tokens)],
        ["Duration", duration(row.duration_s)],
        ["Started", moment(row.started_at)],
        ["Line", whole(row.line)],
      ].filter(([, value]) => value !== null && value !== "–"),
    ),
    fieldsCard(rollout),
    timeCard(rollout.timing),
    observedCards(rollout.record),
    attemptsCard(rollout, linkTo),
    rawCard(run, id, rollout),
  );
}

function card(title, ...content) {
  return el("section.card", null, el("h2", null, title), content);
}

function factsCard(title, facts) {
  return card(
    title,
    el(
      "dl.facts-list",
      null,
      facts.map(([name, value]) => [el("dt", null, plain(name)), el("dd", null, plain(value))]),
    ),
  );
}

function fieldsCard(rollout) {
  const fields = Object.entries(rollout.fields || {}).filter(([name]) => !name.startsWith("_ng_") && name !== "reward");
  if (!fields.length) return null;
  const value = (each) => (isNumber(each) ? decimal(each) : each === null ? "null" : String(each));
  const list = (some) =>
    el(
      "dl.facts-list",
      null,
      some.map(([name, each]) => [el("dt", null, plain(name)), el("dd", null, plain(value(each).slice(0, 2000)))]),
    );
  return card(
    "Fields of the record",
    list(fields.slice(0, 30)),
    fields.length > 30 ? folded(`${whole(fields.length - 30)} more`, () => list(fields.slice(30))) : null,
  );
}

function timeCard(timing) {
  const calls = ((timing && timing.calls) || []).filter((call) => isNumber(call.duration_s));
  if (!calls.length) return null;
  const ends = calls.map((call) => (call.start_s || 0) + call.duration_s);
  const all = Math.max(isNumber(timing.duration_s) ? timing.duration_s : 0, ...ends, 0.001);
  const rows = calls.slice(0, CALLS_SHOWN).map((call) => {
    const isCommon = call.kind === "model" || call.kind === "tool";
    const bar = el(`i.time-${isCommon || call.kind === "verify" ? call.kind : "other"}`);
    bar.style.left = `${(100 * (call.start_s || 0)) / all}%`;
    bar.style.width = `${Math.max(0.5, (100 * call.duration_s) / all)}%`;
    return el(
      "li",
      null,
      el("span", null, plain((isCommon && call.name) || call.kind)),
      el("span.number", null, duration(call.duration_s)),
      el("span.time-line", { "aria-hidden": "true" }, bar),
    );
  });
  const kinds = [...new Set(calls.map((call) => call.kind))]
    .map((kind) => ({ kind, seconds: timeCovered(calls.filter((call) => call.kind === kind)) }))
    .filter(({ seconds }) => seconds > LEAST_SHARE * all)
    .map(({ kind, seconds }) => `${kind} ${duration(seconds)} (${whole((100 * seconds) / all)} %)`);
  const left = calls.length - CALLS_SHOWN;
  return card(
    "Where the time went",
    el("p.note", null, plain([`${duration(all)} in all`, ...kinds].join(" · "))),
    el("ol.times", null, rows),
    left > 0 ? el("p.note", null, countOf(left, "more call")) : null,
  );
}

// Calls at the same time, or within each other, count once.
function timeCovered(calls) {
  let [covered, until] = [0, 0];
  for (const call of [...calls].sort((one, other) => (one.start_s || 0) - (other.start_s || 0))) {
    const start = Math.max(call.start_s || 0, until);
    const end = (call.start_s || 0) + call.duration_s;
    if (end > start) [covered, until] = [covered + end - start, end];
  }
  return covered;
}

function attemptsCard(rollout, linkTo) {
  const { attempts, row } = rollout;
  if (attempts.length < 2 && !attempts.some((attempt) => attempt.failure_class)) return null;
  const items = attempts.map((attempt, place) =>
    el(
      "li",
      null,
      el(
        "p",
        null,
        el("b", null, `Attempt ${place + 1}: `),
        attempt.failure_class ? el("span.bad", null, plain(attempt.failure_class)) : "finished",
        attempt.status ? ` · status ${attempt.status}` : "",
        attempt.server ? [" · ", plain(attempt.server)] : "",
        isNumber(attempt.duration_s) ? ` · ${duration(attempt.duration_s)}` : "",
      ),
      attempt.message ? el("p.message", null, plain(attempt.message.slice(0, 2000))) : null,
      attempt.id !== row.id && (!source.has || source.has(rollout.run, attempt.id))
        ? el("a", { href: linkTo(attempt.id) }, "open its record")
        : null,
    ),
  );
  return card(countOf(attempts.length, "attempt"), el("ol.attempts", null, items));
}

function rawLink(run, id) {
  const url = source.rawUrl(run, id);
  if (url) return el("a", { href: url, download: `${id}.json` }, "Download the whole line");
  return el(
    "button.quiet",
    { type: "button", onclick: () => saveFile(`${id}.json`, source.rawText(run, id), "application/json") },
    "Download",
  );
}

function rawCard(run, id, rollout) {
  const copy = el(
    "button.quiet",
    {
      type: "button",
      onclick: () =>
        copyText(rollout.record === null ? rollout.raw || "" : JSON.stringify(rollout.record, null, 2), copy),
    },
    "Copy",
  );
  const cut = rollout.cut.length
    ? el("p.note", null, `${countOf(rollout.cut.length, "text")} in it cut; the download has everything.`)
    : null;
  const fold = folded(["Raw JSON ", el("span.note", null, bytes(rollout.size_bytes))], () =>
    rollout.record === null
      ? el("div.code", null, plain((rollout.raw || "").slice(0, 20000)))
      : jsonBlock(rollout.record),
  );
  return el(
    "section.card",
    { "aria-label": "Raw JSON" },
    fold,
    cut,
    el("p.actions", null, copy, " ", rawLink(run, id)),
  );
}
