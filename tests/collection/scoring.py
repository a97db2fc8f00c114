"""A head server, an environment that scores as a test says, and the files of a run that was made before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.collection.fakes import FakeRun, Row, write_rows

Score = Callable[[Row], Any]
"""(what `/verify` was sent) -> the reward, or an answer of its own."""


class FakeEnvironment(FakeRun):
    """A run without any agent and model: one resources server, as its config says."""

    def __init__(self, name: str = "judge_of_words") -> None:
        super().__init__()
        self.name = name
        self.mode: str | None = "stateless"
        """None: it does not know the question."""
        self.score: Score = lambda body: float("right" in answer_in(body))
        self.verified: list[Row] = []
        """What `/verify` was sent, in that order."""
        self.sessions: dict[str, Row] = {}
        """The rows that were seeded, by session."""

    def settings(self) -> Row:
        block = {"entrypoint": "app.py", "host": "127.0.0.1", "port": self.port}
        return {self.name: {"resources_servers": {"fake_environment": block}}, **self.config}

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/verify", self._verify)
        app.router.add_post("/seed_session", self._seed)
        app.router.add_get("/reverify_mode", self._mode)
        app.router.add_get("/reverify_reason", self._reason)
        return app

    async def _mode(self, request: web.Request) -> web.Response:
        return web.json_response(self.mode) if self.mode else web.json_response({"detail": "Not Found"}, status=404)

    async def _reason(self, request: web.Request) -> web.Response:
        return web.json_response("the board is in the session")

    async def _seed(self, request: web.Request) -> web.Response:
        session = f"s{len(self.sessions)}"
        self.sessions[session] = await request.json()
        answer = web.json_response({})
        answer.set_cookie("session", session)
        return answer

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.verified.append({**body, "session": request.cookies.get("session")})
        said = self.score(body)
        if isinstance(said, web.StreamResponse):
            return said
        return web.json_response({**body, **said} if isinstance(said, dict) else {**body, "reward": said})


def answer_in(body: Row) -> str:
    """The text of the response."""
    return str(body["response"]["output"][0]["content"][0]["text"])


def response_of(text: str) -> Row:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {
        "model": "a-model",
        "output": [message],
        "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5},
    }


def rows_made(tasks: int, repeats: int = 1, agent: str = "alpha") -> list[Row]:
    """The rows of a run as they were sent."""
    return [
        {
            "agent_ref": {"name": agent},
            "responses_create_params": {"input": f"task {task}"},
            "level": "hard" if task % 2 else "easy",
            "_ng_task_index": task,
            "_ng_rollout_index": repeat,
        }
        for task in range(tasks)
        for repeat in range(repeats)
    ]


def rollout(row: Row, text: str, reward: float) -> Row:
    """What was made of a row."""
    timing = {"started_at": "2026-01-01T00:00:00.000Z", "duration_s": 12.5}
    return {**row, "response": response_of(text), "reward": reward, "words": len(text), "_ng_timing": timing}


def write_run(folder: Path, rows: list[Row], rollouts: list[Row], failures: list[Row] | None = None) -> Path:
    """The files of a run; returns the rollouts."""
    write_rows(folder / "old_materialized_inputs.jsonl", rows)
    if failures is not None:
        write_rows(folder / "old_failures.jsonl", failures)
    return write_rows(folder / "old.jsonl", rollouts)


def manifest_of(path: Path) -> Row:
    found: Row = json.loads(path.with_name(f"{path.stem}_manifest.json").read_text())
    return found
