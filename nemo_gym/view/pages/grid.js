// Tasks × repeats as coloured squares on a canvas. Only what is in sight is drawn, so 10,000 tasks scroll as well as ten.
// Tasks run from left to right, the repeats of one task stand below each other.

import { el, replaceContent, say } from "./dom.js";
import { countOf, decimal, isNumber, outcomeWord, whole } from "./format.js";

const CELL_SIZES = [28, 22, 16, 12, 9];
const MOST_HEIGHT = 340;
const GAP = 2;
const TABLE_PAGE = 100;

// `linkTo(id)` is the place of a rollout; `low` and `high` are the rewards that the colours range between; `kept` is what an
// update of the same grid keeps: whether it is a table, and where the keyboard is.
export function rolloutGrid({ tasks, tasksTotal, low, high, linkTo, kept }) {
  if (!tasks.length) return el("p.note", null, "No task matches.");
  const grid = new GridCanvas(tasks, low, high, kept, (id) => {
    location.hash = linkTo(id);
  });
  const table = el("div", { hidden: true });
  const show = (asTable) => {
    kept.asTable = asTable;
    table.hidden = !asTable;
    grid.box.hidden = asTable;
    toggle.setAttribute("aria-pressed", String(asTable));
    toggle.textContent = asTable ? "Show as squares" : "Show as a table";
    if (asTable && !table.children.length) fillTable(table, tasks, 0, linkTo);
    if (!asTable) grid.resize();
  };
  const toggle = el(
    "button.quiet",
    { type: "button", "aria-pressed": "false", "data-key": "grid toggle", onclick: () => show(table.hidden) },
    "Show as a table",
  );
  const note =
    tasksTotal > tasks.length ? ` The first ${whole(tasks.length)} of ${whole(tasksTotal)} tasks are shown.` : "";
  const node = el(
    "div.task-grid",
    null,
    grid.box,
    table,
    el("div.grid-foot", null, legend(low, high), el("span.note", null, note), toggle),
  );
  if (kept.asTable) show(true);
  return Object.assign(node, { dispose: () => grid.dispose() });
}

function legend(low, high) {
  const ramp = el("canvas.ramp", { width: 64, height: 12, "aria-hidden": "true" });
  paintRamp(ramp);
  return el(
    "span.legend",
    null,
    decimal(low),
    ramp,
    decimal(high),
    el("span.key-failed", { "aria-hidden": "true" }),
    "failed",
    el("span.key-unscored", { "aria-hidden": "true" }),
    "unscored",
  );
}

function paintRamp(canvas) {
  const pen = canvas.getContext("2d");
  const colours = palette();
  for (let x = 0; x < canvas.width; x += 1) {
    pen.fillStyle = blend(colours, x / (canvas.width - 1));
    pen.fillRect(x, 0, 1, canvas.height);
  }
}

function fillTable(box, tasks, from, linkTo) {
  const page = tasks.slice(from, from + TABLE_PAGE);
  const rows = page.map((task) =>
    el(
      "tr",
      null,
      el("th", { scope: "row" }, `task ${task.task}`),
      el("td.number", null, decimal(task.mean)),
      el(
        "td",
        null,
        task.cells.map(([id, repeat, reward, outcome]) => [
          el(
            "a.cell-link",
            { href: linkTo(id), "aria-label": cellText(task.task, repeat, reward, outcome) },
            isNumber(reward) ? decimal(reward) : outcomeWord(outcome),
          ),
          " ",
        ]),
      ),
    ),
  );
  const turn = (label, to) =>
    el(
      "button.quiet",
      { type: "button", disabled: to < 0 || to >= tasks.length, onclick: () => fillTable(box, tasks, to, linkTo) },
      label,
    );
  replaceContent(
    box,
    el(
      "div.scroll",
      null,
      el(
        "table",
        null,
        el(
          "thead",
          null,
          el(
            "tr",
            null,
            el("th", { scope: "col" }, "Task"),
            el("th.number", { scope: "col" }, "Mean"),
            el("th", { scope: "col" }, "Repeats"),
          ),
        ),
        el("tbody", null, rows),
      ),
    ),
    tasks.length > TABLE_PAGE
      ? el(
          "p.pager",
          null,
          turn("Previous tasks", from - TABLE_PAGE),
          ` ${whole(from + 1)} to ${whole(from + page.length)} of ${whole(tasks.length)} `,
          turn("Next tasks", from + TABLE_PAGE),
        )
      : null,
  );
}

function cellText(task, repeat, reward, outcome) {
  const result = isNumber(reward) ? `reward ${decimal(reward)}` : outcomeWord(outcome);
  return `task ${task}, repeat ${repeat}: ${result}`;
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return {
    low: rgb(colour("--reward-low")),
    high: rgb(colour("--reward-high")),
    bad: colour("--bad"),
    rule: colour("--rule"),
    text: colour("--text"),
    card: colour("--card"),
  };
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) || 0);
}

function blend(colours, share) {
  const mixed = colours.low.map((from, place) => Math.round(from + (colours.high[place] - from) * share));
  return `rgb(${mixed.join(",")})`;
}

export function rewardColour(reward, low, high) {
  return blend(palette(), Math.max(0, Math.min(1, (reward - low) / (high - low || 1))));
}

class GridCanvas {
  constructor(tasks, low, high, kept, open) {
    Object.assign(this, { tasks, low, high, kept, open, at: null });
    this.most = Math.max(...tasks.map((task) => task.cells.length), 1);
    this.wide = this.most <= 8 ? 1 : Math.ceil(Math.sqrt(this.most)); // squares of one task side by side
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.spacer = el("div.grid-space");
    this.tip = el("div.grid-tip", { hidden: true });
    const says = `${countOf(tasks.length, "task")} with up to ${countOf(this.most, "repeat")}, coloured by reward. Arrow keys move, Enter opens.`;
    this.scroller = el(
      "div.grid-scroll",
      {
        tabindex: "0",
        role: "application",
        "aria-roledescription": "grid of rollouts",
        "aria-label": says,
        onscroll: () => this.draw(),
        onkeydown: (event) => this.key(event),
        onfocus: () => this.focus(),
        onblur: () => this.move(null),
        onmousemove: (event) => this.hover(event),
        onmouseleave: () => this.hover(null),
        onclick: (event) => this.click(event),
      },
      this.canvas,
      this.spacer,
    );
    this.box = el("div.grid-box", null, this.scroller, this.tip);
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(this.scroller);
    this.scheme = window.matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => this.draw();
    this.scheme.addEventListener("change", this.repaint);
    document.addEventListener("themechange", this.repaint);
  }

  dispose() {
    this.watcher.disconnect();
    this.scheme.removeEventListener("change", this.repaint);
    document.removeEventListener("themechange", this.repaint);
  }

  resize() {
    const width = this.scroller.clientWidth;
    if (!width) return;
    for (const size of CELL_SIZES) {
      this.lay(size, width);
      if (this.lines * this.lineHeight <= MOST_HEIGHT) break;
    }
    const height = Math.min(MOST_HEIGHT, this.lines * this.lineHeight);
    this.scroller.style.height = `${height}px`;
    this.spacer.style.height = `${this.lines * this.lineHeight}px`;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.view = { width, height, scale };
    this.draw();
  }

  lay(size, width) {
    this.size = size;
    this.taskWidth = this.wide * size + (this.wide > 1 ? GAP * 2 : 0);
    this.perLine = Math.max(1, Math.floor(width / this.taskWidth));
    this.lines = Math.ceil(this.tasks.length / this.perLine);
    this.lineHeight = Math.ceil(this.most / this.wide) * size + 6;
  }

  draw() {
    if (!this.view) return;
    const { width, height, scale } = this.view;
    const top = this.scroller.scrollTop;
    this.canvas.style.transform = `translateY(${top}px)`;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.colours = palette();
    const first = Math.floor(top / this.lineHeight);
    const last = Math.min(this.lines, Math.ceil((top + height) / this.lineHeight));
    for (let task = first * this.perLine; task < Math.min(last * this.perLine, this.tasks.length); task += 1) {
      this.tasks[task].cells.forEach((cell, place) => this.square(pen, cell, this.corner(task, place), top));
    }
    if (this.at) this.frame(pen, top);
  }

  corner(task, place) {
    const x = (task % this.perLine) * this.taskWidth + (place % this.wide) * this.size;
    const y = Math.floor(task / this.perLine) * this.lineHeight + Math.floor(place / this.wide) * this.size;
    return [x, y];
  }

  square(pen, [, , reward, outcome], [x, y], top) {
    const side = this.size - GAP;
    const py = y - top;
    if (isNumber(reward)) {
      pen.fillStyle = blend(this.colours, Math.max(0, Math.min(1, (reward - this.low) / (this.high - this.low || 1))));
      pen.fillRect(x, py, side, side);
      return;
    }
    pen.strokeStyle = outcome === 1 ? this.colours.rule : this.colours.bad;
    pen.lineWidth = 1.5;
    pen.strokeRect(x + 1, py + 1, side - 2, side - 2);
    if (outcome === 1) return;
    pen.beginPath(); // a failure is told by its cross as well as by its colour
    pen.moveTo(x + 3, py + 3);
    pen.lineTo(x + side - 3, py + side - 3);
    pen.moveTo(x + side - 3, py + 3);
    pen.lineTo(x + 3, py + side - 3);
    pen.stroke();
  }

  frame(pen, top) {
    const [x, y] = this.corner(this.at.task, this.at.place);
    pen.strokeStyle = this.colours.text;
    pen.lineWidth = 2;
    pen.strokeRect(x - 1, y - top - 1, this.size, this.size);
  }

  found(event) {
    const box = this.scroller.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top + this.scroller.scrollTop;
    const task = Math.floor(y / this.lineHeight) * this.perLine + Math.floor(x / this.taskWidth);
    const column = Math.floor((x % this.taskWidth) / this.size);
    const place = Math.floor((y % this.lineHeight) / this.size) * this.wide + Math.min(column, this.wide - 1);
    const isInside = x < this.perLine * this.taskWidth && this.tasks[task] && this.tasks[task].cells[place];
    return isInside ? { task, place } : null;
  }

  hover(event) {
    const at = event && this.found(event);
    this.scroller.classList.toggle("can-open", Boolean(at));
    if (at || document.activeElement !== this.scroller) this.move(at, true);
  }

  click(event) {
    const at = this.found(event);
    if (at) this.open(this.tasks[at.task].cells[at.place][0]);
  }

  focus() {
    const { task, place } = this.kept.at || { task: 0, place: 0 };
    const isThere = this.tasks[task] && this.tasks[task].cells[place];
    if (!this.at) this.move(isThere ? { task, place } : { task: 0, place: 0 });
  }

  move(at, isHover) {
    this.at = at;
    this.draw();
    this.tip.hidden = !at;
    if (!at) return;
    const task = this.tasks[at.task];
    const [, repeat, reward, outcome] = task.cells[at.place];
    const text = cellText(task.task, repeat, reward, outcome);
    this.tip.textContent = `${text} · task mean ${decimal(task.mean)}`;
    if (isHover) return;
    this.kept.at = at;
    say(text);
  }

  key(event) {
    const step = {
      ArrowRight: [1, 0],
      ArrowLeft: [-1, 0],
      ArrowDown: [0, 1],
      ArrowUp: [0, -1],
      PageDown: [this.perLine, 0],
      PageUp: [-this.perLine, 0],
    }[event.key];
    if (event.key === "Enter" && this.at) return this.open(this.tasks[this.at.task].cells[this.at.place][0]);
    if (!step && event.key !== "Home" && event.key !== "End") return undefined;
    event.preventDefault();
    event.stopPropagation();
    let { task, place } = this.at || { task: 0, place: 0 };
    if (event.key === "Home") task = 0;
    else if (event.key === "End") task = this.tasks.length - 1;
    else [task, place] = [task + step[0], place + step[1]];
    if (place >= this.most) [task, place] = [task + this.perLine, 0];
    if (place < 0) [task, place] = [task - this.perLine, this.most - 1];
    task = Math.max(0, Math.min(this.tasks.length - 1, task));
    place = Math.max(0, Math.min(this.tasks[task].cells.length - 1, place));
    this.intoSight(task);
    this.move({ task, place });
    return undefined;
  }

  intoSight(task) {
    const y = Math.floor(task / this.perLine) * this.lineHeight;
    const { scrollTop, clientHeight } = this.scroller;
    if (y < scrollTop) this.scroller.scrollTop = y;
    else if (y + this.lineHeight > scrollTop + clientHeight)
      this.scroller.scrollTop = y + this.lineHeight - clientHeight;
  }
}
