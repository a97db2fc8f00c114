// Numbers, times and names as people read them.

const DASH = "–";
const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const OUTCOME_WORDS = ["scored", "unscored", "failed", "damaged"];

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function whole(value) {
  return isNumber(value) ? WHOLE.format(value) : DASH;
}

// As many digits as tell something: 0.613, 12.5, 1,234.
export function decimal(value, digits) {
  if (!isNumber(value)) return DASH;
  if (digits !== undefined) return value.toFixed(digits);
  if (Number.isInteger(value)) return WHOLE.format(value);
  const size = Math.abs(value);
  if (size >= 1000) return WHOLE.format(value);
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toFixed(size >= 100 ? 1 : 3)));
}

export function short(value) {
  if (!isNumber(value)) return DASH;
  for (const [limit, unit] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    if (Math.abs(value) >= limit) {
      const size = unit === "k" ? 1e3 : limit;
      return `${Number((value / size).toPrecision(3))} ${unit}`;
    }
  }
  return decimal(value);
}

export function duration(seconds) {
  if (!isNumber(seconds)) return DASH;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 0.01) return `${Number((seconds * 1000).toPrecision(2))} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(size) {
  if (!isNumber(size)) return DASH;
  if (size < 1000) return `${size} B`;
  const power = Math.min(4, Math.floor(Math.log10(size) / 3));
  return `${Number((size / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

export function moment(text) {
  const date = new Date(text || "");
  if (Number.isNaN(date.getTime())) return DASH;
  const two = (value) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export function interval(score) {
  return score && score.ci95 ? `${decimal(score.ci95[0], 3)} to ${decimal(score.ci95[1], 3)}` : null;
}

export function passAtK(value) {
  return value && isNumber(value["pass@k"]) ? `${decimal(Number(value["pass@k"].toFixed(1)))} %` : null;
}

export function outcomeWord(code) {
  return OUTCOME_WORDS[code] || String(code);
}

export function countOf(count, singular, plural) {
  return `${whole(count)} ${count === 1 ? singular : plural || `${singular}s`}`;
}

export function rewardText(row) {
  if (isNumber(row.reward)) return decimal(row.reward);
  return row.outcome === "scored" ? DASH : row.outcome;
}

export function taskName(row) {
  const task = row.task === null || row.task === undefined ? `Line ${row.line}` : `Task ${row.task}`;
  return row.repeat === null || row.repeat === undefined ? task : `${task} · repeat ${row.repeat}`;
}

// A run's file is called `rollouts` more often than not: its folder tells it from others.
export function runLabel(run) {
  return run.folder && run.folder !== "." ? `${run.folder}/${run.name}` : run.name;
}

export function failuresText(run) {
  const classes = Object.entries(run.failures || {}).sort((one, other) => other[1] - one[1]);
  return classes.map(([name, count]) => `${whole(count)} ${name}`).join(", ");
}
