"""The profile as a page: one HTML file that needs nothing but a browser, not even a network or a script.

Whatever comes from data (names of agents, files and failure classes) is escaped, and a content policy in the
page forbids it to load or run anything.
"""

from collections.abc import Iterable, Sequence
from html import escape

from nemo_gym.metrics.intervals import Estimate
from nemo_gym.metrics.page_charts import (
    box_chart,
    grouped_by,
    histogram,
    number,
    row_chart,
    share_chart,
)
from nemo_gym.metrics.page_data import AgentNumbers, ProfileNumbers
from nemo_gym.metrics.page_style import STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_AGENTS_SHOWN = 200
_FAILURES_SHOWN = 20
_TOKENS = {"output_tokens": "output tokens", "completion_tokens": "output tokens", "total_tokens": "total tokens"}


def render_page(title: str, subtitle: str, numbers: ProfileNumbers) -> str:
    """The page, complete."""
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>",
        _tiles(numbers),
        _solved_band(numbers),
        f'<div class="cards">{"".join(_cards(numbers))}</div>',
        _agents_table(numbers.agents),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _tiles(numbers: ProfileNumbers) -> str:
    agents = numbers.agents
    tasks = sum(agent.tasks for agent in agents)
    rollouts, expected = sum(agent.rollouts for agent in agents), sum(agent.expected_rollouts for agent in agents)
    tiles = [
        (f"{tasks:,}", "tasks"),
        (f"{rollouts:,}", "rollouts" if rollouts == expected else f"of {expected:,} rollouts"),
        (_mean_of(numbers), "mean reward"),
        (f"{rollouts / tasks:.3g}" if tasks else "0", "rollouts per task"),
    ]
    if len(numbers.tokens):
        tiles.append((number(round(float(numbers.tokens.mean()))), f"mean {_token_name(numbers)}"))
    if numbers.failures:
        tiles.append((f"{sum(of_class.attempts for of_class in numbers.failures):,}", "failed attempts"))
    shown = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles)
    return f'<div class="tiles">{"".join(shown)}</div>'


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
    return _wide(
        "Tasks by the rewards of their rollouts", "", f'<div class="band">{bands}</div><div class="key">{key}</div>'
    )


def _cards(numbers: ProfileNumbers) -> Iterable[str]:
    if len(numbers.task_means):
        if numbers.is_binary:
            note = "Share of each task's rollouts with reward 1; never and always stand alone"
            chart = share_chart("Pass rate of tasks", numbers.task_means, "pass rate", "tasks")
            yield _card("Pass rate of tasks", note, chart)
        else:
            chart = histogram("Mean reward of tasks", numbers.task_means, "mean reward", "tasks")
            yield _card("Mean reward of tasks", "Over the rollouts of each task", chart)
    if len(numbers.rewards):
        yield _card("Rewards", "Of single rollouts", histogram("Rewards", numbers.rewards, "reward", "rollouts"))
    if len(numbers.scored_tokens):
        chart = box_chart(
            "Tokens and reward",
            grouped_by(numbers.scored_rewards, numbers.scored_tokens),
            _token_name(numbers),
            "reward",
        )
        yield _card("Tokens and reward", "Box: the middle half; line: from 5 to 95 %; bar: median", chart)
    yield from _length_cards(numbers)
    if numbers.failures:
        shown = numbers.failures[:_FAILURES_SHOWN]
        rows = [(of.name, of.attempts, _attempts_text(of.attempts, of.rollouts)) for of in shown]
        yield _card("Failures by class", "Attempts in the failures sidecar", row_chart("Failures by class", rows))


def _length_cards(numbers: ProfileNumbers) -> Iterable[str]:
    if len(numbers.tokens):
        name = _token_name(numbers)
        chart = histogram("Lengths of rollouts", numbers.tokens, name, "rollouts", marks_quantiles=True)
        yield _card("Lengths of rollouts", f"In {name}", chart)
    if len(numbers.output_items):
        items = "items in the response"
        chart = histogram("Items per rollout", numbers.output_items, items, "rollouts", marks_quantiles=True)
        yield _card("Steps of rollouts", "Messages, tool calls and tool outputs of each response", chart)


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
    titles = "".join(f"<th>{name}</th>" for name in head)
    return _wide("Agents", note, f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>")


def _agent_row(agent: AgentNumbers) -> str:
    is_complete = agent.rollouts == agent.expected_rollouts
    cells = (
        agent.name,
        f"{agent.tasks:,}",
        f"{agent.rollouts:,}" if is_complete else f"{agent.rollouts:,} of {agent.expected_rollouts:,}",
        "" if agent.reward.mean is None else f"{agent.reward.mean:.4f}",
        _interval(agent.reward),
        f"{agent.never:,}",
        f"{agent.sometimes:,}",
        f"{agent.always:,}",
        "" if agent.mean_tokens is None else number(round(agent.mean_tokens)),
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _interval(estimate: Estimate) -> str:
    return "" if estimate.ci95 is None else f"{estimate.ci95[0]:.4f} to {estimate.ci95[1]:.4f}"


def _token_name(numbers: ProfileNumbers) -> str:
    return _TOKENS.get(numbers.token_field or "", "tokens")


def _card(title: str, note: str, content: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2><p>{escape(note)}</p>{content}</section>'


def _wide(title: str, note: str, content: str) -> str:
    return f'<section class="card wide"><h2>{escape(title)}</h2><p>{escape(note)}</p>{content}</section>'
