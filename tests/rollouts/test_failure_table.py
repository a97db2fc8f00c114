from nemo_gym.collect.failures import FailureTable
from nemo_gym.runs.record import Result, Row


def row_of(task: int) -> Row:
    return {"_ng_task_index": task, "_ng_rollout_index": 0, "agent_ref": {"name": "a"}}


def record_of(failure_class: object, message: str = "it broke") -> Result:
    return {
        "_ng_failure_class": failure_class,
        "_ng_failure_message": message,
        "_ng_failure_status": 500,
        "_ng_failure_server": "policy",
    }


def test_each_class_has_its_counts_and_its_first_example() -> None:
    table = FailureTable()
    table.add(row_of(3), record_of("agent_error", "first"), is_final=False)
    table.add(row_of(3), record_of("agent_error", "second"), is_final=True)
    table.add(row_of(4), record_of("timeout", "too long"), is_final=False)

    header, *lines = table.lines()

    assert header.split() == ["class", "attempts", "rollouts", "example"]
    assert [line.split()[:3] for line in lines] == [["agent_error", "2", "1"], ["timeout", "1", "0"]]
    assert lines[0].endswith("a, task 3, rollout 0, in policy, status 500: first")


def test_nothing_failed_makes_no_table() -> None:
    assert FailureTable().lines() == []


def test_what_agents_report_is_counted_as_they_call_it() -> None:
    table = FailureTable()
    table.add(row_of(0), {"_ng_failure_class": "legitimate"})
    table.add(row_of(1), {"_ng_failure_class": ""})

    assert set(table.by_class) == {"legitimate", "(none)"}
    assert "no message" in table.lines()[1]


def test_text_of_models_is_shown_without_control_characters() -> None:
    table = FailureTable()
    table.add(row_of(0), record_of("x\x1b[31m", "a\nb\x1b[2J\u202e"))

    assert all(line.isprintable() for line in table.lines())


def test_an_agent_that_invents_classes_does_not_fill_the_memory() -> None:
    table = FailureTable()
    for number in range(1_000):
        table.add(row_of(number), record_of(f"class {number}"))

    assert len(table.by_class) <= 51
    assert sum(of_class.attempts for of_class in table.by_class.values()) == 1_000


def test_a_long_message_keeps_what_failed_and_what_to_do_about_it() -> None:
    table = FailureTable()
    table.add(row_of(0), record_of("connect", f"Cannot connect. {'x' * 900} Start it, or correct policy_base_url"))

    example = table.lines()[1]

    assert "status 500: Cannot connect. xxx" in example
    assert example.endswith("xxx Start it, or correct policy_base_url")
    assert len(example) < 600
