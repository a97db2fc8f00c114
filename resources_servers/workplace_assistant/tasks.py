"""Tasks for the assistant, made up from the company that is made up: any number of them, each with its solution."""

import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from resources_servers.workplace_assistant.company import after, schemas
from resources_servers.workplace_assistant.world import BOARDS, LISTS, NOW, PRODUCTS, STATUSES, Row, Tables, made_up

_SYSTEM = (
    f"You assist in a company. Today is {NOW:%A}, {NOW:%Y-%m-%d}. Do what the user asks with your tools, without "
    "asking back. Look up what you need to know; change nothing else."
)
_TRIES = 200


class Task(NamedTuple):
    """What the user says, and calls that do it."""

    category: str
    text: str
    calls: list[tuple[str, dict[str, str]]]


def generate_rows(size: int, seed: int, world_seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of a data set, all different; the same for the same arguments."""
    chance, world = random.Random(seed), made_up(world_seed)
    tools, seen = schemas(), set[str]()
    for number in range(size):
        kinds = [*_MAKERS[number % len(_MAKERS) :], *_MAKERS]
        task = next((task for maker in kinds if (task := _new_task(maker, chance, world, seen)) is not None), None)
        if task is None:
            raise ValueError(f"there are not {size} different tasks; ask for at most {number}")
        seen.add(task.text)
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task.text}]
        truth = [{"name": name, "arguments": arguments} for name, arguments in task.calls]
        assert bool(after(world, task.calls)) == bool(truth), task
        yield {
            "responses_create_params": {"input": messages, "tools": tools, "parallel_tool_calls": False},
            "ground_truth": truth,
            "category": task.category,
        }


def _new_task(maker: "Maker", chance: random.Random, world: Tables, seen: set[str]) -> Task | None:
    """A task of one kind that there was not yet; None if there seems to be none left."""
    tried = (maker(chance, world) for _ in range(_TRIES))
    return next((task for task in tried if task is not None and task.text not in seen), None)


def _reply(chance: random.Random, world: Tables) -> Task | None:
    person = _person(chance, world)
    mails = [row for row in world["emails"] if row["sender/recipient"] == person and row["inbox/outbox"] == "inbox"]
    if not mails:
        return None
    newest = max(mails, key=lambda row: row["sent_datetime"])
    answer = chance.choice(("Thanks, I will look at it today.", "Can we talk about it tomorrow?", "Agreed."))
    calls = [("email_reply_email", {"email_id": newest["email_id"], "body": answer})]
    return Task("email", f"Answer the newest email that {_name(person)} has sent me with '{answer}'", calls)


def _meeting(chance: random.Random, world: Tables) -> Task:
    person, day = _person(chance, world), NOW + timedelta(days=chance.randrange(1, 20))
    start, minutes = f"{day:%Y-%m-%d} {chance.randrange(9, 17):02d}:00:00", chance.choice(("30", "60"))
    name = f"{chance.choice(('Budget', 'Roadmap', 'Release'))} talk"
    values = {"event_name": name, "participant_email": person, "event_start": start, "duration": minutes}
    said = f"Make an event '{name}' of {minutes} minutes with {_name(person)} on {start[:10]} at {start[11:16]}."
    return Task("calendar", said, [("calendar_create_event", values)])


def _cancel(chance: random.Random, world: Tables) -> Task | None:
    person = _person(chance, world)
    day = f"{NOW + timedelta(days=chance.randrange(1, 20)):%Y-%m-%d}"
    events = [row for row in world["calendar_events"] if row["participant_email"] == person]
    mine = [row for row in events if row["event_start"] >= day]
    if not 1 <= len(mine) <= 5:
        return None
    calls = [("calendar_delete_event", {"event_id": row["event_id"]}) for row in mine]
    return Task("calendar", f"Cancel everything that I have with {_name(person)} from {day} on.", calls)


def _move_tasks(chance: random.Random, world: Tables) -> Task | None:
    person, board, (before, then) = _person(chance, world), chance.choice(BOARDS), chance.sample(LISTS, 2)
    rows = [row for row in world["project_tasks"] if row["assigned_to_email"] == person and row["board"] == board]
    mine = [row for row in rows if row["list_name"] == before]
    if not mine:
        return None
    change = {"field": "list_name", "new_value": then}
    calls = [("project_management_update_task", {"task_id": row["task_id"], **change}) for row in mine]
    said = f"Move every task of {_name(person)} on the {board} board from '{before}' to '{then}'."
    return Task("project_management", said, calls)


def _hand_over(chance: random.Random, world: Tables) -> Task | None:
    person, other = chance.sample([row["email_address"] for row in world["email_addresses"]], 2)
    status, product = chance.choice(STATUSES), chance.choice(PRODUCTS)

    def is_meant(row: Row) -> bool:
        return (row["assigned_to_email"], row["status"], row["product_interest"]) == (person, status, product)

    mine = [row for row in world["customer_relationship_manager_data"] if is_meant(row)]
    if not mine:
        return None
    change = {"field": "assigned_to_email", "new_value": other}
    tool = "customer_relationship_manager_update_customer"
    calls = [(tool, {"customer_id": row["customer_id"], **change}) for row in mine]
    who = f"{_name(person)}'s customers with the status '{status}' who are interested in {product.lower()}"
    return Task("customer_relationship_manager", f"Give {who} to {_name(other)}.", calls)


def _plot_or_mail(chance: random.Random, world: Tables) -> Task:
    person, limit = _person(chance, world), chance.randrange(1, 7)
    first = NOW - timedelta(days=chance.randrange(10, 50))
    start, end = f"{first:%Y-%m-%d}", f"{first + timedelta(days=7):%Y-%m-%d}"
    visits = sum(row["date_of_visit"] == start for row in world["analytics_data"])
    period = {"time_min": start, "time_max": end}
    plot = ("analytics_create_plot", {**period, "value_to_plot": "total_visits", "plot_type": "bar"})
    text = {"subject": "Visits", "body": "There were not many."}
    mail = ("email_send_email", {"recipient": person, **text})
    said = (
        f"If the website had more than {limit} visits on {start}, make a bar plot of the total visits from {start} to "
        f"{end}; else send {_name(person)} an email with the subject 'Visits' and the text 'There were not many.'"
    )
    return Task("analytics", said, [plot if visits > limit else mail])


Maker = Callable[[random.Random, Tables], Task | None]
_MAKERS: tuple[Maker, ...] = (
    _reply,
    _meeting,
    _move_tasks,
    _hand_over,
    _plot_or_mail,
    _cancel,
)


def _person(chance: random.Random, world: Tables) -> str:
    return chance.choice(world["email_addresses"])["email_address"]


def _name(email: str) -> str:
    return email.partition(".")[0].title()
