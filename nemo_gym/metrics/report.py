"""The profile as a page: one HTML file that needs nothing but a browser, not even a network or a script.

It is light or dark as the reader's system is, and readable on paper and on a phone. Whatever comes from data (names of
agents, files and failure classes) is escaped, and a content policy in the page forbids it to load or run anything.
Pages of other rooms are made of the same parts: `whole_page`, `tiles`, `card` and `plain_table`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_gym.keys import AGENT_REF_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.charts import STYLE as CHART_STYLE
from nemo_gym.metrics.charts import box_chart, grouped_by, histogram, number, row_chart, share_chart
from nemo_gym.metrics.columns import REWARD
from nemo_gym.metrics.intervals import Estimate, clustered_mean

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --line: #e4e3df;
  --text: #1d1d1b; --soft: #6a6963; --bad: #c2543d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #161718; --card: #1f2122; --line: #323537;
    --text: #ecebe7; --soft: #a3a19a; --bad: #e07c64;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 32px 24px 56px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1180px; margin: 0 auto; }
h1 { font-size: 24px; font-weight: 650; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 15px; font-weight: 620; margin: 0 0 2px; }
p { margin: 0; color: var(--soft); font-size: 13px; }
a { color: var(--mark); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 22px 0 12px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile b { display: block; font-size: 24px; font-weight: 620; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.cards { display: grid; gap: 12px; margin: 12px 0; }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.card { padding: 16px 18px 14px; min-width: 0; }
.card svg { display: block; width: 100%; max-width: 640px; height: auto; margin: 10px auto 0; }
.wide { margin: 12px 0; overflow-x: auto; }
.band { display: flex; height: 18px; border-radius: 5px; overflow: hidden; margin: 12px 0 8px; gap: 2px; }
.band i { display: block; min-width: 2px; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.never { background: var(--low); } .sometimes { background: var(--mark); } .always { background: var(--high); }
table { border-collapse: collapse; width: 100%; margin-top: 10px; font-size: 14px; }
th { text-align: right; font-weight: 500; color: var(--soft); padding: 6px 12px; border-bottom: 1px solid var(--line); }
td { text-align: right; padding: 7px 12px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
td { font-variant-numeric: tabular-nums; }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; overflow-wrap: anywhere; }
th:first-child { min-width: 130px; }
th:last-child, td:last-child { padding-right: 0; }
@media print { body { padding: 0; } .card, .tile { break-inside: avoid; } }
"""
Floats = NDArray[np.float64]
_TOKEN_FIELDS = ("output_tokens", "completion_tokens", "total_tokens")
"""What a rollout's length is measured in, the first that any rollout has."""
_NO_AGENT = "(no agent)"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_AGENTS_SHOWN = 200
_TASKS_SHOWN = 100
_FAILURES_SHOWN = 20
_TOKENS = {"output_tokens": "output tokens", "completion_tokens": "output tokens", "total_tokens": "total tokens"}


@dataclass(frozen=True)
class Failures:
    """The failures of one class."""

    name: str
    attempts: int
    rollouts: int
    """Different rollouts among them."""


@dataclass
class AgentNumbers:
    """One line of the table of agents."""

    name: str
    tasks: int
    scored_tasks: int
    """Those with at least one reward."""
    rollouts: int
    expected_rollouts: int
    reward: Estimate
    never: int
    """Tasks of which no rollout got a reward above 0."""
    always: int
    """Tasks of which every rollout got a reward of 1 or more."""
    mean_tokens: float | None

    @property
    def sometimes(self) -> int:
        """Scored tasks in between."""
        return self.scored_tasks - self.never - self.always


@dataclass(frozen=True)
class TaskNumbers:
    """One line of the table of tasks."""

    index: Any
    agent: str
    rollouts: int
    expected_rollouts: int
    mean: float | None
    lowest: float | None
    highest: float | None
    mean_tokens: float | None


@dataclass
class ProfileNumbers:
    """Everything the page shows."""

    agents: list[AgentNumbers]
    task_means: Floats
    """The mean reward of each task."""
    rewards: Floats
    """Of each rollout that has one."""
    token_field: str | None
    """What tokens are counted in; None when no rollout says."""
    tokens: Floats
    """Of each rollout that tells."""
    scored_tokens: Floats
    scored_rewards: Floats
    """Tokens and reward of each rollout that has both."""
    output_items: Floats
    """How many items each rollout's response has."""
    failures: list[Failures] = field(default_factory=list)
    tasks: list[TaskNumbers] = field(default_factory=list)
    """The hardest, the hardest first."""
    tasks_total: int = 0

    @property
    def is_binary(self) -> bool:
        """Whether every reward is 0 or 1."""
        return bool(np.all((self.rewards == 0) | (self.rewards == 1)))


def numbers_of(
    profiles: Sequence[Mapping[str, Any]],
    output_items: Iterable[float] = (),
    failures: Iterable[Failures] = (),
) -> ProfileNumbers:
    """The numbers of a profile: one entry per task, as `RewardProfiler.profile_from_data` makes them."""
    infos = [info for profile in profiles for info in profile["rollout_infos"]]
    token_field = next((name for name in _TOKEN_FIELDS if any(name in info for info in infos)), None)
    both = [info for info in infos if _is_number(info.get(REWARD)) and _is_number(info.get(token_field))]
    return ProfileNumbers(
        agents=_agents(profiles, token_field),
        task_means=_floats(profile.get(f"mean/{REWARD}") for profile in profiles),
        rewards=_floats(info.get(REWARD) for info in infos),
        token_field=token_field,
        tokens=_floats(info.get(token_field) for info in infos),
        scored_tokens=_floats(info[token_field] for info in both),
        scored_rewards=_floats(info[REWARD] for info in both),
        output_items=_floats(output_items),
        failures=sorted(failures, key=lambda of_class: (-of_class.attempts, of_class.name)),
        tasks=[_task(profile, token_field) for profile in sorted(profiles, key=_ease)[:_TASKS_SHOWN]],
        tasks_total=len(profiles),
    )


def _ease(profile: Mapping[str, Any]) -> tuple[float, float]:
    """By mean reward; of tasks that are equally hard, those with most rollouts first; those without a reward last."""
    mean: Any = profile.get(f"mean/{REWARD}")
    return (float(mean) if _is_number(mean) else np.inf), -len(profile["rollout_infos"])


def _task(profile: Mapping[str, Any], token_field: str | None) -> TaskNumbers:
    def known(name: str) -> float | None:
        value: Any = profile.get(name)
        return float(value) if _is_number(value) else None

    infos = profile["rollout_infos"]
    tokens = _floats(info.get(token_field) for info in infos)
    return TaskNumbers(
        index=profile[TASK_INDEX_KEY_NAME],
        agent=_agent_name(profile),
        rollouts=len(infos),
        expected_rollouts=profile["expected_num_rollouts"],
        mean=known(f"mean/{REWARD}"),
        lowest=known(f"min/{REWARD}"),
        highest=known(f"max/{REWARD}"),
        mean_tokens=float(tokens.mean()) if len(tokens) else None,
    )


def _agents(profiles: Sequence[Mapping[str, Any]], token_field: str | None) -> list[AgentNumbers]:
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for profile in profiles:
        by_name.setdefault(_agent_name(profile), []).append(profile)
    return [_agent(name, of_agent, token_field) for name, of_agent in sorted(by_name.items())]


def _agent(name: str, profiles: list[Mapping[str, Any]], token_field: str | None) -> AgentNumbers:
    infos = [info for profile in profiles for info in profile["rollout_infos"]]
    scored = [info for info in infos if _is_number(info.get(REWARD))]
    tokens = _floats(info.get(token_field) for info in infos)
    return AgentNumbers(
        name=name,
        tasks=len(profiles),
        scored_tasks=sum(f"mean/{REWARD}" in profile for profile in profiles),
        rollouts=len(infos),
        expected_rollouts=sum(profile["expected_num_rollouts"] for profile in profiles),
        reward=clustered_mean([info[REWARD] for info in scored], [info[TASK_INDEX_KEY_NAME] for info in scored]),
        never=sum(profile.get(f"max/{REWARD}", 1) <= 0 for profile in profiles),
        always=sum(profile.get(f"min/{REWARD}", 0) >= 1 for profile in profiles),
        mean_tokens=float(tokens.mean()) if len(tokens) else None,
    )


def _agent_name(profile: Mapping[str, Any]) -> str:
    agent_ref = profile["sample"].get(AGENT_REF_KEY_NAME)
    name = agent_ref.get("name") if isinstance(agent_ref, Mapping) else None
    return name if isinstance(name, str) else _NO_AGENT


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def _floats(values: Iterable[Any]) -> Floats:
    return np.array([float(value) for value in values if _is_number(value)], np.float64)


def render_page(
    title: str,
    subtitle: str,
    numbers: ProfileNumbers,
    how_to_view: str = "",
    task_link: Callable[[Any], str] | None = None,
) -> str:
    """The page, complete.

    `how_to_view` is the command that shows the rollouts themselves, `task_link` says where those of a task are.
    """
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>",
        _tiles(numbers),
        _solved_band(numbers),
        f'<div class="cards">{"".join(_cards(numbers))}</div>',
        _agents_table(numbers.agents),
        _tasks_table(numbers, task_link),
        f"<p>The rollouts themselves: <code>{escape(how_to_view)}</code></p>" if how_to_view else "",
    ]
    return whole_page(title, body)


def whole_page(title: str, body: Iterable[str], own_style: str = "") -> str:
    """A page of these parts, which neither loads nor runs anything."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}{CHART_STYLE}{own_style}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """A few numbers in large type, each with what it is."""
    shown = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in values)
    return f'<div class="tiles">{"".join(shown)}</div>'


def card(title: str, content: str, note: str = "", *, is_wide: bool = False) -> str:
    """A part of the page with a heading; `content` is markup, `note` a sentence below the heading."""
    below = f"<p>{escape(note)}</p>" if note else ""
    return f'<section class="card{" wide" if is_wide else ""}"><h2>{escape(title)}</h2>{below}{content}</section>'


def plain_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of texts."""
    return markup_table(columns, (map(escape, row) for row in rows))


def markup_table(columns: Iterable[str], rows: Iterable[Iterable[str]], style: str = "") -> str:
    """A table whose cells are markup, and whose columns are called by texts."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    kind = f' class="{style}"' if style else ""
    return f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _tiles(numbers: ProfileNumbers) -> str:
    agents = numbers.agents
    tasks = sum(agent.tasks for agent in agents)
    rollouts, expected = sum(agent.rollouts for agent in agents), sum(agent.expected_rollouts for agent in agents)
    shown = [
        (f"{tasks:,}", "tasks"),
        (f"{rollouts:,}", "rollouts" if rollouts == expected else f"of {expected:,} rollouts"),
        (_mean_of(numbers), "mean reward"),
        (f"{rollouts / tasks:.3g}" if tasks else "0", "rollouts per task"),
    ]
    if len(numbers.tokens):
        shown.append((number(round(float(numbers.tokens.mean()))), f"mean {_token_name(numbers)}"))
    if numbers.failures:
        shown.append((f"{sum(of_class.attempts for of_class in numbers.failures):,}", "failed attempts"))
    return tiles(shown)


def _mean_of(numbers: ProfileNumbers) -> str:
    mean = float(numbers.rewards.mean()) if len(numbers.rewards) else None
    return "none" if mean is None else f"{mean:.3f}" if abs(mean) < 1000 else number(mean)


def _solved_band(numbers: ProfileNumbers) -> str:
    counts = {
        "never": sum(agent.never for agent in numbers.agents),
        "sometimes": sum(agent.sometimes for agent in numbers.agents),
        "always": sum(agent.always for agent in numbers.agents),
    }
    total = sum(counts.values())
    if not total:
        return ""
    meanings = {"never": "never above 0", "sometimes": "in between", "always": "always 1 or more"}
    bands = "".join(
        f'<i class="{name}" style="flex: {count}" title="{meanings[name]}: {count:,}"></i>'
        for name, count in counts.items()
        if count
    )
    key = "".join(
        f'<span><i class="{name}"></i>{meanings[name]}: {count:,} ({100 * count / total:.1f} %)</span>'
        for name, count in counts.items()
    )
    band = f'<div class="band">{bands}</div><div class="key">{key}</div>'
    return card("Tasks by the rewards of their rollouts", band, is_wide=True)


def _cards(numbers: ProfileNumbers) -> Iterable[str]:
    if len(numbers.task_means):
        if numbers.is_binary:
            note = "Share of each task's rollouts with reward 1; never and always stand alone"
            chart = share_chart("Pass rate of tasks", numbers.task_means, "pass rate", "tasks")
            yield card("Pass rate of tasks", chart, note)
        else:
            chart = histogram("Mean reward of tasks", numbers.task_means, "mean reward", "tasks")
            yield card("Mean reward of tasks", chart, "Over the rollouts of each task")
    if len(numbers.rewards):
        yield card("Rewards", histogram("Rewards", numbers.rewards, "reward", "rollouts"), "Of single rollouts")
    if len(numbers.scored_tokens):
        chart = box_chart(
            "Tokens and reward",
            grouped_by(numbers.scored_rewards, numbers.scored_tokens),
            _token_name(numbers),
            "reward",
        )
        yield card("Tokens and reward", chart, "Box: the middle half; line: from 5 to 95 %; bar: median")
    yield from _length_cards(numbers)
    if numbers.failures:
        shown = numbers.failures[:_FAILURES_SHOWN]
        rows = [(of.name, of.attempts, _attempts_text(of.attempts, of.rollouts)) for of in shown]
        yield card("Failures by class", row_chart("Failures by class", rows), "Attempts in the failures sidecar")


def _length_cards(numbers: ProfileNumbers) -> Iterable[str]:
    if len(numbers.tokens):
        name = _token_name(numbers)
        chart = histogram("Lengths of rollouts", numbers.tokens, name, "rollouts", marks_quantiles=True)
        yield card("Lengths of rollouts", chart, f"In {name}")
    if len(numbers.output_items):
        items = "items in the response"
        chart = histogram("Items per rollout", numbers.output_items, items, "rollouts", marks_quantiles=True)
        yield card("Steps of rollouts", chart, "Messages, tool calls and tool outputs of each response")


def _attempts_text(attempts: int, rollouts: int) -> str:
    return f"{attempts:,} of {rollouts:,} rollouts" if attempts != rollouts else f"{attempts:,}"


def _agents_table(agents: Sequence[AgentNumbers]) -> str:
    head = (
        "Agent",
        "Tasks",
        "Rollouts",
        "Mean reward",
        "95 % interval",
        "Never",
        "In between",
        "Always",
        "Mean tokens",
    )
    rows = [_agent_row(agent) for agent in agents[:_AGENTS_SHOWN]]
    more = len(agents) - len(rows)
    note = f"The first {len(rows)} of {len(agents)}" if more > 0 else "Rollouts pooled per agent"
    return card("Agents", plain_table(head, rows), note, is_wide=True)


def _agent_row(agent: AgentNumbers) -> tuple[str, ...]:
    return (
        agent.name,
        f"{agent.tasks:,}",
        _of(agent.rollouts, agent.expected_rollouts),
        "" if agent.reward.mean is None else f"{agent.reward.mean:.4f}",
        _interval(agent.reward),
        f"{agent.never:,}",
        f"{agent.sometimes:,}",
        f"{agent.always:,}",
        "" if agent.mean_tokens is None else number(round(agent.mean_tokens)),
    )


def _tasks_table(numbers: ProfileNumbers, task_link: Callable[[Any], str] | None) -> str:
    if not numbers.tasks:
        return ""
    columns = ("Task", "Agent", "Rollouts", "Mean reward", "Lowest", "Highest", "Mean tokens")
    rows = [
        (
            _linked(f"task {task.index}", None if task_link is None else task_link(task.index)),
            escape(task.agent),
            _of(task.rollouts, task.expected_rollouts),
            *("" if value is None else number(value) for value in (task.mean, task.lowest, task.highest)),
            "" if task.mean_tokens is None else number(round(task.mean_tokens)),
        )
        for task in numbers.tasks
    ]
    which = "All of them" if len(rows) == numbers.tasks_total else f"{len(rows)} of {numbers.tasks_total:,}"
    note = f"{which}, the hardest first" + ("; each leads to its rollouts" if task_link is not None else "")
    return card("Tasks", markup_table(columns, rows), note, is_wide=True)


def _linked(text: str, target: str | None) -> str:
    return escape(text) if target is None else f'<a href="{escape(target)}">{escape(text)}</a>'


def _of(count: int, expected: int) -> str:
    return f"{count:,}" if count == expected else f"{count:,} of {expected:,}"


def _interval(estimate: Estimate) -> str:
    return "" if estimate.ci95 is None else f"{estimate.ci95[0]:.4f} to {estimate.ci95[1]:.4f}"


def _token_name(numbers: ProfileNumbers) -> str:
    return _TOKENS.get(numbers.token_field or "", "tokens")
