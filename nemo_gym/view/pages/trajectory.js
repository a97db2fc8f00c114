// What was observed of a rollout: its model calls with what was asked and said, its tools, and what nobody could see.

import { folded } from "./conversation.js";
import { el } from "./dom.js";
import { countOf, duration, isNumber, whole } from "./format.js";
import { isMapping } from "./items.js";
import { jsonBlock, plain } from "./text.js";

const OBSERVED_SHOWN = 200;

export function observedCards(record) {
  const trajectory = isMapping(record) && isMapping(record.ng_trajectory) ? record.ng_trajectory : {};
  const calls = mappingsIn(trajectory.model_calls);
  const tools = mappingsIn(trajectory.tool_calls);
  const gaps = mappingsIn(trajectory.gaps);
  return [
    calls.length ? observedCard(countOf(calls.length, "model call"), "ol", calls, modelCallNode) : null,
    tools.length ? observedCard(countOf(tools.length, "tool call"), "ol", tools, toolCallNode) : null,
    gaps.length ? observedCard("Not observed", "ul", gaps, gapNode) : null,
  ];
}

function mappingsIn(value) {
  return Array.isArray(value) ? value.filter(isMapping) : [];
}

function observedCard(title, list, parts, nodeOf) {
  const left = parts.length - OBSERVED_SHOWN;
  return el(
    "section.card.observed",
    null,
    el("h2", null, title),
    el(`${list}.observed-list`, null, parts.slice(0, OBSERVED_SHOWN).map(nodeOf)),
    left > 0 ? el("p.note", null, `${whole(left)} more; the raw JSON has them.`) : null,
  );
}

function modelCallNode(call) {
  const about = isMapping(call.response_metadata) ? call.response_metadata : {};
  const tokens = isMapping(call.token_stats) ? call.token_stats : {};
  const server = isMapping(about.model_ref) ? about.model_ref.name : null;
  const facts = [
    about.dialect,
    isNumber(call.duration_ms) ? duration(call.duration_ms / 1000) : null,
    isNumber(tokens.prompt_tokens) ? `${whole(tokens.prompt_tokens)} tokens in` : null,
    isNumber(tokens.completion_tokens) ? `${whole(tokens.completion_tokens)} out` : null,
    isNumber(tokens.cached_tokens) && tokens.cached_tokens ? `${whole(tokens.cached_tokens)} cached` : null,
    about.finish_reason,
  ];
  return el(
    "li",
    null,
    el(
      "p",
      null,
      el("b", null, plain([server, about.model].filter(Boolean).join(" · ") || "model call")),
      about.error_category
        ? [" ", el("span.bad", null, plain(`${about.error_category} ${about.status_code ?? ""}`))]
        : "",
    ),
    el("p.note", null, plain(facts.filter(Boolean).join(" · "))),
    call.request === null || call.request === undefined ? null : folded("asked", () => saidNode(call.request)),
    call.response === null || call.response === undefined ? null : folded("said", () => saidNode(call.response)),
  );
}

function saidNode(value) {
  return typeof value === "string" ? el("div.code", null, plain(value.slice(0, 20000))) : jsonBlock(value);
}

function toolCallNode(call) {
  const facts = [
    call.status,
    isNumber(call.duration_ms) ? duration(call.duration_ms / 1000) : null,
    call.error_type,
    call.sandbox_id,
  ];
  return el(
    "li",
    null,
    el("p", null, el("b", null, plain(String(call.tool_name || call.tool_call_id || "tool")))),
    el("p.note", null, plain(facts.filter(Boolean).join(" · "))),
  );
}

function gapNode(gap) {
  return el("li", null, plain([gap.code, gap.invocation_id, gap.detail].filter(Boolean).join(" · ")));
}
