"""The company as it is when a task begins: who works there, their mail, meetings, visitors, tasks and customers.

It is made up by a program, the same on every machine, or read from six CSV files of the user.
"""

import csv
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path

from nemo_gym import resolve_for_reading
from nemo_gym.config_types import ConfigError

Row = Mapping[str, str]
Tables = dict[str, tuple[Row, ...]]

NOW = datetime(2023, 11, 30)
"""The day on which every task is set."""
COLUMNS = {
    "email_addresses": ("email_address",),
    "emails": ("email_id", "inbox/outbox", "sender/recipient", "subject", "sent_datetime", "body"),
    "calendar_events": ("event_id", "event_name", "participant_email", "event_start", "duration"),
    "analytics_data": (
        "date_of_visit", "visitor_id", "page_views", "session_duration_seconds", "traffic_source", "user_engaged",
    ),
    "project_tasks": ("task_id", "task_name", "assigned_to_email", "list_name", "due_date", "board"),
    "customer_relationship_manager_data": (
        "customer_id", "assigned_to_email", "customer_name", "customer_email", "customer_phone", "last_contact_date",
        "product_interest", "status", "notes", "follow_up_by",
    ),
}  # fmt: skip
"""Every table and its columns; in a folder of the user, one file `<table>.csv` each."""
IDS = {
    "emails": "email_id",
    "calendar_events": "event_id",
    "project_tasks": "task_id",
    "customer_relationship_manager_data": "customer_id",
}
"""The tables whose rows have ids, and the column of these."""
LISTS = ("Backlog", "In Progress", "In Review", "Completed")
BOARDS = ("Back end", "Front end", "Design")
SOURCES = ("direct", "referral", "search engine", "social media")
PRODUCTS = ("Consulting", "Hardware", "Services", "Software", "Training")
STATUSES = ("Lead", "Qualified", "Proposal", "Won", "Lost")
_PEOPLE = (
    "aisha", "bruno", "carla", "dmitri", "elena", "farid", "greta", "hiro", "ines", "jonas", "kavya", "luca", "maren",
    "nadia", "oskar", "priya",
)  # fmt: skip
_FAMILIES = ("Abara", "Bianchi", "Castillo", "Dietrich", "Eriksen", "Fontaine", "Grant", "Hughes", "Ivanov", "Jansen")
_FIRST = ("Alex", "Billie", "Casey", "Drew", "Emery", "Finley", "Harper", "Jordan", "Kim", "Morgan", "Quinn", "Riley")
_TOPICS = (
    "Budget",
    "Hiring",
    "Launch",
    "Newsletter",
    "Onboarding",
    "Release",
    "Roadmap",
    "Security",
    "Survey",
    "Travel",
)
_KINDS = ("planning", "review", "update", "follow-up", "workshop", "questions")
_WORK = ("Fix login page", "Speed up search", "Redesign menu", "Add dark mode", "Migrate database", "Write user guide")


def made_up(seed: int = 0) -> Tables:
    """A company; the same for the same seed."""
    chance = random.Random(seed)
    emails = [f"{name}.{chance.choice(_FAMILIES).lower()}@harbour.example" for name in _PEOPLE]
    return {
        "email_addresses": tuple({"email_address": email} for email in emails),
        "emails": tuple(_emails(chance, emails)),
        "calendar_events": tuple(_events(chance, emails)),
        "analytics_data": tuple(_visits(chance)),
        "project_tasks": tuple(_tasks(chance, emails)),
        "customer_relationship_manager_data": tuple(_customers(chance, emails)),
    }


def load(folder: str) -> Tables:
    """The company in a folder of CSV files.

    Raises:
        ConfigError: the folder or one of its files is not there, lacks a column, or has an id twice.
    """
    root = resolve_for_reading(folder, Path.is_dir)
    missing = [f"{table}.csv" for table in COLUMNS if not (root / f"{table}.csv").is_file()]
    if missing:
        raise ConfigError(
            f"world: {folder!r} must be a folder with {', '.join(f'{table}.csv' for table in COLUMNS)}, but "
            f"{', '.join(missing)} cannot be found in {root}. Name the checkout that has the folder in "
            "NEMO_GYM_EXTRA_ROOTS, or leave `world` out for the company that is made up here"
        )
    tables = {table: tuple(_rows(root / f"{table}.csv", columns)) for table, columns in COLUMNS.items()}
    for table, key in IDS.items():
        number, times = Counter(row[key] for row in tables[table]).most_common(1)[0] if tables[table] else ("", 1)
        if times > 1:
            raise ConfigError(f"world: {root / f'{table}.csv'} has {times} rows with the {key} {number!r}; leave one")
    return tables


def _rows(file: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    with file.open(encoding="utf-8", newline="") as opened:
        reader = csv.DictReader(opened)
        if lacking := [column for column in columns if column not in (reader.fieldnames or ())]:
            raise ConfigError(f"world: {file} has no column {', '.join(lacking)}; it must have {', '.join(columns)}")
        for row in reader:
            yield {column: row[column] or "" for column in columns}


def _emails(chance: random.Random, people: list[str]) -> Iterator[Row]:
    for number in range(140):
        topic, person = chance.choice(_TOPICS), chance.choice(people)
        sent = NOW - timedelta(minutes=chance.randrange(60, 60 * 24 * 40))
        name = person.partition(".")[0].title()
        yield {
            "email_id": f"{number:08d}",
            "inbox/outbox": chance.choice(("inbox", "inbox", "outbox")),
            "sender/recipient": person,
            "subject": f"{topic} {chance.choice(_KINDS)}",
            "sent_datetime": f"{sent:%Y-%m-%d %H:%M:%S}",
            "body": f"Hello, a word about the {topic.lower()}: {chance.choice(_WORK).lower()} comes first. {name}",
        }


def _events(chance: random.Random, people: list[str]) -> Iterator[Row]:
    for number in range(90):
        start = NOW + timedelta(days=chance.randrange(-20, 25), hours=chance.randrange(9, 17))
        yield {
            "event_id": f"{number:08d}",
            "event_name": f"{chance.choice(_TOPICS)} {chance.choice(_KINDS)}",
            "participant_email": chance.choice(people),
            "event_start": f"{start:%Y-%m-%d %H:%M:%S}",
            "duration": chance.choice(("30", "60", "90")),
        }


def _visits(chance: random.Random) -> Iterator[Row]:
    for number in range(200):
        yield {
            "date_of_visit": f"{NOW - timedelta(days=chance.randrange(1, 60)):%Y-%m-%d}",
            "visitor_id": f"{number // 2:04d}",
            "page_views": str(chance.randrange(1, 20)),
            "session_duration_seconds": str(chance.randrange(5, 900)),
            "traffic_source": chance.choice(SOURCES),
            "user_engaged": str(chance.random() < 0.4),
        }


def _tasks(chance: random.Random, people: list[str]) -> Iterator[Row]:
    for number in range(80):
        yield {
            "task_id": f"{number:08d}",
            "task_name": f"{chance.choice(_WORK)} ({chance.choice(_TOPICS).lower()})",
            "assigned_to_email": chance.choice(people),
            "list_name": chance.choice(LISTS),
            "due_date": f"{NOW + timedelta(days=chance.randrange(-10, 30)):%Y-%m-%d}",
            "board": chance.choice(BOARDS),
        }


def _customers(chance: random.Random, people: list[str]) -> Iterator[Row]:
    for number in range(80):
        first, family = chance.choice(_FIRST), chance.choice(_FAMILIES)
        yield {
            "customer_id": f"{number:08d}",
            "assigned_to_email": chance.choice(people),
            "customer_name": f"{first} {family}",
            "customer_email": f"{first.lower()}.{family.lower()}{number}@client.example",
            "customer_phone": f"555-{chance.randrange(10_000):04d}",
            "last_contact_date": f"{NOW - timedelta(days=chance.randrange(1, 90)):%Y-%m-%d}",
            "product_interest": chance.choice(PRODUCTS),
            "status": chance.choice(STATUSES),
            "notes": "",
            "follow_up_by": f"{NOW + timedelta(days=chance.randrange(-5, 40)):%Y-%m-%d}",
        }
