// Where the pages get their data: from the server's API, or, in an exported file, from the data inside the page.
// Both offer the same functions.

import { byId } from "./dom.js";
import { exportedSource } from "./exported.js";

export class ApiError extends Error {
  constructor(message, details) {
    super(message);
    this.position = details && details.position;
    this.expression = details && details.expression;
    this.status = details && details.status;
  }
}

function query(parameters) {
  const filled = Object.entries(parameters || {}).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  return filled.length ? `?${new URLSearchParams(filled)}` : "";
}

async function ask(path, parameters, signal) {
  let answer;
  try {
    answer = await fetch(path + query(parameters), {
      signal,
      credentials: "same-origin",
      headers: { Accept: "application/json" },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is ng_view still running?", { status: 0 });
  }
  const body = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body;
  const error = (body && body.error) || {};
  const remedy =
    answer.status === 401
      ? "Open the URL that ng_view printed: it carries the token."
      : `The server answered ${answer.status}.`;
  throw new ApiError(error.message || remedy, { ...error, status: answer.status });
}

function runPath(run) {
  return `/api/runs/${encodeURIComponent(run)}`;
}

function rolloutPath(run, rollout) {
  return `/api/rollouts/${encodeURIComponent(run)}/${encodeURIComponent(rollout)}`;
}

function listenTo(path, listeners) {
  const events = new EventSource(path);
  for (const [name, listener] of Object.entries(listeners)) {
    if (name === "state") continue;
    events.addEventListener(name, (event) => listener(JSON.parse(event.data)));
  }
  const tell = listeners.state || (() => {});
  events.addEventListener("open", () => tell(true));
  events.addEventListener("error", () => tell(false)); // the browser connects again by itself
  return events;
}

const serverSource = {
  exported: null,
  runs: (signal) => ask("/api/runs", null, signal),
  run: (run, signal) => ask(runPath(run), null, signal),
  rollouts: (run, parameters, signal) => ask(`${runPath(run)}/rollouts`, parameters, signal),
  fields: (run, signal) => ask(`${runPath(run)}/fields`, null, signal),
  stats: (run, where, signal) => ask(`${runPath(run)}/stats`, { where }, signal),
  grid: (run, parameters, signal) => ask(`${runPath(run)}/grid`, parameters, signal),
  rollout: (run, rollout, parameters, signal) => ask(rolloutPath(run, rollout), parameters, signal),
  rawUrl: (run, rollout) => `${rolloutPath(run, rollout)}/raw`,
  exportUrl: (run, parameters) => `${runPath(run)}/export.jsonl${query(parameters)}`,

  // Returns what cancels it. `error` is called when the search cannot go on.
  search(run, parameters, listeners) {
    const events = listenTo(`${runPath(run)}/search${query(parameters)}`, {
      match: listeners.match,
      progress: listeners.progress,
      done: (done) => {
        events.close();
        listeners.done(done);
      },
      state: (works) => {
        if (!works) {
          events.close();
          listeners.error();
        }
      },
    });
    return () => events.close();
  },

  // Returns what ends it. `run` is null for all runs. A page that nobody sees does not listen: a browser has few connections
  // for one server. `again` is called when it does again.
  watch(run, listeners) {
    const { again = () => {}, ...events } = listeners;
    const path = run === null ? "/api/events" : `${runPath(run)}/events`;
    let listening = listenTo(path, events);
    const change = () => {
      listening.close();
      if (document.hidden) return;
      listening = listenTo(path, events);
      again();
    };
    document.addEventListener("visibilitychange", change);
    return () => {
      document.removeEventListener("visibilitychange", change);
      listening.close();
    };
  },
};

function chosenSource() {
  const embedded = byId("export-data");
  return embedded ? exportedSource(JSON.parse(embedded.textContent)) : serverSource;
}

export const source = chosenSource();
