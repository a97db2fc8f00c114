"""What rollouts take, use and cost: what a record says of it, prices of models, and what commands can be told about it.

Tokens are those that a model reported for the response of a rollout. Failed attempts count with what they had of a
response. Prices are the user's: there is no table of them here. This module is imported for every help page, so it
stays light.

Percentiles are the middle rollout and the one that 95 of 100 do not exceed. Numbers are counted by their first three
digits, so that any number of rollouts fits into little memory, and shards come to what the whole run comes to.
"""

import logging
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nemo_gym.errors import did_you_mean
from nemo_gym.http.run_answers import CallUsage
from nemo_gym.keys import PARTIAL_RESPONSE_KEY_NAME, RESPONSE_KEY_NAME, TIMING_KEY_NAME, USAGE_KEY_NAME
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig
from nemo_gym.schemas.path_text import PathText
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

PER_MILLION = 1_000_000
TOTAL_TOKENS, OUTPUT_TOKENS, COST_USD = "max_total_tokens", "max_output_tokens_total", "max_cost_usd"
BUDGETS = {TOTAL_TOKENS: "tokens", OUTPUT_TOKENS: "output tokens", COST_USD: "US dollars"}
"""The options that limit a whole run, and what they count."""
_TOKENS_OF = {TOTAL_TOKENS: "total_tokens", OUTPUT_TOKENS: "output_tokens"}
_OF_SERVERS = frozenset({"resources_servers", "responses_api_agents", "responses_api_models"})
_SNAPSHOT = re.compile(r"[-@](?:\d{4}-\d{2}-\d{2}|\d{8})$")
"""The date that endpoints add to the name of a model when they answer."""
_MOST_MODELS = 50
DURATION = "duration_s"
COUNTED_BEFORE = "counted_before"
"""Key of `_ng_usage`: the line of a failed attempt has the same tokens."""
TOKEN_COUNTS = ("input_tokens", "output_tokens", "total_tokens")
_BEYOND_REASON = 1e15
_SHARES = {"p50": 0.5, "p95": 0.95}
_COUNTED_AT_ONCE = 4_096
"""Rollouts whose numbers are kept as they came: counting many at a time is several times as fast."""


class Price(BaseModel):
    """What a million tokens of one model cost, in US dollars."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    input: float = Field(ge=0, allow_inf_nan=False)
    output: float = Field(ge=0, allow_inf_nan=False)
    cached_input: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of input that the endpoint had in its cache; the price of input when unset."""


class PriceOptions(BaseNeMoGymCLIConfig):
    """Arguments of the commands that can tell what rollouts cost."""

    prices: dict[str, Price] | None = None
    """What a million tokens cost in US dollars, by the name of the model, such as {my-model: {input: 2.5, cached_input:
    0.25, output: 10}}. Best kept in env.yaml. Without prices only tokens are told."""

    @field_validator("prices", mode="before")
    @classmethod
    def _a_server_may_have_that_name(cls, given: Any) -> Any:
        return None if isinstance(given, Mapping) and _OF_SERVERS & set(map(str, given)) else given


class SpendingOptions(PriceOptions):
    """Arguments about what a run may take, and what it will."""

    plan: bool = False
    """Only say what would be done, and what it would take: rows, rollouts, files, the first request, caps and an
    estimate. Everything is read and checked; nothing is written, no model is called, and servers need not run."""
    estimate_from: PathText | None = Field(default=None, min_length=1)
    """The rollouts of an earlier run of these rows, or of some of them, from which to estimate what this one will
    take."""
    pilot: int | None = Field(default=None, ge=2)
    """Collect the rollouts of so many tasks first, spread over the input, then say what the whole run will take and, on
    a terminal, ask whether to go on. They are part of the run."""
    yes: bool = False
    """Go on after the pilot without asking."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Start no more rollouts when the next would take the run above so many tokens, input and output together. Counted
    over resumes, failed attempts included; +executor=ray counts all shards together."""
    max_output_tokens_total: int | None = Field(default=None, ge=1)
    """The same for output tokens."""
    max_cost_usd: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The same in US dollars; needs prices."""

    @model_validator(mode="after")
    def _costs_need_prices(self) -> "SpendingOptions":
        if self.max_cost_usd is not None and not self.prices:
            raise ValueError(
                f"max_cost_usd={self.max_cost_usd:g} needs prices: say what the model costs, such as "
                "'+prices={my-model: {input: 2.5, output: 10}}', or put that into env.yaml; or limit tokens with "
                f"+{TOTAL_TOKENS}"
            )
        return self

    @property
    def budgets(self) -> dict[str, float]:
        """The limits of the whole run that are set, by option."""
        given = {name: getattr(self, name) for name in BUDGETS}
        return {name: limit for name, limit in given.items() if limit is not None}

    @property
    def is_metered(self) -> bool:
        """Whether it matters what rollouts on disk have used."""
        return bool(self.prices or self.budgets or self.pilot)


class Used(NamedTuple):
    """What one record says it took."""

    input: int
    """Tokens, those out of the cache included."""
    cached: int
    output: int
    total: int
    model: str | None

    @property
    def fresh(self) -> int:
        """Input tokens that were not in the cache."""
        return max(0, self.input - self.cached)


def used_by(record: Mapping[str, Any]) -> Used | None:
    """What a record, or the sidecar line of a failed attempt, took; None when it does not say.

    What the agent says counts, else what the model servers have told.
    """
    usage, model = usage_of(record)
    if usage is None:
        return None
    given, output, total = (usage.get(name) for name in TOKEN_COUNTS)
    given, output = given if type(given) is int else 0, output if type(output) is int else 0
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if type(details) is dict else 0
    return Used(
        given,
        cached if type(cached) is int else 0,
        output,
        total if type(total) is int else given + output,
        model if type(model) is str else None,
    )


def spent_by(record: Mapping[str, Any]) -> Used | None:
    """Return what the attempt behind a record took: nothing, if it only scored the response of an earlier attempt."""
    used, told = used_by(record), record.get(USAGE_KEY_NAME)
    is_counted = used is not None and type(told) is dict and told.get(COUNTED_BEFORE) is True
    return Used(0, 0, 0, 0, used.model) if used is not None and is_counted else used


def usage_of(record: Mapping[str, Any]) -> tuple[dict[str, Any] | None, Any]:
    """Return the `usage` of a record, None if it has none with a number of tokens, and the model's name."""
    response = record.get(RESPONSE_KEY_NAME)
    if type(response) is not dict:
        response = record.get(PARTIAL_RESPONSE_KEY_NAME)
    if type(response) is dict and _tells_tokens(response.get("usage")):
        return response["usage"], response.get("model")
    counted = record.get(USAGE_KEY_NAME)
    return (counted, counted.get("model")) if _tells_tokens(counted) else (None, None)


def _tells_tokens(usage: Any) -> TypeGuard[dict[str, Any]]:
    return type(usage) is dict and any(type(usage.get(name)) is int for name in TOKEN_COUNTS)


def add_usage(record: dict[str, Any], used: CallUsage | None) -> None:
    """Put into a record what model servers say that its rollout used, if its agent does not say it."""
    record.pop(USAGE_KEY_NAME, None)  # the row was a rollout of an earlier run
    if used is not None and usage_of(record)[0] is None:
        record[USAGE_KEY_NAME] = used.as_record()


def duration_s(record: Mapping[str, Any]) -> float | None:
    """How long one rollout took; None when its record does not say."""
    timing = record.get(TIMING_KEY_NAME)
    value = timing.get(DURATION) if isinstance(timing, dict) else None
    return float(value) if isinstance(value, int | float) and 0 <= value < _BEYOND_REASON else None


@dataclass(slots=True)
class Tally:
    """Tokens added up."""

    input: int = 0
    cached: int = 0
    output: int = 0


class Percentiles:
    """Takes the records of finished rollouts one by one."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[float]] = {}
        self._waiting: list[tuple[float | None, ...]] = []
        """What is not counted yet: the quantities of one rollout each, as far as they are numbers."""
        self.rollouts = 0
        self.by_model: dict[tuple[str | None, bool], Tally] = {}
        """What models used, as far as it is told, and whether for attempts that failed."""

    def add_failed(self, record: Mapping[str, Any]) -> None:
        """Count what a failed attempt used; it has no part in percentiles."""
        self._add_up(spent_by(record), is_failed=True)

    def _add_up(self, used: Used | None, *, is_failed: bool) -> None:
        if used is None:
            return
        tally = self.by_model.get((used.model, is_failed))
        if tally is None:
            tally = self.by_model[used.model, is_failed] = Tally()
        tally.input += used.input
        tally.cached += used.cached
        tally.output += used.output

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one rollout; what its record does not say is left out."""
        self._add_up(spent_by(record), is_failed=False)
        self.add_times(record)

    def add_times(self, record: Mapping[str, Any]) -> None:
        """The same without what models used."""
        self.rollouts += 1
        timing, (usage, _) = record.get(TIMING_KEY_NAME), usage_of(record)
        given = output = total = took_s = None
        if usage is not None:
            given, output, total = usage.get("input_tokens"), usage.get("output_tokens"), usage.get("total_tokens")
        if type(timing) is dict:
            took_s = timing.get(DURATION)
        self._waiting.append(
            (
                took_s if isinstance(took_s, float | int) else None,
                given if isinstance(given, int) else None,
                output if isinstance(output, int) else None,
                total if isinstance(total, int) else None,
            )
        )
        if len(self._waiting) == _COUNTED_AT_ONCE:
            self._count_waiting()

    def _count_waiting(self) -> None:
        for name, values in zip((DURATION, *TOKEN_COUNTS), zip(*self._waiting, strict=True), strict=False):
            for value, times in Counter(values).items():
                if value is not None and 0 <= value < _BEYOND_REASON:
                    self._counts.setdefault(name, Counter())[_rounded(value)] += times
        self._waiting.clear()

    def as_json(self) -> dict[str, dict[str, float]]:
        """`p50` and `p95` of each quantity, to three significant digits; empty when nothing is known."""
        self._count_waiting()
        return {
            name: {label: _at(self._counts[name], share, whole=name != DURATION) for label, share in _SHARES.items()}
            for name in (DURATION, *TOKEN_COUNTS)
            if name in self._counts
        }


@lru_cache(4096)
def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _at(counts: Counter[float], share: float, *, whole: bool) -> float:
    """The smallest value that is not exceeded by that share of all."""
    rank, seen = math.ceil(share * counts.total()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= rank:
            break
    return int(value) if whole else value


class Prices:
    """What tokens cost, by the names that models go by in records.

    A record shows the name that the endpoint gave; where that is priced, with or without a date behind it, that price
    counts. Otherwise it is the price of the model that the config asks for, if it asks for one only.
    """

    def __init__(self, by_model: Mapping[str, Price], configured: Sequence[str] = ()) -> None:
        self._by_model = by_model
        self._asked_for = configured[0] if len(configured) == 1 else None
        self._known: dict[str | None, Price | None] = {}

    @property
    def for_this_run(self) -> "Prices":
        """The same for rollouts that another model made: they cost what they would with the one that is asked for."""
        price = None if self._asked_for is None else self._by_model.get(self._asked_for)
        return self if price is None else _OnePrice(price)

    def of(self, model: str | None) -> Price | None:
        """The price of a model; None when there is none."""
        if model not in self._known:
            names = () if model is None else (model, _SNAPSHOT.sub("", model))
            named = [*names, *([] if self._asked_for is None else [self._asked_for])]
            found = next((self._by_model[name] for name in named if name in self._by_model), None)
            if len(self._known) >= _MOST_MODELS:  # names that anybody may have written
                return found
            self._known[model] = found
        return self._known[model]

    def cost_usd(self, used: Used) -> float | None:
        """What it cost; None when the model has no price."""
        price = self.of(used.model)
        if price is None:
            return None
        cached = price.input if price.cached_input is None else price.cached_input
        return (used.fresh * price.input + used.cached * cached + used.output * price.output) / PER_MILLION

    def of_rollouts(self, taken: Percentiles) -> dict[str, Any]:
        """The `cost` of an agent in the metrics file: of all attempts, of those that failed, and of one rollout."""
        cost = {False: 0.0, True: 0.0}
        unpriced = set()
        for (model, is_failed), tally in taken.by_model.items():
            amount = self.cost_usd(Used(tally.input, tally.cached, tally.output, 0, model))
            if amount is None:
                unpriced.add(str(model))
            else:
                cost[is_failed] += amount
        return {
            "usd": cost[False] + cost[True],
            "usd_per_rollout": cost[False] / taken.rollouts if taken.rollouts else None,
            "failed_attempts_usd": cost[True],
            **({"unpriced_models": sorted(unpriced)} if unpriced else {}),
        }

    def no_price(self, model: str | None) -> str:
        """The line about a model that has no price."""
        if model is None:
            return "rollouts do not say which model answered, and the config asks for several, so their cost is unknown"
        return (
            f"there is no price for the model {shown(model)!r}, which rollouts show"
            f"{did_you_mean(model, self._by_model).removesuffix('?')}, so their cost is unknown: add it, as in "
            f"prices: {{{shown(model)}: {{input: 2.5, output: 10}}}}"
        )


class _OnePrice(Prices):
    """The price of one model for all."""

    def __init__(self, price: Price) -> None:
        super().__init__({})
        self._price = price

    def of(self, model: str | None) -> Price | None:
        return self._price


def prices_of(given: Mapping[str, Any] | None, configured: Sequence[str] = ()) -> Prices | None:
    """Prices out of options, or out of a manifest that holds them as plain data; None when there are none."""
    if not given:
        return None
    try:
        by_model = {str(model): Price.model_validate(price) for model, price in given.items()}
    except ValueError:  # a manifest that somebody has edited
        return None
    return Prices(by_model, configured)


@dataclass
class Samples:
    """What each attempt took, by task: what estimates are made of."""

    place_of: dict[Any, int] = field(default_factory=dict)
    """Where a task is; tasks are known by whatever key they come with."""
    agents: list[str] = field(default_factory=list)
    """The agent of each task."""
    tasks: "array[int]" = field(default_factory=lambda: array("q"))
    """For each attempt the place of its task."""
    finished: "array[int]" = field(default_factory=lambda: array("b"))
    """Whether it was a success: a failed attempt is part of what its task takes, and no rollout."""
    columns: dict[str, "array[float]"] = field(
        default_factory=lambda: {name: array("d") for name in ("input", "cached", "output", "total", "cost", "took_s")}
    )

    def add(
        self, task: Any, agent: str, record: Mapping[str, Any], used: Used | None, cost: float | None, *, success: bool
    ) -> None:
        """Take one attempt."""
        place = self.place_of.setdefault(task, len(self.place_of))
        if place == len(self.agents):
            self.agents.append(agent)
        timing = record.get(TIMING_KEY_NAME)
        took_s = timing.get("duration_s") if type(timing) is dict else None
        self.tasks.append(place)
        self.finished.append(success)
        values = (0, 0, 0, 0) if used is None else used[:4]
        seconds = took_s if isinstance(took_s, int | float) else 0.0
        for column, value in zip(self.columns.values(), (*values, cost or 0.0, seconds), strict=True):
            column.append(value)


class Meter:
    """Counts what attempts have used, whether they succeeded or not."""

    def __init__(
        self, prices: Prices | None = None, samples: Samples | None = None, *, names_unpriced: bool = True
    ) -> None:
        """`names_unpriced` says once of each model without a price that there is none."""
        self._names_unpriced = names_unpriced
        self.prices = prices
        self.samples = samples
        self.attempts = 0
        self.untold = 0
        """Attempts that did not say what they took."""
        self.unknown = 0
        """Those among them that succeeded: they called a model, and nobody knows what that took."""
        self.tokens: Counter[str] = Counter()
        self.cost_usd = 0.0
        self.unpriced: set[str | None] = set()
        """Models without a price."""

    @property
    def cost_or_none(self) -> float | None:
        """The cost so far; None where nobody has said what tokens cost, or how many were used."""
        return None if self.prices is None or (self.unknown and not self.tokens) else self.cost_usd

    def add(self, record: Mapping[str, Any], task: Any = None, agent: str = "", *, success: bool = True) -> Used | None:
        """Count one record; what it says it took."""
        self.attempts += 1
        used, cost = spent_by(record), None
        if used is None:
            self.untold += 1
            self.unknown += success
        else:
            tokens = self.tokens
            tokens["input_tokens"] += used.input
            tokens["output_tokens"] += used.output
            tokens["total_tokens"] += used.total
            if used.cached:
                tokens["cached_input_tokens"] += used.cached
            if self.prices is not None:
                cost = self.prices.cost_usd(used)
                if cost is None:
                    self._note_unpriced(used.model)
                else:
                    self.cost_usd += cost
        if self.samples is not None:
            self.samples.add(task, agent, record, used, cost, success=success)
        return used

    def _note_unpriced(self, model: str | None) -> None:
        assert self.prices is not None
        if model not in self.unpriced and len(self.unpriced) < _MOST_MODELS:
            self.unpriced.add(model)
            if self._names_unpriced:
                logger.warning("%s", self.prices.no_price(model))

    def amount(self, budget: str) -> float:
        """How much of a budget is used up."""
        return self.cost_usd if budget == COST_USD else self.tokens[_TOKENS_OF[budget]]

    def amounts(self, budgets: Iterable[str]) -> dict[str, float]:
        """The same for several."""
        return {name: self.amount(name) for name in budgets}


def meter_for(options: SpendingOptions, models: Sequence[str] = (), samples: Samples | None = None) -> Meter:
    """A meter that knows the prices of a run, and keeps samples if an estimate is to be made of them."""
    return Meter(prices_of(options.prices, models), samples)


def money(usd: float) -> str:
    """An amount of US dollars, to the cent or, where that says nothing, to three digits."""
    return f"${usd:,.2f}" if usd >= 1 or not usd else f"${usd:.3g}"


def amount_text(budget: str, amount: float) -> str:
    """How much of a budget, in words."""
    return money(amount) if budget == COST_USD else f"{amount:,.0f} {BUDGETS[budget]}"
