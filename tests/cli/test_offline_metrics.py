"""The agents' classes, written to disk and built here, asked without a server."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import nemo_gym.global_config
from nemo_gym.collect.metrics import AggregationError
from nemo_gym.combine.aggregation import AggregationSummary, RolloutAggregationHelper
from nemo_gym.combine.shard_metrics import needs_records
from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
from nemo_gym.launch.offline_metrics import NotBuiltError, OfflineAgents
from nemo_gym.runs.options import RolloutAggregationConfig

ENVIRONMENT = """
from nemo_gym.base_resources_server import BaseVerifyResponse, SimpleResourcesServer

class {name}(SimpleResourcesServer):
    async def verify(self, body):
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)
"""
AGENT = """
from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest

class MyAgent(SimpleResponsesAPIAgent):
    async def responses(self, body): ...
    async def run(self, body): ...
"""
RECORDS = [
    f'{{"_ng_task_index":{task},"_ng_rollout_index":{rollout},"agent_ref":{{"name":"agent"}},'
    f'"reward":{rollout}.0,"level":{task}}}\n'
    for task in range(2)
    for rollout in range(2)
]

Write = Callable[..., None]
Aggregate = Callable[..., AggregationSummary]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_server(kind: str, name: str, app: str, **files: str) -> None:
        folder = tmp_path / kind / name
        folder.mkdir(parents=True)
        (folder / "app.py").write_text(app)
        for file, text in files.items():
            (folder / f"{file}.py").write_text(text)

    return write_server


@pytest.fixture(autouse=True)
def _forget_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("resources_servers.", "responses_api_agents.")):
            del sys.modules[name]


def environment(name: str) -> dict[str, Any]:
    return {"resources_servers": {name: {"entrypoint": "app.py", "domain": "other"}}}


def simple_agent(resources_server: str = "env", **settings: Any) -> dict[str, Any]:
    refs = {
        "resources_server": {"type": "resources_servers", "name": resources_server},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    return {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", **refs, **settings}}}


@pytest.fixture
def aggregate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Aggregate:
    (tmp_path / "shard.jsonl").write_text("".join(RECORDS))

    def run(**instances: Any) -> AggregationSummary:
        base = OmegaConf.merge(GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT, instances)
        parsed = GlobalConfigDictParser().parse(
            GlobalConfigDictParserConfig(
                initial_global_config_dict=base, skip_load_from_cli=True, skip_load_from_dotenv=True, offline=True
            )
        )
        monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", parsed)
        config = RolloutAggregationConfig(input_glob="shard.jsonl", output_jsonl_fpath="out.jsonl", offline=True)
        return asyncio.run(RolloutAggregationHelper(loader=lambda: OfflineAgents(parsed)).aggregate(config))

    return run


def test_the_metrics_of_simple_agent_are_those_of_its_resources_server(write: Write, aggregate: Aggregate) -> None:
    write(
        "resources_servers",
        "mine",
        ENVIRONMENT.format(name="Mine")
        + "    def compute_metrics(self, tasks):\n"
        + "        print('not part of the output')\n"
        + "        return {'tasks': len(tasks), 'per_task_metrics': [{'_ng_task_index': 1, 'hard': True}]}\n"
        + "    def get_key_metrics(self, metrics):\n"
        + "        return {'tasks': metrics['tasks']}\n",
    )

    summary = aggregate(env=environment("mine"), agent=simple_agent())

    assert summary.metrics[0].metrics.key_metrics == {"tasks": 2}
    assert summary.metrics_path is not None
    assert '"hard": true' in summary.metrics_path.read_text()


def test_a_class_without_metrics_of_its_own_still_chooses_the_headline(write: Write, aggregate: Aggregate) -> None:
    write(
        "resources_servers",
        "mine",
        ENVIRONMENT.format(name="Mine")
        + "    def get_key_metrics(self, metrics):\n        return {'best': metrics['max/reward']}\n",
    )

    summary = aggregate(env=environment("mine"), agent=simple_agent())

    assert summary.metrics[0].metrics.key_metrics == {"best": 1.0}


def test_records_are_kept_only_for_classes_that_need_them(write: Write, aggregate: Aggregate) -> None:
    write("resources_servers", "plain", ENVIRONMENT.format(name="Plain"))
    write(
        "resources_servers", "own", ENVIRONMENT.format(name="Own") + "    def compute_metrics(self, tasks): return {}\n"
    )
    aggregate(a=environment("plain"), b=environment("own"), agent=simple_agent("a"), other=simple_agent("b"))

    agents = OfflineAgents(nemo_gym.global_config.get_global_config_dict())

    assert (needs_records(agents, "agent"), needs_records(agents, "other")) == (False, True)


def test_an_agent_with_metrics_of_its_own_is_asked_itself(write: Write, aggregate: Aggregate) -> None:
    write("responses_api_agents", "my_agent", AGENT + "    def compute_metrics(self, tasks): return {'own': 1}\n")

    summary = aggregate(agent={"responses_api_agents": {"my_agent": {"entrypoint": "app.py"}}})

    assert summary.metrics[0].metrics.agent_metrics["own"] == 1


def test_an_agent_that_answers_by_calling_others_finds_them_here(write: Write, aggregate: Aggregate) -> None:
    write(
        "responses_api_agents",
        "my_agent",
        AGENT
        + "    async def aggregate_metrics(self, body: AggregateMetricsRequest):\n"
        + "        response = await self.server_client.post('env', '/aggregate_metrics', json=body)\n"
        + "        answer = await response.json()\n"
        + "        return AggregateMetrics(agent_metrics={**answer['agent_metrics'], 'forwarded': True})\n",
    )
    write("resources_servers", "mine", ENVIRONMENT.format(name="Mine"))

    summary = aggregate(env=environment("mine"), agent={"responses_api_agents": {"my_agent": {"entrypoint": "app.py"}}})

    metrics = summary.metrics[0].metrics.agent_metrics
    assert (metrics["mean/reward"], metrics["forwarded"]) == (0.5, True)


def test_unverified_rollouts_have_no_metrics_here_either(write: Write, aggregate: Aggregate) -> None:
    write("resources_servers", "mine", ENVIRONMENT.format(name="Mine"))

    with pytest.warns(RuntimeWarning, match="were not verified"):
        summary = aggregate(env=environment("mine"), agent=simple_agent(skip_verification=True))

    assert summary.metrics[0].metrics.agent_metrics == {}


def test_modules_beside_an_app_are_its_own(write: Write, aggregate: Aggregate, tmp_path: Path) -> None:
    app = (
        "import helpers\n" + ENVIRONMENT + "    def get_key_metrics(self, metrics): return {{'helper': helpers.NAME}}\n"
    )
    write(
        "resources_servers",
        "one",
        app.format(name="One"),
        helpers="import pathlib\nNAME = pathlib.Path('data.txt').read_text()",
    )
    write("resources_servers", "two", app.format(name="Two"), helpers="NAME = 'of two'")
    (tmp_path / "resources_servers" / "one" / "data.txt").write_text("of one")
    path = list(sys.path)
    of_other = RECORDS[0].replace('"agent"', '"other"').replace(":0", ":9", 1)
    (tmp_path / "shard.jsonl").write_text("".join([*RECORDS, of_other]))

    summary = aggregate(a=environment("one"), b=environment("two"), agent=simple_agent("a"), other=simple_agent("b"))

    assert [entry.metrics.key_metrics["helper"] for entry in summary.metrics] == ["of one", "of two"]
    assert sys.path == path
    assert Path.cwd() == tmp_path
    assert "helpers" not in sys.modules


@pytest.mark.parametrize(
    ("app", "named"),
    [
        ("import a_library_nobody_has", "ModuleNotFoundError: No module named 'a_library_nobody_has'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("", "should define exactly one server class"),
        (None, "there is no folder resources_servers/mine"),
        (
            ENVIRONMENT.format(name="Mine") + "    def model_post_init(self, context): raise OSError('no docker')",
            "OSError: no docker",
        ),
    ],
)
def test_a_class_that_cannot_be_built_gives_the_baseline_and_is_named(
    write: Write, aggregate: Aggregate, capsys: pytest.CaptureFixture[str], app: str | None, named: str
) -> None:
    if app is not None:
        write("resources_servers", "mine", app)

    with pytest.MonkeyPatch.context() as patch:
        warned: list[str] = []
        patch.setattr(
            "nemo_gym.launch.offline_metrics.logger.warning", lambda text, *values: warned.append(text % values)
        )
        summary = aggregate(env=environment("mine"), agent=simple_agent())

    assert summary.metrics[0].metrics.key_metrics == {"mean/reward": 0.5, "mean/level": 0.5}
    assert len(warned) == 1
    assert warned[0].startswith("'agent' gets only the metrics every agent has: ")
    assert named in warned[0]


def test_an_agent_that_no_config_defines_gets_the_baseline(aggregate: Aggregate) -> None:
    assert aggregate().metrics[0].metrics.key_metrics == {"mean/reward": 0.5, "mean/level": 0.5}


def test_a_server_that_an_agent_calls_and_that_cannot_be_built_gives_the_baseline(
    write: Write, aggregate: Aggregate
) -> None:
    write(
        "responses_api_agents",
        "my_agent",
        AGENT
        + "    async def aggregate_metrics(self, body: AggregateMetricsRequest):\n"
        + "        await self.server_client.post('env', '/aggregate_metrics', json=body)\n",
    )
    write("resources_servers", "mine", "import a_library_nobody_has")

    summary = aggregate(env=environment("mine"), agent={"responses_api_agents": {"my_agent": {"entrypoint": "app.py"}}})

    assert summary.metrics[0].metrics.key_metrics == {"mean/reward": 0.5, "mean/level": 0.5}


def test_a_hook_that_fails_is_an_error_as_it_is_with_servers(write: Write, aggregate: Aggregate) -> None:
    write(
        "resources_servers", "mine", ENVIRONMENT.format(name="Mine") + "    def compute_metrics(self, tasks): 1 / 0\n"
    )

    with pytest.raises(AggregationError, match=r"agent 'agent': its class failed .*ZeroDivisionError"):
        aggregate(env=environment("mine"), agent=simple_agent())


def test_an_agent_that_fails_by_itself_is_an_error(write: Write, aggregate: Aggregate) -> None:
    write(
        "responses_api_agents",
        "my_agent",
        AGENT
        + "    async def aggregate_metrics(self, body: AggregateMetricsRequest): raise ValueError('its own fault')\n",
    )

    with pytest.raises(AggregationError, match=r"agent 'agent' could not be asked for its metrics: .*its own fault"):
        aggregate(agent={"responses_api_agents": {"my_agent": {"entrypoint": "app.py"}}})


def test_a_model_is_never_built(aggregate: Aggregate) -> None:
    aggregate()
    agents = OfflineAgents(nemo_gym.global_config.get_global_config_dict())

    with pytest.raises(NotBuiltError, match="'policy_model' is a model"):
        agents.build("policy_model")
