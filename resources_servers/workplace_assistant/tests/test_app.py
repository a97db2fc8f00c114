"""The assistant's company: tools, sessions, verdicts, tasks that are made up, whole rollouts with scripted models."""

import contextlib
import csv
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi.testclient import TestClient

from nemo_gym.config_types import ConfigError
from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, check_examples, play
from resources_servers.workplace_assistant.app import (
    WorkplaceAssistantResourcesServer,
    WorkplaceAssistantResourcesServerConfig,
)
from resources_servers.workplace_assistant.company import CHANGING, TOOLS, Company, ToolError, after
from resources_servers.workplace_assistant.scripts.create_dataset import main as create_dataset
from resources_servers.workplace_assistant.tasks import generate_rows
from resources_servers.workplace_assistant.world import COLUMNS, load, made_up

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "workplace_assistant.yaml"
RIGHT = FOLDER / "scripts" / "right_answers.yaml"
ROWS = check_examples(FOLDER)
WORLD = made_up()
SOMEBODY, OTHER = (row["email_address"] for row in WORLD["email_addresses"][:2])


def server(**settings: Any) -> WorkplaceAssistantResourcesServer:
    block = {"name": "assistant", "host": "127.0.0.1", "port": 1, "entrypoint": "app.py", **settings}
    config = WorkplaceAssistantResourcesServerConfig(**block)
    return WorkplaceAssistantResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))


def verdict(client: TestClient, calls: list[tuple[str, Any]], truth: list[tuple[str, Any]]) -> dict[str, Any]:
    output = [
        {"type": "function_call", "call_id": f"c{number}", "name": name, "arguments": _text(arguments)}
        for number, (name, arguments) in enumerate(calls)
    ]
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": output}
    wanted = [{"name": name, "arguments": arguments} for name, arguments in truth]
    row = {"responses_create_params": {"input": "go"}, "ground_truth": wanted, "response": response}
    answer = client.post("/verify", json=row)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def test_there_are_27_tools_and_every_one_of_them_does_something() -> None:
    assert len(TOOLS) == 27
    company = Company(WORLD)
    values = {"list_name": "Backlog", "board": "Design", "status": "Lead", "product_interest": "Software"}
    values |= {"value_to_plot": "total_visits", "plot_type": "bar", "visitor_id": "0001", "field": "notes"}
    for name in sorted(TOOLS, key=lambda tool: "delete" in tool):
        _, parameters, required = TOOLS[name]
        field = {"email": "subject", "calendar": "event_name", "project": "due_date"}.get(
            name.partition("_")[0], "notes"
        )
        known = {**values, "field": field, "new_value": "new"}
        arguments = {
            each: known.get(
                each, SOMEBODY if ("email" in each and "id" not in each) or each == "recipient" else "00000001"
            )
            for each in (required or list(parameters)[:1])
        }
        assert company.call(name, arguments) is not None, name
    assert set(company.outcome()) == {
        "emails", "calendar_events", "project_tasks", "customer_relationship_manager_data", "plots",
    }  # fmt: skip


def test_tools_that_only_look_change_nothing() -> None:
    for name in TOOLS.keys() - CHANGING:
        company = Company(WORLD)
        with contextlib.suppress(ToolError):
            company.call(name, dict.fromkeys(TOOLS[name][1], "00000001"))
        assert company.outcome() == {}, name
    assert len(CHANGING) == 14


def test_ids_are_given_as_if_what_was_deleted_had_never_been_there() -> None:
    company = Company(WORLD)
    event = {"event_name": "a", "participant_email": SOMEBODY, "event_start": "2023-12-01 09:00:00", "duration": "30"}
    first = company.call("calendar_create_event", event)
    second = company.call("calendar_create_event", event)
    company.call("calendar_delete_event", {"event_id": second})
    company.call("calendar_delete_event", {"event_id": first})

    assert company.outcome() == {}
    assert company.call("calendar_create_event", event) == first


def test_a_query_of_many_words_is_refused() -> None:
    with pytest.raises(ToolError, match=r"has 1000 words; look for 50 at most"):
        Company(WORLD).call("email_search_emails", {"query": " ".join(map(str, range(1000)))})
    assert Company(WORLD).call("email_search_emails", {"query": "budget " * 1000})


def test_a_subject_that_never_ends_is_refused() -> None:
    with pytest.raises(ToolError, match="longer than 1000 characters"):
        Company(WORLD).call("email_send_email", {"recipient": SOMEBODY, "subject": "s" * 1001, "body": ""})


def test_a_company_with_an_id_twice_is_refused(tmp_path: Path) -> None:
    for table, columns in COLUMNS.items():
        row = dict.fromkeys(columns, "1")
        lines = [",".join(columns), *[",".join(row.values())] * (2 if table == "emails" else 1)]
        (tmp_path / f"{table}.csv").write_text("\n".join(lines))

    with pytest.raises(ConfigError, match=r"emails\.csv has 2 rows with the email_id '1'; leave one"):
        load(str(tmp_path))


def test_what_cannot_be_done_is_said_to_the_model_and_changes_nothing() -> None:
    client = TestClient(server().complete_app())
    for tool, arguments, words in (
        ("email_delete_email", {"email_id": "99"}, "There is no email_id 99"),
        ("email_send_email", {"recipient": "somebody", "subject": "s", "body": "b"}, "must be an email address"),
        ("email_send_email", {"recipient": SOMEBODY}, "needs subject, body"),
        ("email_send_email", {"to": SOMEBODY}, "has no argument to; it takes recipient, subject, body"),
        (
            "project_management_update_task",
            {"task_id": "00000001", "field": "board", "new_value": "x"},
            "must be one of",
        ),
        (
            "project_management_update_task",
            {"task_id": "00000001", "field": "size", "new_value": "x"},
            "cannot be changed",
        ),
        ("calendar_get_event_information_by_id", {"event_id": "00000001", "field": "x"}, "There is no field x"),
        ("project_management_search_tasks", {}, "Say what to look for"),
    ):
        answer = client.post(f"/{tool}", json=arguments)
        assert answer.status_code == 200
        assert words in answer.json()["output"], tool
        assert after(WORLD, [(tool, arguments)]) == {}
    assert client.post("/no_such_tool", json={}).status_code == 404
    assert client.post("/email_delete_email", json=[1]).status_code == 422
    with pytest.raises(ToolError, match="must be an object"):
        Company(WORLD).call("email_delete_email", [1])


def test_every_session_has_a_company_of_its_own() -> None:
    shared = server()
    one, other = TestClient(shared.complete_app()), TestClient(shared.complete_app())
    for client in (one, other):
        assert client.post("/seed_session", json={"responses_create_params": {"input": "x"}}).status_code == 200
    wanted = {"email_id": "00000007", "field": "subject"}
    assert "subject" in one.post("/email_get_email_information_by_id", json=wanted).json()["output"]
    assert one.post("/email_delete_email", json={"email_id": "00000007"}).json() == {"output": "Deleted."}
    assert "Error" in one.post("/email_get_email_information_by_id", json=wanted).json()["output"]
    assert "subject" in other.post("/email_get_email_information_by_id", json=wanted).json()["output"]
    assert one.get("/reverify_mode").json() == "stateless"


def test_the_outcome_counts_and_not_the_way() -> None:
    client = TestClient(server().complete_app())
    first = ("email_send_email", {"recipient": SOMEBODY, "subject": "Hello", "body": "One"})
    second = ("email_send_email", {"recipient": OTHER, "subject": "Hello", "body": "Two"})
    looked = ("email_search_emails", {"query": "budget"})
    shouted = (first[0], {**first[1], "subject": "HELLO"})
    assert verdict(client, [looked, second, shouted], [first, second])["reward"] == 1.0
    assert verdict(client, [first], [first, second])["wrong_tables"] == ["emails"]
    assert verdict(client, [first, first], [first])["reward"] == 0.0
    assert verdict(client, [], [])["reward"] == 1.0
    assert verdict(client, [first], [])["reward"] == 0.0
    assert verdict(client, [("email_send_email", "{not json"), ("nothing", {}), looked], [])["reward"] == 1.0
    change = {"event_id": "00000003", "field": "duration"}
    old = WORLD["calendar_events"][3]["duration"]
    there = ("calendar_update_event", {**change, "new_value": "5"})
    back = ("calendar_update_event", {**change, "new_value": old})
    assert verdict(client, [there, back], [])["reward"] == 1.0
    assert verdict(client, [there], [(there[0], json.dumps(there[1]))])["reward"] == 1.0


def test_searches_find_what_there_is() -> None:
    company = Company(WORLD)
    [email] = company.call("company_directory_find_email_address", {"name": SOMEBODY.partition(".")[0]})
    assert email == SOMEBODY
    found = company.call("email_search_emails", {"query": "budget", "date_max": "2023-11-29"})
    assert 1 <= len(found) <= 5
    assert all("budget" in (row["subject"] + row["body"]).lower() for row in found)
    assert found == sorted(found, key=lambda row: row["sent_datetime"], reverse=True)
    assert company.call("email_search_emails", {"query": "no such words"}) == "No emails found."
    day = {"time_min": "2023-11-02", "time_max": "2023-11-02"}
    total = company.call("analytics_total_visits_count", day)
    sources = [
        company.call("analytics_traffic_source_count", {**day, "traffic_source": source}).get("2023-11-02", 0)
        for source in ("direct", "referral", "search engine", "social media")
    ]
    assert sum(sources) == total["2023-11-02"]
    search = "customer_relationship_manager_search_customers"
    late = company.call(search, {"status": "Lead", "follow_up_by_min": "2023-12-01"})
    assert all(row["follow_up_by"] >= "2023-12-01" for row in late)


def test_tasks_can_be_made_up_by_the_hundred(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(generate_rows(400, seed=5))
    texts = [row["responses_create_params"]["input"][1]["content"] for row in rows]
    assert len(set(texts)) == 400
    assert len({row["category"] for row in rows}) == 5
    assert rows == list(generate_rows(400, seed=5))
    assert list(generate_rows(5, seed=1)) == ROWS
    assert create_dataset(["--size", "3", "--output", str(tmp_path / "new/x.jsonl")]) == 0
    assert len((tmp_path / "new/x.jsonl").read_text().splitlines()) == 3
    assert create_dataset(["--size", "3", "--output", str(tmp_path)]) == 2
    assert "Error:" in capsys.readouterr().err


def test_a_company_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"email_addresses\.csv, .* cannot be found in .*NEMO_GYM_EXTRA_ROOTS"):
        server(world="theirs/tables")
    folder = tmp_path / "theirs/tables"
    folder.mkdir(parents=True)
    for table, columns in COLUMNS.items():
        with (folder / f"{table}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(made_up(seed=9)[table])
    assert load("theirs/tables") == made_up(seed=9)
    client = TestClient(server(world="theirs/tables").complete_app())
    name = made_up(seed=9)["email_addresses"][0]["email_address"].partition(".")[0]
    found = client.post("/company_directory_find_email_address", json={"name": name}).json()["output"]
    assert found == [made_up(seed=9)["email_addresses"][0]["email_address"]]
    (folder / "emails.csv").write_text("email_id,subject\n")
    with pytest.raises(ConfigError, match=r"emails\.csv has no column inbox/outbox"):
        server(world="theirs/tables")


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(habit: str) -> None:
    (result,) = play(CONFIG, ROWS[:1], script=MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error"


def test_whole_rollouts_are_right_and_wrong() -> None:
    right = play(CONFIG, ROWS, script=str(RIGHT))
    assert [record["reward"] for record in right] == [1.0] * 5
    wrong = play(CONFIG, ROWS, script={"rules": [{"reply": {"text": "I would rather not."}}]})
    assert [record["reward"] for record in wrong] == [0.0] * 5
    assert {table for record in wrong for table in record["wrong_tables"]} >= {"emails", "calendar_events"}
