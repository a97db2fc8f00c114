from typing import Any

import pytest

from nemo_gym.server_metadata import ServerMetadata, visit_agent_server, visit_resources_server

BLOCK = {"entrypoint": "app.py", "domain": "math", "description": "Sums", "verified": True, "value": "Adds up"}
CONFIG: dict[str, Any] = {
    "note": "text",
    "my_agent": {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", "description": "Asks"}}},
    "mine": {"resources_servers": {"sums": BLOCK}},
}


@pytest.mark.parametrize(
    ("data", "level"),
    [(CONFIG, 1), (CONFIG["mine"], 2), (CONFIG["mine"]["resources_servers"], 3), (BLOCK, 4)],
)
def test_a_resources_server_is_described_by_its_block_at_whatever_level_one_has_it(data: Any, level: int) -> None:
    found = visit_resources_server(data, level)

    assert found == ServerMetadata(domain="math", description="Sums", verified=True, value="Adds up")
    assert found.to_dict() == {
        "domain": "math",
        "description": "Sums",
        "verified": True,
        "verified_url": None,
        "value": "Adds up",
    }


def test_what_is_not_there_is_not_told() -> None:
    assert visit_agent_server(CONFIG) == ServerMetadata(description="Asks")
    assert visit_agent_server({"mine": CONFIG["mine"]}) == ServerMetadata()
    assert visit_resources_server({}) == ServerMetadata()
