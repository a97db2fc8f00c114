"""Whether rollouts are what they should be: signs of trouble that a mean reward does not show.

Most checks look at one record and are cheap enough to be made of every rollout while it is stored (`HealthCounts`).
Those that compare rollouts of a task, or all of an agent, are made over files (`HealthScan`), in one pass that keeps
some 50 bytes per rollout.
"""

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from nemo_gym.keys import RESPONSE_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME, ROLLOUT_INDEX_KEY_NAME
from nemo_gym.runs.facts import RolloutFilter
from nemo_gym.runs.read import plain_records
from nemo_gym.runs.record import REWARD_KEY, RolloutKey, agent_name_of, is_finite_number

DEFAULT_REWARD_RANGE = (0.0, 1.0)
CALLS_IN_A_ROW = 3
"""So many equal calls one after the other are a loop."""
_TIMES_REPEATED = 4
_SHORTEST_LOOP = 80
"""Characters that repetitions of a text have at least, all together."""
_TAIL = 4_000
_PROBE = 40
_FEWEST_LETTERS = 4
"""Different letters and digits in what is repeated: a line of dashes is no loop."""
_SHORTEST_IDENTICAL = 40
"""Characters from which on equal answers to the same question are no coincidence."""
_FEWEST_FOR_CONSTANT = 20
_FEWEST_TASKS_FOR_CONSTANT = 10
_CUT_SHORT = frozenset({"max_output_tokens", "max_tokens", "length"})
_CALLS = frozenset({"function_call", "custom_tool_call", "mcp_call"})
_REFUSES = re.compile(
    r"\W*+(?:(?:i['\u2019]m|i am)?\s*(?:very |so |really )?(?:sorry|unfortunately|afraid)\W{1,3}(?:but )?)?"
    r"(?:as an? (?:ai|language model)[^,.]{0,40},? )?"
    r"i(?: can(?:no|['\u2019])t| can not| won['\u2019]t| will not|(?:['\u2019]m| am) (?:unable|not able) to"
    r"| (?:must|have to) decline to)"
    r"(?: to)? (?:help|assist|comply|fulfil|engage|participate|support|discuss|answer (?:that|this)|"
    r"(?:provide|create|generate|write|share|produce) (?:that|this|such|any|content|instructions|information))",
    re.IGNORECASE,
)


class Check(StrEnum):
    """What can be odd about rollouts."""

    EMPTY = "empty_answer"
    TRUNCATED = "truncated"
    NO_TOOLS = "tools_not_called"
    LOOP = "repeated_calls"
    REPEATED_TEXT = "repeated_text"
    BAD_ARGUMENTS = "bad_arguments"
    REFUSAL = "refusal"
    OUT_OF_RANGE = "reward_out_of_range"
    DISAGREEMENT = "judge_disagreement"
    IDENTICAL = "identical_answers"
    CONSTANT = "constant_reward"


MEANINGS = {
    Check.EMPTY: "neither a text nor a tool call",
    Check.TRUNCATED: "cut off at the token limit; allow more with +responses_create_params.max_output_tokens=<number>",
    Check.NO_TOOLS: "tools were offered, and none was called",
    Check.LOOP: f"the same tool call {CALLS_IN_A_ROW} times in a row, or more often",
    Check.REPEATED_TEXT: "a text that ends in a loop",
    Check.BAD_ARGUMENTS: "arguments of a tool call that are no JSON object",
    Check.REFUSAL: "the model refused",
    Check.OUT_OF_RANGE: "a reward that is outside +reward_range, or no number",
    Check.DISAGREEMENT: "judges contradict each other, or equal answers to a task got different rewards",
    Check.IDENTICAL: "all rollouts of a task are the same, although the temperature is above 0",
    Check.CONSTANT: "all rollouts of an agent have the same reward",
}
OF_TASKS, OF_AGENTS = frozenset({Check.IDENTICAL}), frozenset({Check.CONSTANT})
"""What is counted where it is not rollouts."""


class Said(NamedTuple):
    """What a model did in one rollout."""

    texts: list[str]
    """Of its messages."""
    thoughts: list[str]
    calls: list[tuple[str, Any]]
    """Names and arguments of its tool calls."""
    outputs: list[str]
    """What the tools answered."""
    refused: bool
    """Whether the endpoint marks it as a refusal."""


def said_in(response: Mapping[str, Any]) -> Said:
    """Go through the output of a response; whatever is not as expected is passed over."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, Any]] = []
    outputs: list[str] = []
    refused = False
    output = response.get("output")
    for item in output if isinstance(output, list) else ():
        if not isinstance(item, dict):
            continue
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role", "assistant") == "assistant":
            refused |= _add_texts(item.get("content"), texts)
        elif kind in _CALLS:
            calls.append((str(item.get("name")), item.get("arguments", item.get("input"))))
        elif kind == "reasoning":
            _add_texts(item.get("summary"), thoughts)
            _add_texts(item.get("content"), thoughts)
        elif "output" in item:
            outputs.append(str(item["output"]))
    return Said(texts, thoughts, calls, outputs, refused)


def _add_texts(content: Any, texts: list[str]) -> bool:
    """Whether there is a refusal among the parts."""
    if isinstance(content, str):
        texts.append(content)
        return False
    refused = False
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            refused |= part.get("type") == "refusal"
            text = part.get("text")
            if isinstance(text, str):
                texts.append(text)
    return refused


def findings_in(record: Mapping[str, Any], said: Said, reward_range: tuple[float, float] | None) -> list[Check]:
    """What is odd about one rollout by itself."""
    texts, thoughts, calls, _, refused = said
    found = _about_calls(calls) if calls else _without_calls(record, said)
    if (details := record[RESPONSE_KEY_NAME].get("incomplete_details")) is not None and _is_truncated(details):
        found.append(Check.TRUNCATED)
    for text in (*texts, *thoughts) if thoughts else texts:
        if len(text) >= _SHORTEST_LOOP and ends_in_loop(text):
            found.append(Check.REPEATED_TEXT)
            break
    else:
        if len(texts) > 2 and _says_the_same(texts):
            found.append(Check.REPEATED_TEXT)
    if refused or (texts and _REFUSES.match(texts[-1])):
        found.append(Check.REFUSAL)
    if not _is_in(record.get(REWARD_KEY), reward_range):
        found.append(Check.OUT_OF_RANGE)
    if (evaluations := record.get("judge_evaluations")) is not None and _judges_disagree(evaluations):
        found.append(Check.DISAGREEMENT)
    return found


def _without_calls(record: Mapping[str, Any], said: Said) -> list[Check]:
    found = []
    if not said.refused and not any(text.strip() for text in said.texts):
        found.append(Check.EMPTY)
    if _offers_tools(record.get(RESPONSES_CREATE_PARAMS_KEY_NAME)):
        found.append(Check.NO_TOOLS)
    return found


def _about_calls(calls: Sequence[tuple[str, Any]]) -> list[Check]:
    found = []
    if len(calls) >= CALLS_IN_A_ROW and _has_loop(calls):
        found.append(Check.LOOP)
    for _, arguments in calls:
        if arguments is not None and type(arguments) is not dict and not _is_object(arguments):
            found.append(Check.BAD_ARGUMENTS)
            break
    return found


def _is_truncated(details: Any) -> bool:
    return isinstance(details, dict) and details.get("reason") in _CUT_SHORT


def _has_loop(calls: Sequence[tuple[str, Any]]) -> bool:
    in_a_row, before = 0, None
    for call in calls:
        in_a_row = in_a_row + 1 if call == before else 1
        before = call
        if in_a_row >= CALLS_IN_A_ROW:
            return True
    return False


def _is_object(arguments: Any) -> bool:
    try:
        return isinstance(orjson.loads(arguments or "{}"), dict)
    except (orjson.JSONDecodeError, TypeError):
        return False


def _offers_tools(params: Any) -> bool:
    if not isinstance(params, dict) or params.get("tool_choice") == "none":
        return False
    return bool(params.get("tools"))


def ends_in_loop(text: str) -> bool:
    """Whether a text ends with the same words over and over, as one that was cut off in a loop does."""
    if len(text) < _SHORTEST_LOOP:
        return False
    tail = text[-_TAIL:].rstrip()
    probe = tail[-_PROBE:]
    earlier = tail.rfind(probe, 0, len(tail) - 1)
    period = len(tail) - len(probe) - earlier
    repeated = _TIMES_REPEATED * period
    if earlier < 0 or repeated > len(tail):
        return False
    repeated = max(repeated, -(-_SHORTEST_LOOP // period) * period)
    if repeated > len(tail) or tail[-repeated:-period] != tail[-(repeated - period) :]:
        return False
    return len({letter for letter in tail[-period:] if letter.isalnum()}) >= _FEWEST_LETTERS


def _says_the_same(texts: Sequence[str]) -> bool:
    return any(
        len(text) >= _SHORTEST_IDENTICAL and text == texts[place + 1] == texts[place + 2]
        for place, text in enumerate(texts[:-2])
    )


def _is_in(reward: Any, within: tuple[float, float] | None) -> bool:
    if reward is None or (type(reward) is float and within is not None and within[0] <= reward <= within[1]):
        return True  # there are agents that do not score
    return is_finite_number(reward) and (within is None or within[0] <= reward <= within[1])


def _judges_disagree(evaluations: Any) -> bool:
    if not isinstance(evaluations, list):
        return False
    labels = {it.get("verdict_label") for it in evaluations if isinstance(it, dict)}
    return len(labels - {None}) > 1


@dataclass
class _Rewards:
    """The rewards of one agent, as far as it takes to see whether they differ."""

    lowest: float
    highest: float
    rollouts: int = 0
    tasks: int = 0

    @property
    def is_constant(self) -> bool:
        is_enough = self.rollouts >= _FEWEST_FOR_CONSTANT and self.tasks >= _FEWEST_TASKS_FOR_CONSTANT
        return is_enough and self.lowest == self.highest


class HealthCounts:
    """What is odd about the rollouts of a run, counted as they are stored."""

    def __init__(self, reward_range: tuple[float, float] | None = DEFAULT_REWARD_RANGE) -> None:
        self.rollouts = 0
        self.odd = 0
        """Rollouts about which something was found."""
        self.counts: Counter[Check] = Counter()
        self._rewards: dict[str, _Rewards] = {}
        self._range = reward_range

    def add(self, record: Mapping[str, Any], agent: str | None = None) -> tuple[list[Check], Said | None]:
        """Look at one finished rollout, of `agent` if that is known; what was found, and what it was found in."""
        self.rollouts += 1
        response = record.get(RESPONSE_KEY_NAME)
        said = said_in(response) if isinstance(response, dict) and "output" in response else None
        if said is not None:
            found = findings_in(record, said, self._range)
        else:
            found = [] if _is_in(record.get(REWARD_KEY), self._range) else [Check.OUT_OF_RANGE]
        if found:
            self.odd += 1
            self.counts.update(found)
        reward = record.get(REWARD_KEY)
        if (type(reward) is float and -math.inf < reward < math.inf) or is_finite_number(reward):
            agent = (agent_name_of(record) or "") if agent is None else agent
            self._add_reward(agent, reward, record.get(ROLLOUT_INDEX_KEY_NAME) == 0)
        return found, said

    def _add_reward(self, agent: str, reward: float, is_first: bool) -> None:
        of_agent = self._rewards.get(agent)
        if of_agent is None:
            of_agent = self._rewards[agent] = _Rewards(reward, reward)
        elif reward < of_agent.lowest:
            of_agent.lowest = reward
        elif reward > of_agent.highest:
            of_agent.highest = reward
        of_agent.rollouts += 1
        of_agent.tasks += is_first

    def constant(self) -> dict[str, float]:
        """The agents whose rewards are suspiciously all the same, and that reward."""
        return {agent: of_agent.lowest for agent, of_agent in self._rewards.items() if of_agent.is_constant}

    def line(self) -> str:
        """For the end of a run; empty when nothing was found."""
        said = [f"{count} {check}" for check, count in self.counts.most_common()]
        odd = f"{self.odd} of {self.rollouts} rollouts look odd ({', '.join(said)})" if said else ""
        same = [f"every reward is {reward:g}" for reward in self.constant().values()]
        return "; ".join(filter(None, (odd, *same[:1])))

    def as_json(self) -> dict[str, int]:
        """For programs: what was found, by check, and in how many rollouts; empty when nothing was."""
        found = {str(check): count for check, count in self.counts.items()}
        if self.odd:
            found["odd"] = self.odd
        constant = len(self.constant())
        return {**found, str(Check.CONSTANT): constant} if constant else found

    def add_told(self, told: Mapping[str, int], rollouts: int) -> None:
        """Add what another process found in so many rollouts; whether rewards are constant only it can tell."""
        self.rollouts += rollouts
        self.odd += told.get("odd", 0)
        self.counts.update({check: told[check] for check in Check if check in told and check is not Check.CONSTANT})


class Place(NamedTuple):
    """Where an example is."""

    path: Path
    line: int
    key: RolloutKey


@dataclass
class Finding:
    """What one check found."""

    check: Check
    count: int
    of: int
    """How many there were to look at: rollouts, tasks or agents."""
    examples: list[Place] = field(default_factory=list)

    @property
    def what(self) -> str:
        """Which of these they are."""
        return "tasks" if self.check in OF_TASKS else "agents" if self.check in OF_AGENTS else "rollouts"


class HealthScan:
    """All checks over the rollouts of files, read once."""

    def __init__(self, *, reward_range: tuple[float, float] | None = DEFAULT_REWARD_RANGE, examples: int = 3) -> None:
        self.counts = HealthCounts(reward_range)
        self._most = examples
        self._examples: dict[Check, list[Place]] = {check: [] for check in Check}
        self._paths: list[Path] = []
        self._agents: dict[str | None, int] = {}
        self._columns = {name: array("q") for name in ("agent", "task", "all", "told", "file", "line")}
        self._rollout_indices = array("q")
        self._rewards = array("d")
        self._is_hot = bytearray()
        self._odd_tasks: dict[int, Any] = {}

    def read(self, path: Path, where: RolloutFilter | None = None) -> None:
        """Look at every rollout of a file for which `where` holds; damaged lines are passed over."""
        self._paths.append(path)
        for key, line, record in plain_records(path, "skip"):
            assert key is not None
            if where is not None and not where.holds(record):
                continue
            place = Place(path, line[0], RolloutKey(*key))
            found, said = self.counts.add(record)
            for check in found:
                self._note(check, place)
            if said is not None:
                self._keep(place, record, said)

    def _note(self, check: Check, place: Place) -> None:
        if len(self._examples[check]) < self._most:
            self._examples[check].append(place)

    def _keep(self, place: Place, record: Mapping[str, Any], said: Said) -> None:
        """Note what is needed to compare the rollouts of a task."""
        task = place.key.task_index
        number = task if type(task) is int and abs(task) < 2**62 else hash(str(task))
        if number is not task:
            self._odd_tasks[number] = task
        columns, agent = self._columns, agent_name_of(record)
        columns["agent"].append(self._agents.setdefault(agent, len(self._agents)))
        columns["task"].append(number)
        told = "\0".join([*said.texts, *(f"{name}({arguments})" for name, arguments in said.calls), *said.outputs])
        whole = "\0".join([told, *said.thoughts])
        columns["told"].append(hash(told))
        columns["all"].append(hash(whole))
        columns["file"].append(len(self._paths) - 1)
        columns["line"].append(place.line)
        rollout = place.key.rollout_index
        self._rollout_indices.append(rollout if type(rollout) is int else 0)
        reward = record.get(REWARD_KEY)
        self._rewards.append(reward if is_finite_number(reward) else float("nan"))
        params = record.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
        temperature = params.get("temperature") if isinstance(params, dict) else None
        self._is_hot.append(is_finite_number(temperature) and temperature > 0 and len(whole) >= _SHORTEST_IDENTICAL)

    def findings(self) -> Iterator[Finding]:
        """What every check came to, also those that found nothing; call it when all is read."""
        identical, tasks, contradicted = self._over_tasks()
        constant = self.counts.constant()
        counted = self.counts.counts
        for check in Check:
            if check is Check.IDENTICAL:
                yield Finding(check, len(identical), tasks, identical[: self._most])
            elif check is Check.CONSTANT:
                yield Finding(check, len(constant), max(len(self._agents), len(constant)))
            elif check is Check.DISAGREEMENT:
                examples = [*self._examples[check], *contradicted][: self._most]
                yield Finding(check, counted[check] + len(contradicted), self.counts.rollouts, examples)
            else:
                yield Finding(check, counted[check], self.counts.rollouts, self._examples[check])

    def _over_tasks(self) -> tuple[list[Place], int, list[Place]]:
        """(a rollout of each task whose rollouts are all the same, tasks, rollouts whose equal has another reward)"""
        agent, task, whole, told, _, _ = (_column(column) for column in self._columns.values())
        if not len(task):
            return [], 0, []
        reward, is_hot = np.frombuffer(self._rewards), np.frombuffer(self._is_hot, np.uint8)
        order = np.lexsort((told, task, agent))
        is_new = np.append(True, (np.diff(task[order]) != 0) | (np.diff(agent[order]) != 0))
        starts = np.flatnonzero(is_new)
        sizes = np.diff(np.append(starts, len(order)))
        is_same = (np.maximum.reduceat(whole[order], starts) == np.minimum.reduceat(whole[order], starts)) & (sizes > 1)
        is_same &= np.minimum.reduceat(is_hot[order], starts) > 0
        differs = ~is_new[1:] & (np.diff(told[order]) == 0) & (np.abs(np.diff(reward[order])) > 0)
        identical = [self._place(int(order[place])) for place in starts[is_same]]
        return identical, len(starts), [self._place(int(order[place + 1])) for place in np.flatnonzero(differs)]

    def _place(self, number: int) -> Place:
        columns = self._columns
        task = self._odd_tasks.get(columns["task"][number], columns["task"][number])
        key = RolloutKey(task, self._rollout_indices[number])
        return Place(self._paths[columns["file"][number]], columns["line"][number], key)


def _column(values: "array[int]") -> Any:
    return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)
