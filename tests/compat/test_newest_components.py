"""Components in the idioms of the original's newest version, as their authors write them."""

from unittest.mock import MagicMock

import pytest
from fastapi.testclient import TestClient

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
from nemo_gym.base_responses_api_model import SimpleResponsesAPIModel
from nemo_gym.server_utils import BaseServer, ServerClient, SimpleServer


def test_a_component_that_declares_ray_enabled_without_annotation_serves() -> None:
    class Quiz(SimpleResourcesServer):
        ray_enabled = False

        config: BaseResourcesServerConfig

        async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
            return BaseVerifyResponse(**body.model_dump(), reward=1.0)

    config = BaseResourcesServerConfig(host="127.0.0.1", port=0, entrypoint="app.py", name="quiz", domain="other")
    quiz = Quiz(config=config, server_client=MagicMock(spec=ServerClient))

    with TestClient(quiz.setup_webserver()) as caller:
        assert caller.post("/seed_session", json={}).status_code == 200
    assert (Quiz.ray_enabled, quiz.ray_enabled) == (False, False)
    assert "ray_enabled" not in Quiz.model_fields


@pytest.mark.parametrize(
    "base", [BaseServer, SimpleServer, SimpleResourcesServer, SimpleResponsesAPIAgent, SimpleResponsesAPIModel]
)
def test_every_kind_of_server_may_say_whether_it_uses_ray(base: type[BaseServer]) -> None:
    says_yes = type("SaysYes", (base,), {"ray_enabled": True, "__module__": __name__})

    assert vars(says_yes)["ray_enabled"] is True
    assert base.ray_enabled is None
