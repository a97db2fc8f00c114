// Search within the page that is shown. Matches are ranges that the browser paints: the document is not changed.

import { el, say } from "./dom.js";
import { whole } from "./format.js";

const MOST_MATCHES = 2000;

export class TextFinder {
  constructor(box) {
    this.box = box;
    this.ranges = [];
    this.at = -1;
    this.input = el("input", {
      type: "search",
      placeholder: "Search here",
      "aria-label": "Search in this rollout",
      autocomplete: "off",
      oninput: () => this.find(),
      onkeydown: (event) => {
        if (event.key === "Enter") {
          event.preventDefault();
          this.step(event.shiftKey ? -1 : 1);
        }
        if (event.key === "Escape") this.clear();
      },
    });
    this.count = el("span.note", { role: "status" });
    this.node = el("span.finder", { role: "search" }, this.input, this.count);
  }

  focus() {
    this.input.focus();
    this.input.select();
  }

  again() {
    if (this.input.value) this.find();
  }

  find() {
    const wanted = this.input.value.toLowerCase();
    this.ranges = [];
    this.at = -1;
    if (wanted) {
      for (const fold of this.box.querySelectorAll("details")) if (fold.fill) fold.fill(); // what is folded is searched, too
      this.collect(wanted);
    }
    this.paint();
    this.count.textContent = wanted
      ? this.ranges.length
        ? `${whole(this.ranges.length)} found`
        : "nothing found"
      : "";
  }

  collect(wanted) {
    const walker = document.createTreeWalker(this.box, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const text = node.data.toLowerCase();
      if (text.length !== node.data.length) continue; // a few letters change their length: places would be wrong
      for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + wanted.length);
        this.ranges.push(range);
        if (this.ranges.length >= MOST_MATCHES) return;
      }
    }
  }

  paint() {
    if (!globalThis.CSS || !CSS.highlights) return;
    CSS.highlights.set("found", new Highlight(...this.ranges));
    CSS.highlights.set("found-now", new Highlight(...(this.at >= 0 ? [this.ranges[this.at]] : [])));
  }

  step(by) {
    if (!this.ranges.length) return;
    this.at = (this.at + by + this.ranges.length) % this.ranges.length;
    const node = this.ranges[this.at].startContainer.parentElement;
    for (let fold = node.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    node.scrollIntoView({ block: "center" });
    this.count.textContent = `${whole(this.at + 1)} of ${whole(this.ranges.length)}`;
    say(this.count.textContent);
    this.paint();
  }

  clear() {
    this.input.value = "";
    this.input.blur();
    this.find();
  }
}
