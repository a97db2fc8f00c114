"""Configurations of any shape: they become a config, or one message says what is wrong; never a traceback."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.cli.command import command_named
from nemo_gym.config.secrets import mask_tree
from tests.fuzz.bad_values import SCALARS, TEXT, trees
from tests.fuzz.conftest import Done, Run

dump_config = command_named("dump_config")
validate = command_named("validate")


NAMES = st.sampled_from(
    [
        "responses_api_models",
        "resources_servers",
        "responses_api_agents",
        "simple_agent",
        "entrypoint",
        "host",
        "port",
        "name",
        "type",
        "model_server",
        "datasets",
        "config_paths",
        "head_server",
        "default_host",
        "port_range_low",
        "port_range_high",
        "disallowed_ports",
        "policy_model",
        "policy_base_url",
        "policy_api_key",
        "auth_token",
        "_copy",
        "_inherit_from",
        "_delete_key",
        "use_absolute_ip",
        "dry_run",
        "verbose",
        "results_dir",
        "cache_dir",
        "num_workers",
        "num_replicas",
        "session_secret",
        "run_id",
        "head_server_deps",
        "python_version",
        "a",
        "b",
        "a.b",
        "a[0]",
        "jsonl_fpath",
        "num_repeats",
        "license",
        "http_total_timeout_s",
        "allow_unknown_keys",
        "error_on_almost_servers",
        "domain",
    ]
)
KEYS = st.one_of(NAMES, NAMES, NAMES, TEXT, st.integers(-1, 3), st.booleans(), st.none())
CONFIGS = st.dictionaries(KEYS, trees(KEYS), max_size=6)
SERVERS = st.dictionaries(
    st.sampled_from(["one", "two", "policy_model"]),
    st.dictionaries(
        st.sampled_from(["responses_api_models", "resources_servers", "responses_api_agents"]),
        st.dictionaries(st.sampled_from(["simple_agent", "mine", "../x"]), trees(KEYS), min_size=1, max_size=2),
        min_size=1,
        max_size=2,
    ),
    max_size=3,
)


def check(done: Done) -> None:
    assert done.exit_code in (0, 2), done
    if done.exit_code:
        assert "Error: " in done.stderr
        assert done.stderr.rpartition("Error: ")[2].strip()
    assert "Traceback" not in done.stderr


def dumped(config: Any) -> str:
    return yaml.dump(config, allow_unicode=False)


@given(base=CONFIGS, servers=SERVERS)
def test_a_file_of_any_shape_is_understood_or_refused(run: Run, base: dict[Any, Any], servers: dict[Any, Any]) -> None:
    Path("config.yaml").write_text(dumped({**base, **servers}))

    check(run(dump_config, "+config_paths=[config.yaml]"))


@given(
    content=st.one_of(
        st.binary(max_size=60),
        st.lists(TEXT, max_size=5).map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")),
    )
)
def test_a_file_of_any_bytes_is_understood_or_refused(run: Run, content: bytes) -> None:
    Path("config.yaml").write_bytes(content)

    check(run(validate, "+config_paths=[config.yaml]"))


@given(env=st.one_of(CONFIGS.map(dumped), TEXT.filter(lambda text: text.isprintable())))
def test_an_env_file_of_any_shape_is_understood_or_refused(run: Run, env: str) -> None:
    Path("env.yaml").write_text(env)

    check(run(dump_config, "+a=1", "+allow_unknown_keys=true"))


VALUES = st.one_of(SCALARS.map(str), TEXT)
ARGUMENTS = st.one_of(
    TEXT,
    st.builds(
        lambda mark, key, value: f"{mark}{key}={value}",
        st.sampled_from(["+", "++", "~", "", "-", "--", "+++"]),
        st.one_of(NAMES, st.lists(NAMES, min_size=2, max_size=3).map(".".join), TEXT),
        st.one_of(VALUES, st.lists(VALUES, max_size=3).map(lambda many: f"[{','.join(many)}]")),
    ),
)


@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=4))
def test_arguments_of_any_shape_are_understood_or_refused(run: Run, arguments: list[str]) -> None:
    (Path("env.yaml")).unlink(missing_ok=True)
    check(run(dump_config, *(argument for argument in arguments if "help" not in argument and argument != "-h")))


SECRET = "PLANTED"
HELD = st.sampled_from(["policy_api_key", "auth_token", "session_secret"]).flatmap(
    lambda key: st.sampled_from(
        [{key: SECRET}, {"one": {"responses_api_models": {"mine": {key: SECRET}}}}, {"a": [{key: SECRET}]}]
    )
)


@given(base=CONFIGS, held=HELD)
def test_a_secret_is_shown_by_neither_the_config_nor_what_is_wrong_with_it(
    run: Run, base: dict[Any, Any], held: dict[str, Any]
) -> None:
    Path("config.yaml").write_text(dumped({**base, **held}))

    done = run(dump_config, "+config_paths=[config.yaml]")

    assert SECRET not in done.stdout + done.stderr


@given(tree=trees(KEYS))
def test_masking_keeps_the_shape_and_is_done_once(tree: Any) -> None:
    masked = mask_tree(tree)

    assert mask_tree(masked) == masked or masked != masked  # nan is not itself
    assert type(masked) is type(tree) or masked == "****"
