"""The types configurations are made of."""

import pickle
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import ConfigDict, ValidationError

from nemo_gym.config_types import (
    AgentServerRef,
    AlmostServerError,
    BaseNeMoGymCLIConfig,
    BaseRunServerConfig,
    BaseRunServerInstanceConfig,
    BaseServerConfig,
    BenchmarkDatasetConfig,
    ConfigError,
    ConfigInterpolationError,
    ConfigMissingValuesError,
    ConfigPathNotFoundError,
    DatasetConfig,
    Domain,
    DownloadJsonlDatasetHuggingFaceConfig,
    InheritPathNotFoundError,
    MalformedConfigPathsError,
    ModelServerRef,
    NoServerInstancesError,
    ResourcesServerInstanceConfig,
    ResourcesServerRef,
    ResponsesAPIAgentServerInstanceConfig,
    ResponsesAPIModelServerInstanceConfig,
    ServerRefNotFoundError,
    UploadJsonlDatasetHuggingFaceConfig,
    UploadJsonlDatasetHuggingFaceMaybeDeleteConfig,
    WANDBConfig,
    is_almost_server,
    is_server_ref,
    maybe_get_server_instance_config,
)
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.schemas.cli_config import RewardProfileConfig, StatusConfig

TRAIN = {"name": "t", "type": "train", "jsonl_fpath": "t.jsonl", "license": "MIT"}
GITLAB = {"dataset_name": "d", "version": "0.0.1", "artifact_fpath": "t.jsonl"}
HUB = {"repo_id": "org/name", "artifact_fpath": None}
UPLOAD = dict.fromkeys(
    ["hf_token", "hf_organization", "hf_collection_name", "hf_collection_slug", "input_jsonl_fpath"], "x"
) | {"resource_config_path": "x"}


def test_domains_are_a_closed_list() -> None:
    assert [str(domain) for domain in Domain] == [
        "math",
        "coding",
        "agent",
        "knowledge",
        "instruction_following",
        "long_context",
        "safety",
        "games",
        "translation",
        "e2e",
        "rlhf",
        "other",
    ]


@pytest.mark.parametrize(
    ("server_type", "ref_class"),
    [
        ("responses_api_models", ModelServerRef),
        ("resources_servers", ResourcesServerRef),
        ("responses_api_agents", AgentServerRef),
    ],
)
@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_a_reference_is_recognised_by_type_and_name(server_type: str, ref_class: type, wrap: Any) -> None:
    ref = is_server_ref(wrap({"type": server_type, "name": "n", "extra": 1}))

    assert type(ref) is ref_class
    assert ref is not None
    assert (ref.type, ref.name) == (server_type, "n")


@pytest.mark.parametrize(
    "value",
    [
        {"type": "responses_api_models"},
        {"name": "n"},
        {"type": "train", "name": "n"},
        {"type": "resources_servers", "name": 5},
        {"type": ["resources_servers"], "name": "n"},
        "resources_servers",
        None,
        [],
    ],
)
def test_anything_else_is_no_reference(value: object) -> None:
    assert is_server_ref(value) is None


def test_server_configs_build_on_one_another() -> None:
    assert BaseServerConfig(host="h", port=1).num_workers is None
    assert BaseRunServerConfig(host="h", port=1, entrypoint="app.py").domain is None
    instance = BaseRunServerInstanceConfig.model_validate(
        {"host": "h", "port": "1", "entrypoint": "app.py", "name": "n", "unknown": 1}
    )
    assert (instance.name, instance.port) == ("n", 1)


@pytest.mark.parametrize(
    ("block", "instance_class"),
    [
        ({"responses_api_models": {"i": {"entrypoint": "app.py"}}}, ResponsesAPIModelServerInstanceConfig),
        ({"resources_servers": {"i": {"entrypoint": "app.py", "domain": "math"}}}, ResourcesServerInstanceConfig),
        ({"responses_api_agents": {"i": {"entrypoint": "app.py"}}}, ResponsesAPIAgentServerInstanceConfig),
    ],
)
def test_a_block_is_read_as_the_instance_it_describes(block: dict[str, Any], instance_class: type) -> None:
    config = OmegaConf.create({**block, "beside": 1})

    instance, error = maybe_get_server_instance_config("n", config)

    assert error is None
    assert type(instance) is instance_class
    assert instance is not None
    assert instance.server_type_config_dict is config
    assert instance.get_server_ref().model_dump() == {"type": instance.SERVER_TYPE, "name": "n"}
    assert instance.get_inner_run_server_config_dict() is config[instance.SERVER_TYPE]["i"]
    assert instance.get_inner_run_server_config().entrypoint == "app.py"
    assert instance.implementation == "i"
    assert instance.datasets is None
    assert "server_type_config_dict" not in instance.model_dump()


def test_extra_keys_of_the_innermost_block_are_kept() -> None:
    instance, _ = maybe_get_server_instance_config(
        "n", {"responses_api_models": {"i": {"entrypoint": "app.py", "anything": [1]}}}
    )

    assert instance is not None
    assert instance.get_inner_run_server_config().model_extra == {"anything": [1]}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"resources_servers": {"i": {"entrypoint": "app.py"}}}, "A domain is required for resources servers"),
        ({"resources_servers": {"i": {"entrypoint": "app.py", "domain": "x"}}}, "Input should be 'math'"),
        ({"responses_api_models": {"i": {}}}, "Field required"),
        ({"responses_api_models": {}}, "exactly one implementation"),
        ({"responses_api_models": {"i": {"entrypoint": "a"}, "j": {"entrypoint": "a"}}}, "exactly one implementation"),
        ({"responses_api_models": {"i": {"entrypoint": "a", "port": 70_000}}}, "less than or equal to 65535"),
        ({"something": {"i": {"entrypoint": "a"}}}, "Field required"),
    ],
)
def test_a_block_that_is_no_instance_says_why(block: dict[str, Any], message: str) -> None:
    instance, error = maybe_get_server_instance_config("n", block)

    assert instance is None
    assert message in str(error)


@pytest.mark.parametrize("value", [None, 5, "text", [1]])
def test_a_value_that_is_no_block_is_neither(value: object) -> None:
    assert maybe_get_server_instance_config("n", value) == (None, None)


@pytest.mark.parametrize("server_type", ["responses_api_models", "responses_api_agents"])
def test_models_and_agents_have_no_domain_whatever_is_written_there(server_type: str) -> None:
    block = {server_type: {"i": {"entrypoint": "app.py", "domain": "anything"}}}

    instance, error = maybe_get_server_instance_config("n", block)

    assert error is None
    assert instance is not None
    assert instance.get_inner_run_server_config().domain is None
    assert instance.get_inner_run_server_config_dict()["domain"] == "anything"


@pytest.mark.parametrize(
    ("block", "almost"),
    [
        ({"resources_servers": {"i": {"entrypoint": "a"}}}, True),
        ({"resources_servers": {"i": {}, "j": {"entrypoint": None}}}, True),
        ({"resources_servers": {"i": {"domain": "math"}}}, False),
        ({"resources_servers": None}, False),
        ({"resources_servers": {"entrypoint": "a"}}, False),
        ({"other": {"i": {"entrypoint": "a"}}}, False),
        ("text", False),
    ],
)
def test_a_server_type_over_an_entrypoint_was_meant_to_be_a_server(block: object, almost: bool) -> None:
    assert is_almost_server(block) is almost


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_data_that_trains_needs_a_licence(kind: str) -> None:
    with pytest.raises(ValidationError, match=f"A license is required for {kind}"):
        DatasetConfig.model_validate({**TRAIN, "type": kind, "license": None})


def test_example_data_needs_no_licence() -> None:
    assert DatasetConfig.model_validate({**TRAIN, "type": "example", "license": None}).license is None


@pytest.mark.parametrize(
    "name",
    [
        "Apache 2.0",
        "MIT",
        "Creative Commons Attribution 4.0 International",
        "Creative Commons Attribution-ShareAlike 4.0 International",
        "NVIDIA Internal Use Only, Do Not Distribute",
        "NVIDIA Evaluation Dataset License Agreement",
        "TBD",
        "GNU General Public License v3.0",
        "CC BY-SA 4.0",
        "CC BY-NC 3.0",
    ],
)
def test_these_licences_are_accepted(name: str) -> None:
    assert DatasetConfig.model_validate({**TRAIN, "license": name}).license == name


@pytest.mark.parametrize(
    "changes", [{"license": "Mine"}, {"type": "test"}, {"num_repeats": 0}, {"jsonl_fpath": None}, {"name": None}]
)
def test_a_data_set_with_a_wrong_value_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DatasetConfig.model_validate({**TRAIN, **changes})


def test_a_source_is_mirrored_into_the_identifier_it_replaces() -> None:
    gitlab = DatasetConfig.model_validate({**TRAIN, "source": {"type": "gitlab", **GITLAB}})
    hub = DatasetConfig.model_validate({**TRAIN, "source": {"type": "huggingface", "repo_id": "org/name"}})

    assert gitlab.gitlab_identifier is not None
    assert gitlab.gitlab_identifier.model_dump() == GITLAB
    assert gitlab.huggingface_identifier is None
    assert hub.huggingface_identifier is not None
    assert hub.huggingface_identifier.model_dump() == HUB


@pytest.mark.parametrize(
    ("key", "identifier", "kind"),
    [("gitlab_identifier", GITLAB, "gitlab"), ("huggingface_identifier", HUB, "huggingface")],
)
def test_a_single_identifier_is_mirrored_into_a_source_with_a_warning(
    key: str, identifier: dict[str, Any], kind: str
) -> None:
    with pytest.warns(DeprecationWarning, match="'t'.*old spelling of `source`"):
        dataset = DatasetConfig.model_validate({**TRAIN, key: identifier})

    assert dataset.source is not None
    assert dataset.source.model_dump() == {"type": kind, **identifier}


def test_both_identifiers_together_leave_the_source_unset() -> None:
    dataset = DatasetConfig.model_validate({**TRAIN, "gitlab_identifier": GITLAB, "huggingface_identifier": HUB})

    assert dataset.source is None


def test_a_source_and_an_identifier_exclude_one_another() -> None:
    with pytest.raises(ValidationError, match="Specify a dataset source once"):
        DatasetConfig.model_validate({**TRAIN, "source": {"type": "gitlab", **GITLAB}, "huggingface_identifier": HUB})


def test_a_benchmark_needs_rows_and_may_have_a_script_that_makes_them_and_a_prompt() -> None:
    benchmark = BenchmarkDatasetConfig.model_validate({"name": "b", "type": "benchmark", "jsonl_fpath": "b.jsonl"})

    assert (benchmark.prepare_script, benchmark.prompt_config, benchmark.num_repeats) == (None, None, 1)
    with pytest.raises(ValidationError, match="jsonl_fpath"):
        BenchmarkDatasetConfig.model_validate({"name": "b", "type": "benchmark", "prepare_script": "p.py"})


def test_data_sets_of_a_server_are_told_apart_by_their_type() -> None:
    benchmark = {"name": "b", "type": "benchmark", "jsonl_fpath": "b.jsonl", "prepare_script": "p.py"}
    instance, error = maybe_get_server_instance_config(
        "n", {"responses_api_agents": {"i": {"entrypoint": "app.py", "datasets": [TRAIN, benchmark]}}}
    )

    assert error is None
    assert instance is not None
    assert [type(dataset) for dataset in instance.datasets or []] == [DatasetConfig, BenchmarkDatasetConfig]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "exactly one of `output_dirpath` and `output_fpath`"),
        ({"output_dirpath": "d", "output_fpath": "f"}, "exactly one of `output_dirpath` and `output_fpath`"),
        ({"output_dirpath": "d", "artifact_fpath": "a", "split": "train"}, "give one of them"),
        ({"output_fpath": "f"}, "`split` or `artifact_fpath`"),
        ({"output_dirpath": "d", "split": "everything"}, "split"),
    ],
)
def test_a_download_says_what_it_needs(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        DownloadJsonlDatasetHuggingFaceConfig.model_validate({"repo_id": "org/name", **given})


@pytest.mark.parametrize(
    "given",
    [
        {"output_dirpath": "d"},
        {"output_dirpath": "d", "split": "train"},
        {"output_dirpath": "d", "artifact_fpath": "a"},
        {"output_fpath": "f", "split": "test"},
        {"output_fpath": "f", "artifact_fpath": "a"},
    ],
)
def test_a_download_knows_where_to_write_what(given: dict[str, Any]) -> None:
    assert DownloadJsonlDatasetHuggingFaceConfig.model_validate({"repo_id": "org/name", **given}).hf_token is None


def test_an_upload_has_defaults_and_never_deletes() -> None:
    upload = UploadJsonlDatasetHuggingFaceConfig.model_validate(UPLOAD)

    assert (upload.hf_dataset_prefix, upload.split, upload.create_pr) == ("Nemotron-RL", "train", False)
    with pytest.raises(ValidationError, match="Forbidden fields present"):
        UploadJsonlDatasetHuggingFaceConfig.model_validate({**UPLOAD, "delete_from_gitlab": True})
    assert UploadJsonlDatasetHuggingFaceMaybeDeleteConfig.model_validate(
        {**UPLOAD, "delete_from_gitlab": True}
    ).delete_from_gitlab


@pytest.mark.parametrize(
    ("settings", "available"),
    [
        ({"wandb_project": "p", "wandb_name": "n", "wandb_api_key": "k"}, True),
        ({"wandb_project": "p", "wandb_name": "n", "wandb_api_key": "****"}, False),
        ({"wandb_project": "p", "wandb_name": "n"}, True),
        ({"wandb_project": "p", "wandb_api_key": "k"}, False),
        ({"wandb_project": "", "wandb_name": "n", "wandb_api_key": "k"}, False),
        ({}, False),
    ],
)
def test_a_tracker_needs_project_and_name_and_no_masked_key(settings: dict[str, str], available: bool) -> None:
    assert WANDBConfig.model_validate(settings).is_available is available


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (ConfigPathNotFoundError, FileNotFoundError),
        (MalformedConfigPathsError, ValueError),
        (NoServerInstancesError, ValueError),
        (ConfigMissingValuesError, ValueError),
        (ConfigInterpolationError, ValueError),
        (ServerRefNotFoundError, ValueError),
        (ServerRefNotFoundError, AssertionError),
        (InheritPathNotFoundError, ValueError),
        (AlmostServerError, ValueError),
    ],
)
def test_errors_can_be_caught_as_what_they_were(error: type[Exception], also: type[Exception]) -> None:
    assert issubclass(error, ConfigError)
    assert issubclass(error, also)
    assert str(error("a message")) == "a message"


def test_an_argument_that_a_config_does_not_have_is_an_error_and_a_key_of_others_is_not() -> None:
    given: dict[str, Any] = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl"}

    with pytest.raises(TypeError, match=r"no argument 'num_repeat'; did you mean 'num_repeats'\?") as raised:
        RolloutCollectionConfig(**given, num_repeat=4)
    assert isinstance(raised.value, ConfigError)
    with pytest.raises(
        TypeError, match=r"RewardProfileConfig has no argument 'x', nor 'selct'; did you mean 'select'\?"
    ):
        RewardProfileConfig(rollouts_jsonl_fpath="a", x=1, selct="mean > 0")  # type: ignore[call-arg]

    assert RolloutCollectionConfig.model_validate({**given, "num_repeat": 4, "policy_model": {}}).num_repeats == 1
    assert RolloutCollectionConfig(**given, json=True).json_format is True
    assert RolloutCollectionConfig(**given, json_format=True, num_repeats=4).num_repeats == 4
    assert StatusConfig(json=True).json_format is True


class Open(BaseNeMoGymCLIConfig):
    """A config of a program elsewhere."""

    model_config = ConfigDict(extra="allow")
    name: str = ""


def test_configs_made_elsewhere_keep_what_they_say_about_further_arguments() -> None:
    class WithItsOwn(BaseNeMoGymCLIConfig):
        name: str = ""

        def __init__(self, name: str) -> None:
            super().__init__(name=name)

    assert Open(name="a", more=3).model_extra == {"more": 3}
    assert WithItsOwn("a").name == "a"
    assert pickle.loads(pickle.dumps(Open(name="a"))) == Open(name="a")
