"""Servers that are dead, silent or well, as sockets on loopback."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.collect.server_watch import ServerDownError, ServerWatch, servers_needed_by
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.client import ServerClient
from tests.ports import free_port

SILENCE_S = 0.8


class _Well(BaseHTTPRequestHandler):
    """A server that answers what `answers` holds for a path, else nothing with status 200."""

    def do_GET(self) -> None:
        body = json.dumps(self.server.answers.get(self.path.partition("?")[0])).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def answering(answers: dict[str, Any]) -> Iterator[int]:
    """The port of a server that is well; `answers` may change meanwhile."""
    well = ThreadingHTTPServer(("127.0.0.1", 0), _Well)
    well.answers = answers  # type: ignore[attr-defined]
    thread = threading.Thread(target=well.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield well.server_port
    finally:
        well.shutdown()
        well.server_close()
        thread.join()


@contextmanager
def ports(head: dict[str, Any] | None = None) -> Iterator[dict[str, int]]:
    """One of a server that is well, one that accepts and is silent, one where nobody listens; and a head server."""
    with (
        answering({}) as well,
        answering({} if head is None else head) as head_port,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        yield {"well": well, "silent": silent.getsockname()[1], "dead": free_port(), "head": head_port}


def server(kind: str, port: int, **references: str) -> dict[str, Any]:
    named = {key: {"type": "responses_api_models", "name": name} for key, name in references.items()}
    return {kind: {"impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port, **named}}}


def client_for(state_of_model: str, found: dict[str, int], **settings: Any) -> ServerClient:
    config = {
        **settings,
        "busy_agent": server("responses_api_agents", found["well"], model_server="good_model"),
        "hit_agent": server("responses_api_agents", found["well"], model_server="bad_model"),
        "good_model": server("responses_api_models", found["well"]),
        "bad_model": server("responses_api_models", found[state_of_model]),
    }
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=found["head"]),
        global_config_dict=OmegaConf.create(config),
    )


async def outcome(watch: ServerWatch, agent: str, takes_s: float = 60.0) -> str:
    async def work() -> str:
        await asyncio.sleep(takes_s)
        return "done"

    return await watch.guard(agent, work())


@pytest.mark.parametrize(
    ("state", "limits", "words"),
    [
        ("dead", (60.0, SILENCE_S), "refuses connections since .*, longer than max_refused_s=0.8 allows"),
        ("dead", (SILENCE_S, None), "refuses connections since .*, longer than max_silence_s=0.8 allows"),
        ("silent", (SILENCE_S, 60.0), "accepts connections and says nothing since .*, longer than max_silence_s=0.8"),
    ],
)
def test_whoever_waits_for_a_server_that_is_down_is_told_which_it_is(
    state: str, limits: tuple[float, float | None], words: str
) -> None:
    with ports() as found, pytest.raises(ServerDownError, match=rf"server 'bad_model' \(http://127.*\) {words}"):
        asyncio.run(outcome(ServerWatch(client_for(state, found), *limits), "hit_agent"))


def test_a_server_that_is_silent_is_not_held_to_the_patience_for_refused_connections() -> None:
    with ports() as found:
        client = client_for("silent", found)
        assert asyncio.run(outcome(ServerWatch(client, 60.0, 0.2), "hit_agent", takes_s=2.0)) == "done"


def test_the_time_does_not_count_while_the_launcher_starts_that_server(caplog: pytest.LogCaptureFixture) -> None:
    states = {"/server_states": {"starting": ["bad_model"]}}
    with ports(states) as found:
        client = client_for("dead", found)
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(outcome(ServerWatch(client, SILENCE_S, 0.2), "hit_agent", takes_s=2.0)) == "done"
        assert "`ng_run` is starting it, so the time does not count" in caplog.text
        states["/server_states"] = {"starting": ["another"]}
        with pytest.raises(ServerDownError, match="bad_model"):
            asyncio.run(outcome(ServerWatch(client, SILENCE_S, 0.2), "hit_agent"))


def seen_by(watch: ServerWatch, for_s: float) -> list[str]:
    """What the living line says, look by look."""

    async def scenario() -> list[str]:
        waiting = asyncio.ensure_future(watch.until_down(lambda: {"hit_agent"}))
        notices = []
        deadline_s = asyncio.get_running_loop().time() + for_s
        while asyncio.get_running_loop().time() < deadline_s and not waiting.done():
            await asyncio.sleep(0.05)
            notices.append(watch.notice())
        waiting.cancel()
        return notices

    return asyncio.run(scenario())


def test_the_living_line_names_what_is_gone_and_when_the_run_ends(caplog: pytest.LogCaptureFixture) -> None:
    with ports() as found:
        notices = seen_by(ServerWatch(client_for("dead", found), None, 4.0), 2.0)

    assert any(re.fullmatch(r"bad_model refuses connections for \d s; the run ends in \d s", it) for it in notices)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert re.match(
        r"server 'bad_model' \(http://127.0.0.1:\d+\) refuses connections since \d\d:\d\d:\d\d\. The run", line
    )


def test_a_head_that_is_gone_is_named_and_ends_nothing_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    with ports() as found:
        notices = seen_by(ServerWatch(client_for("well", {**found, "head": found["dead"]}), 0.4, 0.4), 2.0)

    assert re.search(r"the head server \(.*\) refuses connections since .*`ng_run` is gone", caplog.text)
    assert re.fullmatch(r"the head server refuses connections for \d s", notices[-1])


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (lambda: {"cpu_s": time.monotonic(), "is_stopped": False}, "is busy with CPU and does not answer"),
        (lambda: {"cpu_s": 3.0, "is_stopped": False}, "accepts connections and says nothing"),
        (lambda: {"cpu_s": 3.0, "is_stopped": True}, "is stopped by a signal and says nothing"),
    ],
)
def test_silence_is_explained_by_what_the_process_does(process: Callable[[], Any], words: str) -> None:
    class Launcher(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            return {"starting": [], "processes": {"bad_model": process()}}

    with ports(Launcher()) as found, pytest.raises(ServerDownError, match=rf"'bad_model' \(.*\) {words} since"):
        asyncio.run(outcome(ServerWatch(client_for("silent", found), 3.0), "hit_agent"))


@pytest.mark.parametrize("finishes", [True, False])
def test_an_agent_that_finishes_rollouts_is_never_called_silent_however_late_it_answers(
    caplog: pytest.LogCaptureFixture, finishes: bool
) -> None:
    async def scenario(watch: ServerWatch) -> bool:
        waiting = asyncio.ensure_future(watch.until_down(lambda: {"hit_agent"}))
        deadline_s = asyncio.get_running_loop().time() + 3.0
        while asyncio.get_running_loop().time() < deadline_s and not caplog.records:
            await asyncio.sleep(0.02)
            if finishes:
                watch.sign_of_life("hit_agent")
        waiting.cancel()
        return bool(caplog.records)

    with ports() as found:
        client = client_for("well", {**found, "well": found["silent"]})
        client.global_config_dict["hit_agent"] = server("responses_api_agents", found["silent"])
        with caplog.at_level(logging.WARNING):
            is_told = asyncio.run(scenario(ServerWatch(client, 2.0)))
    assert is_told is not finishes, caplog.text


def endpoint(**state: Any) -> dict[str, Any]:
    known = {"url": "http://10.1.2.3:8000/v1", "set_with": "policy_base_url (base_url of bad_model)"}
    unknown = {"has_answered": False, "waiting": 4, "asked_s_ago": 2.0, "problem": "", "failing_s": 0.0}
    return {**known, **unknown, **state}


MISSING = endpoint(problem="connection refused", failing_s=0.1)
READY = "model_endpoint_readiness_timeout_seconds"


@contextmanager
def model_with(*endpoints: dict[str, Any]) -> Iterator[tuple[ServerClient, dict[str, Any]]]:
    """The client of a run whose model server says that of its endpoints, and what it says."""
    answers: dict[str, Any] = {"/model_endpoints": list(endpoints)}
    with ports() as found, answering(answers) as model:
        yield client_for("model", {**found, "model": model}, **{READY: 0.8}), answers


def watched(client: ServerClient, agents: Collection[str] = ("hit_agent",), for_s: float = 20.0) -> str | None:
    """How the run ended; None when it did not."""

    async def scenario() -> str | None:
        try:
            async with asyncio.timeout(for_s):
                return await ServerWatch(client, 60.0).until_down(lambda: agents)
        except TimeoutError:
            return None

    return asyncio.run(scenario())


def test_an_endpoint_that_never_answered_is_named_and_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def fail_longer() -> None:
        for tenth in range(60):
            answers["/model_endpoints"] = [{**MISSING, "failing_s": tenth / 10}]
            time.sleep(0.1)

    with model_with(MISSING) as (client, answers):
        failing = threading.Thread(target=fail_longer)
        failing.start()
        message = watched(client)
        failing.join()

    assert (
        "no answer from http://10.1.2.3:8000/v1 yet: connection refused; correct policy_base_url (base_url of "
        "bad_model), or wait while it loads" in caplog.text
    )
    assert message is not None
    assert message.startswith("no answer from http://10.1.2.3:8000/v1: connection refused; correct policy_base_url")
    assert f"{READY}=0.8" in message


@pytest.mark.parametrize(
    "endpoints",
    [
        [endpoint()],
        [endpoint(asked_s_ago=5_000.0)],
        [{**MISSING, "failing_s": 900.0, "has_answered": True}],
        [{**MISSING, "failing_s": 900.0}, endpoint(url="http://10.1.2.4:8000/v1", has_answered=True)],
        [{"something": "else"}],
    ],
    ids=["connected", "busy for long", "worked before", "one of two works", "of another kind"],
)
def test_an_endpoint_that_is_slow_or_has_worked_or_is_one_of_several_ends_no_run(endpoints: list[Any]) -> None:
    with model_with(*endpoints) as (client, _):
        assert watched(client, for_s=2.0) is None


@pytest.mark.parametrize(
    ("asked_s_ago", "words"),
    [
        (20.0, "is connected and at work on its first answer for 2"),
        (75.0, "took its first call and has been silent for 7"),
    ],
)
def test_an_endpoint_that_takes_calls_and_never_answers_is_called_silent_after_a_minute(
    asked_s_ago: float, words: str
) -> None:
    async def noticed(client: ServerClient) -> str:
        watch = ServerWatch(client, 60.0)
        watching = asyncio.ensure_future(watch.until_down(lambda: ("hit_agent",)))
        try:
            async with asyncio.timeout(30.0):
                while not watch.notice():  # noqa: ASYNC110 - threads look at the servers
                    await asyncio.sleep(0.02)
            return watch.notice()
        finally:
            watching.cancel()

    with model_with(endpoint(asked_s_ago=asked_s_ago)) as (client, _):
        assert asyncio.run(noticed(client)).startswith(f"http://10.1.2.3:8000/v1 {words}")


def test_it_is_not_forgotten_that_an_endpoint_worked_when_its_model_server_was_started_again() -> None:
    def start_again() -> None:
        time.sleep(0.5)
        answers["/model_endpoints"] = None
        time.sleep(0.5)
        answers["/model_endpoints"] = [{**MISSING, "failing_s": 900.0}]

    with model_with(endpoint(has_answered=True)) as (client, answers):
        again = threading.Thread(target=start_again)
        again.start()
        assert watched(client, for_s=2.5) is None
        again.join()


def test_the_clock_of_a_server_runs_no_slower_when_several_wait() -> None:
    async def scenario(client: ServerClient) -> list[Any]:
        watch, begun_s = ServerWatch(client, None, 1.5), asyncio.get_running_loop().time()

        async def ended(agent: str) -> float:
            await asyncio.wait_for(watch.until_down(lambda: (agent,)), 60)
            return asyncio.get_running_loop().time() - begun_s

        return await asyncio.gather(*(ended("hit_agent") for _ in range(8)), ended("other_agent"))

    with ports() as found:
        client = client_for("dead", found)
        client.global_config_dict["other_agent"] = server("responses_api_agents", found["dead"])
        *_, other_s = took_s = asyncio.run(scenario(client))

    assert other_s < 3 * min(took_s), "each server has a clock of its own"


def test_metrics_need_no_endpoint() -> None:
    with model_with({**MISSING, "failing_s": 900.0}) as (client, _):
        assert asyncio.run(outcome(ServerWatch(client, 60.0), "hit_agent", takes_s=1.5)) == "done"


def test_servers_of_others_and_finished_work_and_patience_are_no_reason_to_stop() -> None:
    with ports() as found:
        client = client_for("dead", found)
        assert asyncio.run(outcome(ServerWatch(client, SILENCE_S), "busy_agent", takes_s=2.0)) == "done"
        assert asyncio.run(outcome(ServerWatch(client, 60.0), "hit_agent", takes_s=0.1)) == "done"
        assert asyncio.run(outcome(ServerWatch(client, None), "hit_agent", takes_s=0.1)) == "done"


def test_rollouts_that_succeed_and_agents_that_are_well_keep_the_run_going() -> None:
    async def scenario(watch: ServerWatch, agents: set[str]) -> bool:
        waiting = asyncio.ensure_future(watch.until_down(lambda: agents))
        for _ in range(20):
            await asyncio.sleep(0.1)
            if agents == {"hit_agent"}:
                watch.sign_of_life("hit_agent")
        is_down = waiting.done()
        waiting.cancel()
        return is_down

    with ports() as found:
        client = client_for("dead", found)
        assert not asyncio.run(scenario(ServerWatch(client, SILENCE_S), {"hit_agent"}))
        assert not asyncio.run(scenario(ServerWatch(client, SILENCE_S), {"hit_agent", "busy_agent"}))


def test_an_agent_needs_the_servers_it_names_and_those_that_they_name() -> None:
    config = OmegaConf.create(
        {
            "agent": server("responses_api_agents", 1, judge="judge", elsewhere="not_of_this_run"),
            "judge": server("responses_api_models", 2, behind="endpoint"),
            "endpoint": server("responses_api_models", 3, back="judge"),
            "other": server("responses_api_models", 4),
        }
    )

    assert servers_needed_by(config, "agent") == {"agent", "judge", "endpoint"}
    assert servers_needed_by(config, "nobody") == set()
