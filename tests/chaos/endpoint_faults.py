"""Faults of the model endpoint, on the wire between a model server and what stands in for a provider."""

from typing import Any

from tests.chaos.fleet import Fleet, counter_config, free_port, right_answers
from tests.chaos.lab import Job, Lab, Shared
from tests.chaos.ledger import Tally
from tests.chaos.scenario import scenario

FAULTS: dict[str, dict[str, Any]] = {
    "500": {"kind": "status", "status": 500, "probability": 0.3, "times": 40},
    "429 with Retry-After": {"kind": "status", "status": 429, "retry_after": 0.3, "probability": 0.3, "times": 40},
    "429 without Retry-After": {"kind": "status", "status": 429, "probability": 0.3, "times": 40},
    "401": {"kind": "status", "status": 401, "probability": 0.1, "times": 20},
    "truncated bodies": {"kind": "truncate", "probability": 0.2, "times": 30},
    "invalid JSON": {"kind": "malformed", "probability": 0.1, "times": 20},
    "slow drip": {"kind": "slow_drip", "seconds": 6.0, "probability": 0.1, "times": 15},
    "black hole": {"kind": "hang", "seconds": 60.0, "probability": 0.1, "times": 15},
}
FLAKY = "flaky_agent"
"""An agent some of whose rollouts fail, for ever anew."""
_TRY_AGAIN = "+retry_exhausted=true"


def _trio(config: dict[str, Any], number: str, faults: list[dict[str, Any]]) -> None:
    """An agent on a model server on an endpoint with these faults."""
    port = free_port()
    references = {
        "resources_server": {"type": "resources_servers", "name": "example_session_state_mgmt_resources_server"},
        "model_server": {"type": "responses_api_models", "name": f"model_{number}"},
    }
    config[f"{number}_agent"] = {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", **references}}}
    behind = {"openai_base_url": f"http://127.0.0.1:{port}/v1", "openai_api_key": "any", "openai_model": "any"}
    config[f"model_{number}"] = {"responses_api_models": {"openai_model": {"entrypoint": "app.py", **behind}}}
    stand_in = {"entrypoint": "app.py", "host": "127.0.0.1", "port": port, "script": right_answers(faults=faults)}
    config[f"endpoint_{number}"] = {"responses_api_models": {"scripted_model": stand_in}}


def endpoints_config() -> dict[str, Any]:
    """One agent for every fault."""
    config = counter_config()
    config |= {
        "model_total_timeout_s": 1.5,
        "model_retry_max_tries": 4,
        "model_retry_first_delay_s": 0.05,
        "model_retry_max_delay_s": 0.5,
        "model_retry_max_elapsed_s": 10.0,
    }
    for number, fault in enumerate(FAULTS.values()):
        _trio(config, f"e{number}", [fault])
    _trio(config, "flaky", [{"kind": "status", "status": 400, "probability": 0.02}])
    return config


def endpoints(shared: Shared) -> Fleet:
    """The servers of all these scenarios."""
    return shared.fleet("endpoints", endpoints_config)


def _endpoint_fails(lab: Lab, fault: str) -> Tally:
    number = list(FAULTS).index(fault)
    job = Job(lab, endpoints(lab.shared), agent=f"e{number}_agent", options=("+max_attempts=4",))
    job.tally.injected = FAULTS[fault]["times"]
    return job.finish(_TRY_AGAIN)


def _add(fault: str, *, short: bool) -> None:
    scenario(f"model endpoint: {fault}", short=short)(lambda lab: _endpoint_fails(lab, fault))


for _fault in FAULTS:
    _add(_fault, short=_fault in ("429 with Retry-After", "black hole"))
