// Places inside the page are in the fragment of its address, so a link can be sent, and an exported file has them, too.

export function placeNow() {
  const [path, query] = splitOnce(location.hash.replace(/^#/, ""), "?");
  return { parts: path.split("/").filter(Boolean).map(decoded), parameters: new URLSearchParams(query) };
}

function splitOnce(text, separator) {
  const at = text.indexOf(separator);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// `parameters` is a mapping or a URLSearchParams; what is empty is left out.
export function placeLink(parts, parameters) {
  const entries = parameters instanceof URLSearchParams ? [...parameters] : Object.entries(parameters || {});
  const filled = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = filled.length ? `?${new URLSearchParams(filled)}` : "";
  return `#/${parts.map(encodeURIComponent).join("/")}${query}`;
}

// Goes to this place with other parameters.
export function changeParameters(changes) {
  const { parts, parameters } = placeNow();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") parameters.delete(name);
    else parameters.set(name, value);
  }
  location.hash = placeLink(parts, parameters);
}

export function runLink(run, parameters) {
  return placeLink(["runs", run], parameters);
}

// A rollout within the list that `where` and `sort` make.
export function rolloutLink(run, rollout, parameters) {
  const kept = parameters ? { where: parameters.get("where"), sort: parameters.get("sort") } : {};
  return placeLink(["rollouts", run, rollout], kept);
}

export function sideLink(one, other) {
  return placeLink(["side"], { a: one.join("/"), b: other.join("/") });
}
