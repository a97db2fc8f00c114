"""Environments and agents in the idioms of the original's authors, unchanged: in processes and venvs of their own."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from omegaconf import OmegaConf

import nemo_gym.global_config
from nemo_gym.cli.command import command_named
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.keys import NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME
from nemo_gym.launch.run_helper import RunHelper
from nemo_gym.log import LOGGER_NAME
from nemo_gym.rollout_collection import RolloutCollectionHelper
from tests.compat.stand_ins import write_compat_wheels, write_wheel
from tests.ports import free_port

ng_test = command_named("test")


REQUIREMENTS = "-e nemo-gym[dev] @ ../../\n"
ENVIRONMENT = """
    import defusedxml
    from fastapi import FastAPI
    from nemo_gym.base_resources_server import (
        BaseResourcesServerConfig, BaseRunRequest, BaseVerifyRequest, BaseVerifyResponse, NeMoGymResponse,
        SimpleResourcesServer,
    )

    class Request(BaseVerifyRequest):
        wanted: str

    class Answer(BaseVerifyResponse):
        wanted: str
        extracted_answer: str

    class Theirs(SimpleResourcesServer):
        config: BaseResourcesServerConfig

        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()
            app.post("/look_up")(self.look_up)
            return app

        async def look_up(self, body: dict) -> dict:
            return {"found": defusedxml.NAME}

        async def verify(self, body: Request) -> Answer:
            text = body.response.output_text if hasattr(body.response, "output_text") else ""
            return Answer(**body.model_dump(), reward=1.0, extracted_answer=text)

    if __name__ == "__main__":
        Theirs.run_webserver()
"""
ENVIRONMENT_TESTS = """
    from unittest.mock import MagicMock

    from fastapi.testclient import TestClient
    from nemo_gym.server_utils import ServerClient
    from resources_servers.{name}.app import BaseResourcesServerConfig, Theirs

    def server() -> Theirs:
        config = BaseResourcesServerConfig(host="", port=0, entrypoint="", name="", domain="other")
        return Theirs(config=config, server_client=MagicMock(spec=ServerClient))

    class TestTheirs:
        async def test_a_tool(self) -> None:
            assert (await server().look_up({{}})) == {{"found": "defusedxml"}}

        def test_its_route(self) -> None:
            client = TestClient(server().setup_webserver())
            assert client.post("/look_up", json={{}}).json() == {{"found": "defusedxml"}}
"""
AGENT = """
    from fastapi import Request, Response
    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
    from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
    from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
    from nemo_gym.server_utils import get_response_json, raise_for_status
    from pydantic import ConfigDict

    class Config(BaseResponsesAPIAgentConfig):
        model_server: ModelServerRef
        resources_server: ResourcesServerRef

    class RunRequest(BaseRunRequest):
        model_config = ConfigDict(extra="allow")

    class Agent(SimpleResponsesAPIAgent):
        config: Config

        async def responses(
            self, request: Request, response: Response, body: NeMoGymResponseCreateParamsNonStreaming = Body()
        ) -> NeMoGymResponse:
            usage = None
            for _ in range(2):
                answer = await self.server_client.post(
                    server_name=self.config.model_server.name, url_path="/v1/responses", json=body,
                )
                await raise_for_status(answer)
                said = NeMoGymResponse.model_validate(await get_response_json(answer))
                if usage is None:
                    usage = said.usage
                else:
                    usage.input_tokens += said.usage.input_tokens
                    usage.input_tokens_details.cached_tokens += said.usage.input_tokens_details.cached_tokens
                    usage.output_tokens_details.reasoning_tokens += said.usage.output_tokens_details.reasoning_tokens
            said.usage = usage
            return said

        async def run(self, request: Request, body: RunRequest) -> BaseVerifyResponse:
            said = await self.responses(request, None, body.responses_create_params)
            verdict = await self.server_client.post(
                server_name=self.config.resources_server.name, url_path="/verify",
                json=body.model_dump() | {"response": said.model_dump()},
            )
            await raise_for_status(verdict)
            return type("V", (BaseVerifyResponse,), {"model_config": ConfigDict(extra="allow")}).model_validate(
                await get_response_json(verdict)
            )

    if __name__ == "__main__":
        Agent.run_webserver()
"""


def write_server(root: Path, path: str, app: str, tests: str = "", requirements: str = REQUIREMENTS) -> Path:
    folder = root / path
    (folder / "tests").mkdir(parents=True)
    (folder / "app.py").write_text(dedent(app))
    (folder / "requirements.txt").write_text(requirements)
    if tests:
        module = path.removeprefix("resources_servers/").replace("/", ".")
        (folder / "tests" / "test_app.py").write_text(dedent(tests).format(name=module))
    return folder


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", None)
    logger = logging.getLogger(LOGGER_NAME)
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:], logger.level = handlers, level


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, which is all the installers know."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_compat_wheels(folder)
    for variable in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(variable, str(folder))
    for variable in ("PIP_NO_INDEX", "UV_NO_INDEX"):
        monkeypatch.setenv(variable, "1")
    return folder


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of somebody else, the only extra root."""
    root = tmp_path / "theirs"
    root.mkdir()
    monkeypatch.setenv(NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME, str(root))
    monkeypatch.chdir(tmp_path)
    return root


def config_of(tmp_path: Path, environment: str, **more: Any) -> dict[str, Any]:
    model = {"type": "responses_api_models", "name": "policy_model"}
    return {
        "head_server": {"host": "127.0.0.1", "port": free_port()},
        "cache_dir": str(tmp_path / "cache"),
        "policy_model": {"responses_api_models": {"scripted_model": {"entrypoint": "app.py"}}},
        "their_env": {"resources_servers": {environment: {"entrypoint": "app.py", "domain": "other"}}},
        "their_agent": {
            "responses_api_agents": {
                "their_agent": {
                    "entrypoint": "app.py",
                    "model_server": model,
                    "resources_server": {"type": "resources_servers", "name": "their_env"},
                    "judges": {"strict": {"type": "responses_api_models", "name": "of_another_config"}},
                }
            }
        },
        **more,
    }


@pytest.fixture
def helper() -> Iterator[RunHelper]:
    helper = RunHelper()
    yield helper
    helper.shutdown()


def start(helper: RunHelper, config: dict[str, Any]) -> None:
    helper.start(
        GlobalConfigDictParserConfig(
            initial_global_config_dict=OmegaConf.create(config), skip_load_from_cli=True, skip_load_from_dotenv=True
        )
    )


def collect(config: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    async def one() -> dict[str, Any]:
        head = BaseServerConfig(**config["head_server"])
        (running,) = RolloutCollectionHelper().run_examples([row], head_server_config=head)
        return (await running)[1]

    return asyncio.run(one())


ROW = {
    "responses_create_params": {"input": "say something"},
    "agent_ref": {"name": "their_agent"},
    "wanted": "this",
    "reward": 0.25,
    "extracted_answer": "of an earlier run",
    "difficulty": 3,
}


@pytest.mark.parametrize("place", ["their_env", "conversations/simulation"])
def test_servers_that_use_what_they_do_not_list_are_moved_to_where_it_is_and_make_rollouts(
    theirs: Path, tmp_path: Path, wheels: Path, helper: RunHelper, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    write_server(theirs, f"resources_servers/{place}", ENVIRONMENT)
    write_server(theirs, "responses_api_agents/their_agent", AGENT)
    config = config_of(tmp_path, place)

    with caplog.at_level(logging.INFO):
        start(helper, config)
    result = collect(config, ROW)

    assert result["reward"] == 1.0
    assert result["extracted_answer"] != "of an earlier run"
    assert result["difficulty"] == 3
    assert result["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 0}
    assert "'their_env' uses defusedxml, which is not installed here and not listed in" in caplog.text
    assert "what servers written elsewhere may use without listing it (" in caplog.text
    assert len([*(tmp_path / "cache/venvs").glob("*/bin/python")]) == 1


def test_servers_of_an_extra_root_find_their_files_below_parent_dir(
    theirs: Path, tmp_path: Path, wheels: Path, helper: RunHelper
) -> None:
    reading = """
    from nemo_gym import PARENT_DIR

    WORD = (PARENT_DIR / "resources_servers" / "their_env" / "data" / "word.txt").read_text()
    """
    app = dedent(ENVIRONMENT).replace("import defusedxml", dedent(reading)).replace("defusedxml.NAME", "WORD")
    folder = write_server(
        theirs, "resources_servers/their_env", app.replace("extracted_answer=text", "extracted_answer=WORD")
    )
    (folder / "data").mkdir()
    (folder / "data" / "word.txt").write_text("theirs")
    write_server(theirs, "responses_api_agents/their_agent", AGENT)
    config = config_of(tmp_path, "their_env")

    start(helper, config)

    assert collect(config, ROW)["extracted_answer"] == "theirs"


def test_servers_that_ask_for_a_newer_python_make_rollouts_and_are_named_in_a_warning(
    theirs: Path, tmp_path: Path, wheels: Path, helper: RunHelper, caplog: pytest.LogCaptureFixture
) -> None:
    for path, app in (("resources_servers/their_env", ENVIRONMENT), ("responses_api_agents/their_agent", AGENT)):
        folder = write_server(theirs, path, app)
        (folder / "requirements.txt").unlink()
        (folder / "pyproject.toml").write_text(
            '[project]\nname = "theirs"\nrequires-python = ">=3.98"\ndependencies = ["nemo-gym[dev]", "defusedxml"]\n'
        )
    config = config_of(tmp_path, "their_env")

    with caplog.at_level(logging.WARNING):
        start(helper, config)

    assert collect(config, ROW)["reward"] == 1.0
    assert f"server 'their_env': {theirs}/resources_servers/their_env requires Python >=3.98" in caplog.text


def test_without_the_packages_the_error_names_what_to_add(
    theirs: Path, tmp_path: Path, wheels: Path, helper: RunHelper
) -> None:
    write_server(theirs, "resources_servers/their_env", ENVIRONMENT)
    write_server(theirs, "responses_api_agents/their_agent", AGENT)

    with pytest.raises(RuntimeError, match=r"add the line `defusedxml` in .*requirements\.txt"):
        start(helper, config_of(tmp_path, "their_env", compat_packages=False))


def test_an_environment_of_its_own_gets_them_at_once_and_overrides_decide_about_versions(
    theirs: Path, tmp_path: Path, wheels: Path, helper: RunHelper
) -> None:
    write_wheel(wheels, "their-parser", {"their_parser.py": "VERSION = 1\n"}, "1.0")
    write_wheel(wheels, "their-parser", {"their_parser.py": "VERSION = 2\n"}, "2.0")
    folder = write_server(
        theirs,
        "resources_servers/their_env",
        f"import their_parser\nassert their_parser.VERSION == 1\n{dedent(ENVIRONMENT)}",
        requirements=f"{REQUIREMENTS}their-parser>=2\n",
    )
    (folder / "overrides.txt").write_text("their-parser==1.0\n")
    write_server(theirs, "responses_api_agents/their_agent", AGENT)
    config = config_of(tmp_path, "their_env")

    start(helper, config)

    assert collect(config, ROW)["reward"] == 1.0


@pytest.mark.parametrize("place", ["their_env", "conversations/simulation"])
def test_their_tests_run_with_what_they_need(
    theirs: Path, tmp_path: Path, wheels: Path, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    write_server(theirs, f"resources_servers/{place}", ENVIRONMENT, ENVIRONMENT_TESTS)

    ng_test.run([f"+entrypoint=resources_servers/{place}", f"+cache_dir={tmp_path / 'cache'}"])

    assert "2 passed" in capfd.readouterr().out
