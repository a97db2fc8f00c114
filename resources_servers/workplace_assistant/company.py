"""What an assistant can do in the company: 27 tools over six tables, and how two outcomes are compared."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from resources_servers.workplace_assistant.world import (
    BOARDS,
    IDS,
    LISTS,
    NOW,
    PRODUCTS,
    SOURCES,
    STATUSES,
    Row,
    Tables,
)

FOUND_AT_MOST = 5
_PLOTS = "plots"
_MOST_WORDS = 50
_LONGEST_SUBJECT = 1000
_VALUES = ("total_visits", "session_duration_seconds", "user_engaged", *(f"visits_{name}" for name in SOURCES))


class ToolError(Exception):
    """What the assistant asked for cannot be done; it is told why, and can try again."""


class Company:
    """One company, changed by one assistant. Tables are shared with others until one of their rows is looked up."""

    def __init__(self, tables: Tables) -> None:
        self._start = tables
        self._by_id: dict[str, dict[str, Row]] = {}
        self._newest: dict[str, list[tuple[int, str]]] = {}
        """The ids of a table that rows are added to, the highest last; some may be of rows that are gone."""
        self._plots: list[Row] = []

    def call(self, tool: str, arguments: Any) -> Any:
        """Use a tool.

        Raises:
            ToolError: there is no such tool, it does not take these arguments, or they make no sense.
        """
        if tool not in TOOLS:
            raise ToolError(f"There is no tool {tool}.")
        if not isinstance(arguments, Mapping):
            raise ToolError("The arguments must be an object.")
        _, parameters, required = TOOLS[tool]
        given = {name: str(value) for name, value in arguments.items() if value is not None}
        if unknown := sorted(set(given) - set(parameters)):
            raise ToolError(f"{tool} has no argument {', '.join(unknown)}; it takes {', '.join(parameters)}.")
        if missing := [name for name in required if name not in given]:
            raise ToolError(f"{tool} needs {', '.join(missing)}.")
        function: Callable[..., Any] = getattr(self, f"_{tool}")
        return function(**given)

    def outcome(self) -> dict[str, Any]:
        """What the company has become, without regard to case, order, and the ids that new rows happened to get."""
        plain = _Plain()
        found = {}
        for table, rows in self._by_id.items():
            old = {row[IDS[table]] for row in self._start[table]}
            before = Counter(_comparable(row, IDS[table], old, plain) for row in self._start[table])
            after = Counter(_comparable(row, IDS[table], old, plain) for row in rows.values())
            if after != before:
                found[table] = after
        if self._plots:
            found[_PLOTS] = Counter(_comparable(row, "", set(), plain) for row in self._plots)
        return found

    def _company_directory_find_email_address(self, name: str) -> Any:
        emails = [row["email_address"] for row in self._start["email_addresses"]]
        found = [email for email in emails if name.lower() in email.lower()]
        return found or "No email address found."

    def _email_get_email_information_by_id(self, email_id: str, field: str) -> Any:
        return self._field("emails", email_id, field)

    def _email_search_emails(self, query: str = "", date_min: str = "", date_max: str = "") -> Any:
        rows = self._between("emails", "sent_datetime", date_min, _end_of_day(date_max))
        words = set(query.lower().split())
        if len(words) > _MOST_WORDS:
            raise ToolError(f"The query has {len(words)} words; look for {_MOST_WORDS} at most.")
        found = [row for row in rows if _has_all(words, row["subject"], row["body"], row["sender/recipient"])]
        return _shown(sorted(found, key=lambda row: row["sent_datetime"], reverse=True), "emails")

    def _email_send_email(self, recipient: str, subject: str, body: str) -> str:
        if "@" not in recipient:
            raise ToolError("The recipient must be an email address.")
        if len(subject) > _LONGEST_SUBJECT:
            raise ToolError(f"The subject is longer than {_LONGEST_SUBJECT} characters.")
        row = {"inbox/outbox": "outbox", "sender/recipient": recipient.lower(), "subject": subject, "body": body}
        self._add("emails", {**row, "sent_datetime": f"{NOW:%Y-%m-%d %H:%M:%S}"})
        return "Email sent."

    def _email_delete_email(self, email_id: str) -> str:
        return self._delete("emails", email_id)

    def _email_forward_email(self, email_id: str, recipient: str) -> str:
        email = self._row("emails", email_id)
        self._email_send_email(recipient, f"FW: {email['subject']}", email["body"])
        return "Email forwarded."

    def _email_reply_email(self, email_id: str, body: str) -> str:
        email = self._row("emails", email_id)
        self._email_send_email(email["sender/recipient"], email["subject"], body)
        return "Email replied to."

    def _calendar_get_event_information_by_id(self, event_id: str, field: str) -> Any:
        return self._field("calendar_events", event_id, field)

    def _calendar_search_events(self, query: str = "", time_min: str = "", time_max: str = "") -> Any:
        rows = self._between("calendar_events", "event_start", time_min, _end_of_day(time_max))
        fields = ("event_name", "participant_email")
        return _shown([row for row in rows if any(query.lower() in row[field].lower() for field in fields)], "events")

    def _calendar_create_event(self, event_name: str, participant_email: str, event_start: str, duration: str) -> str:
        row = {"event_name": event_name, "participant_email": participant_email.lower(), "event_start": event_start}
        return self._add("calendar_events", {**row, "duration": duration})

    def _calendar_delete_event(self, event_id: str) -> str:
        return self._delete("calendar_events", event_id)

    def _calendar_update_event(self, event_id: str, field: str, new_value: str) -> str:
        return self._update("calendar_events", event_id, field, new_value)

    def _visits(self, time_min: str, time_max: str) -> list[Row]:
        return self._between("analytics_data", "date_of_visit", time_min, time_max)

    def _analytics_get_visitor_information_by_id(self, visitor_id: str) -> Any:
        found = [dict(row) for row in self._start["analytics_data"] if row["visitor_id"] == visitor_id]
        return found or "Visitor not found."

    def _analytics_create_plot(self, time_min: str, time_max: str, value_to_plot: str, plot_type: str) -> str:
        _one_of("value_to_plot", value_to_plot, _VALUES)
        _one_of("plot_type", plot_type, ("bar", "line", "scatter", "histogram"))
        file = f"plots/{time_min}_{time_max}_{value_to_plot}_{plot_type}.png"
        self._plots.append({"file": file})
        return file

    def _analytics_total_visits_count(self, time_min: str = "", time_max: str = "") -> dict[str, int]:
        return _by_day(self._visits(time_min, time_max))

    def _analytics_engaged_users_count(self, time_min: str = "", time_max: str = "") -> dict[str, int]:
        return _by_day(row for row in self._visits(time_min, time_max) if row["user_engaged"].lower() == "true")

    def _analytics_traffic_source_count(
        self, time_min: str = "", time_max: str = "", traffic_source: str = ""
    ) -> dict[str, int]:
        rows = self._visits(time_min, time_max)
        return _by_day(row for row in rows if traffic_source.lower() in ("", row["traffic_source"].lower()))

    def _analytics_get_average_session_duration(self, time_min: str = "", time_max: str = "") -> dict[str, float]:
        rows = self._visits(time_min, time_max)
        days = {row["date_of_visit"]: [0.0, 0] for row in rows}
        for row in rows:
            total = days[row["date_of_visit"]]
            total[0] += float(row["session_duration_seconds"])
            total[1] += 1
        return {day: round(seconds / count, 2) for day, (seconds, count) in sorted(days.items())}

    def _project_management_get_task_information_by_id(self, task_id: str, field: str) -> Any:
        return self._field("project_tasks", task_id, field)

    def _project_management_search_tasks(self, **wanted: str) -> Any:
        return _shown(self._matching("project_tasks", wanted), "tasks", at_most=None)

    def _project_management_create_task(self, **values: str) -> str:
        _one_of("list_name", values["list_name"], LISTS)
        _one_of("board", values["board"], BOARDS)
        self._known_person(values["assigned_to_email"])
        return self._add("project_tasks", values)

    def _project_management_delete_task(self, task_id: str) -> str:
        return self._delete("project_tasks", task_id)

    def _project_management_update_task(self, task_id: str, field: str, new_value: str) -> str:
        allowed = {"list_name": LISTS, "board": BOARDS}
        if field in allowed:
            _one_of(field, new_value, allowed[field])
        if field == "assigned_to_email":
            self._known_person(new_value)
        return self._update("project_tasks", task_id, field, new_value)

    def _customer_relationship_manager_search_customers(self, **wanted: str) -> Any:
        table = "customer_relationship_manager_data"
        rows = self._matching(table, {name: value for name, value in wanted.items() if not name.endswith(_ENDS)})
        for field in ("last_contact_date", "follow_up_by"):
            least, most = wanted.get(f"{field}_min", ""), wanted.get(f"{field}_max", "")
            rows = [row for row in rows if (not least or row[field] >= least) and (not most or row[field] <= most)]
        return _shown(rows, "customers")

    def _customer_relationship_manager_update_customer(self, customer_id: str, field: str, new_value: str) -> str:
        allowed = {"status": STATUSES, "product_interest": PRODUCTS}
        if field in allowed:
            _one_of(field, new_value, allowed[field])
        if field == "assigned_to_email":
            self._known_person(new_value)
        return self._update("customer_relationship_manager_data", customer_id, field, new_value)

    def _customer_relationship_manager_add_customer(self, **values: str) -> str:
        optional = dict.fromkeys(TOOLS["customer_relationship_manager_add_customer"][1], "")
        return self._add("customer_relationship_manager_data", {**optional, **values})

    def _customer_relationship_manager_delete_customer(self, customer_id: str) -> str:
        return self._delete("customer_relationship_manager_data", customer_id)

    def _rows(self, table: str) -> Iterable[Row]:
        return self._by_id[table].values() if table in self._by_id else self._start[table]

    def _own(self, table: str) -> dict[str, Row]:
        """The rows by id, which this company alone has."""
        if table not in self._by_id:
            self._by_id[table] = {row[IDS[table]]: row for row in self._start[table]}
        return self._by_id[table]

    def _row(self, table: str, number: str) -> Row:
        row = self._own(table).get(number)
        if row is None:
            raise ToolError(f"There is no {IDS[table]} {number}.")
        return row

    def _field(self, table: str, number: str, field: str) -> dict[str, str]:
        row = self._row(table, number)
        if field not in row:
            raise ToolError(f"There is no field {field}; there are {', '.join(row)}.")
        return {field: row[field]}

    def _between(self, table: str, field: str, least: str, most: str) -> list[Row]:
        rows = self._rows(table)
        return [row for row in rows if (not least or row[field] >= least) and (not most or row[field] <= most)]

    def _matching(self, table: str, wanted: Mapping[str, str]) -> list[Row]:
        if not wanted:
            raise ToolError("Say what to look for.")
        rows = self._rows(table)
        return [row for row in rows if all(value.lower() in row[name].lower() for name, value in wanted.items())]

    def _add(self, table: str, values: Mapping[str, str]) -> str:
        rows = self._own(table)
        if table not in self._newest:
            self._newest[table] = sorted((int(each), each) for each in rows)
        newest = self._newest[table]
        while newest and newest[-1][1] not in rows:
            newest.pop()
        following = newest[-1][0] + 1 if newest else 0
        number = f"{following:08d}"
        newest.append((following, number))
        rows[number] = {IDS[table]: number, **values}
        return number

    def _delete(self, table: str, number: str) -> str:
        self._row(table, number)
        del self._own(table)[number]
        return "Deleted."

    def _update(self, table: str, number: str, field: str, value: str) -> str:
        old = self._row(table, number)
        if field not in old or field == IDS[table]:
            raise ToolError(f"{field} cannot be changed; change one of {', '.join(list(old)[1:])}.")
        value = value.lower() if field.endswith("_email") else value
        self._own(table)[number] = {**old, field: value}
        return "Updated."

    def _known_person(self, email: str) -> None:
        if email.lower() not in {row["email_address"].lower() for row in self._start["email_addresses"]}:
            raise ToolError(f"Nobody here has the email address {email}; find it in the company directory.")


_ENDS = ("_min", "_max")


def after(tables: Tables, calls: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """What a company has become after these calls; what only looks or cannot be done changes nothing."""
    company = Company(tables)
    for tool, arguments in calls:
        if tool not in CHANGING:
            continue
        try:
            company.call(tool, json.loads(arguments) if isinstance(arguments, str) else arguments)
        except (ToolError, ValueError, RecursionError):
            continue
    return company.outcome()


class _Plain(dict[str, str]):
    """Texts without regard to case, each made once: a thousand mails may have one long text."""

    def __missing__(self, text: str) -> str:
        self[text] = plain = text.strip().lower()
        return plain


def _comparable(row: Row, key: str, old: set[str], plain: _Plain) -> tuple[tuple[str, str], ...]:
    keeps_id = not key or row[key] in old
    return tuple(sorted((name, plain[value]) for name, value in row.items() if keeps_id or name != key))


def _has_all(words: Iterable[str], *texts: str) -> bool:
    text = " ".join(texts).lower()
    return all(word in text for word in words)


def _shown(rows: list[Row], what: str, at_most: int | None = FOUND_AT_MOST) -> Any:
    return [dict(row) for row in rows[:at_most]] or f"No {what} found."


def _by_day(rows: Iterable[Row]) -> dict[str, int]:
    return dict(sorted(Counter(row["date_of_visit"] for row in rows).items()))


def _end_of_day(moment: str) -> str:
    """A date means all of it."""
    return f"{moment} 23:59:59" if len(moment) == len("2023-11-30") else moment


def _one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ToolError(f"{name} must be one of {', '.join(allowed)}, not {value}.")


_DAY, _MOMENT = "as YYYY-MM-DD", "as YYYY-MM-DD HH:MM:SS"
_PERIOD = {"time_min": f"The first day, {_DAY}", "time_max": f"The last day, {_DAY}"}
_TASK = {
    "task_name": "What is to be done",
    "assigned_to_email": "Who does it",
    "list_name": f"One of {', '.join(LISTS)}",
    "due_date": f"When it must be done, {_DAY}",
    "board": f"One of {', '.join(BOARDS)}",
}
_CUSTOMER = {
    "customer_name": "The customer's name",
    "assigned_to_email": "Who looks after the customer",
    "status": f"One of {', '.join(STATUSES)}",
    "customer_email": "The customer's email address",
    "customer_phone": "The customer's telephone number",
    "last_contact_date": f"The last contact, {_DAY}",
    "product_interest": f"One of {', '.join(PRODUCTS)}",
    "notes": "Anything else",
    "follow_up_by": f"When to get in touch again, {_DAY}",
}
_CHANGE = {"field": "The name of the field", "new_value": "Its new value"}
_CRM = "customer_relationship_manager"
_CUSTOMER_SEARCH = {
    name: _CUSTOMER[name]
    for name in ("customer_name", "customer_email", "product_interest", "status", "assigned_to_email")
} | {
    f"{field}{end}": f"{'Not before' if end == '_min' else 'Not after'} this {field}, {_DAY}"
    for field in ("last_contact_date", "follow_up_by")
    for end in _ENDS
}
TOOLS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "company_directory_find_email_address": (
        "Find the email addresses of a colleague.", {"name": "A name or a part of it"}, ("name",),
    ),
    "email_get_email_information_by_id": (
        "Read one field of an email.", {"email_id": "Its id", "field": "The name of the field"}, ("email_id", "field"),
    ),
    "email_search_emails": (
        "Find emails, the newest first, five at most.",
        {"query": "Words they contain", "date_min": f"The first day, {_DAY}", "date_max": f"The last day, {_DAY}"}, (),
    ),
    "email_send_email": (
        "Send an email.", {"recipient": "An email address", "subject": "Its subject", "body": "Its text"},
        ("recipient", "subject", "body"),
    ),
    "email_delete_email": ("Delete an email.", {"email_id": "Its id"}, ("email_id",)),
    "email_forward_email": (
        "Forward an email.", {"email_id": "Its id", "recipient": "An email address"}, ("email_id", "recipient"),
    ),
    "email_reply_email": (
        "Answer an email.", {"email_id": "Its id", "body": "The text of the answer"}, ("email_id", "body"),
    ),
    "calendar_get_event_information_by_id": (
        "Read one field of an event.", {"event_id": "Its id", "field": "The name of the field"}, ("event_id", "field"),
    ),
    "calendar_search_events": (
        "Find events, five at most.",
        {"query": "A part of the name or participant", "time_min": f"From, {_MOMENT}", "time_max": f"Until, {_MOMENT}"},
        (),
    ),
    "calendar_create_event": (
        "Make an event; its id is returned.",
        {
            "event_name": "Its name", "participant_email": "Who takes part",
            "event_start": f"When it begins, {_MOMENT}", "duration": "Minutes",
        },
        ("event_name", "participant_email", "event_start", "duration"),
    ),
    "calendar_delete_event": ("Delete an event.", {"event_id": "Its id"}, ("event_id",)),
    "calendar_update_event": (
        "Change one field of an event.", {"event_id": "Its id", **_CHANGE}, ("event_id", "field", "new_value"),
    ),
    "analytics_get_visitor_information_by_id": (
        "Every visit of one visitor of the website.", {"visitor_id": "The visitor's id"}, ("visitor_id",),
    ),
    "analytics_create_plot": (
        "Plot how visits developed; the file is returned.",
        {
            **_PERIOD, "value_to_plot": f"One of {', '.join(_VALUES)}",
            "plot_type": "One of bar, line, scatter, histogram",
        },
        ("time_min", "time_max", "value_to_plot", "plot_type"),
    ),
    "analytics_total_visits_count": ("Visits on each day.", _PERIOD, ()),
    "analytics_engaged_users_count": ("Engaged visitors on each day.", _PERIOD, ()),
    "analytics_traffic_source_count": (
        "Visits from one source on each day.", {**_PERIOD, "traffic_source": f"One of {', '.join(SOURCES)}"}, (),
    ),
    "analytics_get_average_session_duration": ("Seconds that a visit took on average, for each day.", _PERIOD, ()),
    "project_management_get_task_information_by_id": (
        "Read one field of a task.", {"task_id": "Its id", "field": "The name of the field"}, ("task_id", "field"),
    ),
    "project_management_search_tasks": ("Find tasks by what their fields contain.", _TASK, ()),
    "project_management_create_task": ("Make a task; its id is returned.", _TASK, tuple(_TASK)),
    "project_management_delete_task": ("Delete a task.", {"task_id": "Its id"}, ("task_id",)),
    "project_management_update_task": (
        "Change one field of a task.", {"task_id": "Its id", **_CHANGE}, ("task_id", "field", "new_value"),
    ),
    f"{_CRM}_search_customers": ("Find customers, five at most.", _CUSTOMER_SEARCH, ()),
    f"{_CRM}_update_customer": (
        "Change one field of a customer.", {"customer_id": "The id", **_CHANGE}, ("customer_id", "field", "new_value"),
    ),
    f"{_CRM}_add_customer": (
        "Add a customer; the id is returned.", _CUSTOMER, ("customer_name", "assigned_to_email", "status"),
    ),
    f"{_CRM}_delete_customer": ("Delete a customer.", {"customer_id": "The id"}, ("customer_id",)),
}  # fmt: skip
"""Description, parameters (all of them texts) and which of them are required, by name."""
_VERBS = frozenset({"add", "create", "delete", "forward", "reply", "send", "update"})
CHANGING = frozenset(tool for tool in TOOLS if not _VERBS.isdisjoint(tool.split("_")))
"""The tools that change something; the others only look."""


def schemas() -> list[dict[str, Any]]:
    """The tools as rows offer them to a model."""
    return [
        {
            "type": "function",
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {each: {"type": "string", "description": text} for each, text in parameters.items()},
                "required": list(required),
                "additionalProperties": False,
            },
            "strict": False,
        }
        for name, (description, parameters, required) in TOOLS.items()
    ]
