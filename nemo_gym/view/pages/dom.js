// Building elements. What comes from a record gets in as text: nothing here, or anywhere in these pages, takes markup.

const SVG_SPACE = "http://www.w3.org/2000/svg";

// el("a.button", {href: "#/", onclick: go}, "Runs", child, null): a class in the name, listeners as functions, children as
// nodes or text; null, undefined and false are left out, true is an attribute without a value.
export function el(name, attributes, ...children) {
  const [tag, ...classes] = name.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  return filled(node, attributes, children);
}

export function svgEl(name, attributes, ...children) {
  return filled(document.createElementNS(SVG_SPACE, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else if (key === "href" && !/^(#|\/api\/|blob:)/.test(value))
      continue; // links lead to our own places only
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

export function append(node, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replaceContent(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}

// Screen readers are told what happened without the focus moving.
export function say(text) {
  byId("said").textContent = text;
}

export async function copyText(text, button) {
  let copied = false;
  try {
    await navigator.clipboard.writeText(text);
    copied = true;
  } catch {
    copied = copiedTheOldWay(text); // the clipboard of a file from disk is closed to the modern way
  }
  say(copied ? "Copied" : "Could not copy");
  const before = button.textContent;
  button.textContent = copied ? "Copied" : "Could not copy";
  setTimeout(() => {
    button.textContent = before;
  }, 1500);
}

function copiedTheOldWay(text) {
  const area = el("textarea", { "aria-hidden": "true", class: "visually-hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

export function saveFile(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// Calls of `work` are put together: the first one after a pause, then at most one per pause; `pause()` is its length in ms.
export function throttled(work, pause) {
  let timer = null;
  return () => {
    if (timer !== null) return;
    timer = setTimeout(() => {
      timer = null;
      work();
    }, pause());
  };
}
