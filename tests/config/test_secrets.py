"""What is masked, what is not."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.config.secrets import (
    holds_secret,
    is_secret_key,
    mask_message,
    mask_secrets,
    mask_tree,
    mask_url_passwords,
)


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "hf_token",
        "HF_TOKEN",
        "hfToken",
        "mlflow_tracking_token",
        "password",
        "db_password",
        "dbPassword",
        "passwd",
        "secret",
        "session_secret",
        "clientSecret",
        "credential",
        "credentials",
        "aws-credentials",
        "api_key",
        "apiKey",
        "APIKey",
        "policy_api_key",
        "OPENAI_API_KEY",
        "x-api-key",
        "apikey",
        "api_key_2",
        "policy_api_keys",
        "aws_secret_access_key",
        "accessKey",
        "private_key",
        "key",
        "keys",
        "tavily_key",
        "subscription_key",
        "azureSubscriptionKey",
        "secret_key",
        "Authorization",
        "authorization",
        "Proxy-Authorization",
    ],
)
def test_keys_that_name_a_secret(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key",
    [
        "max_output_tokens",
        "tokenizer",
        "tokenizer_path",
        "return_token_id_information",
        "token_id_capture",
        "prompt_token_ids",
        "num_tokens",
        "primary_key",
        "keyboard",
        "monkey",
        "key_metrics",
        "api_key_name",
        "passwordless",
        "secretary",
        "authorization_url",
        "allow_unknown_keys",
        "_delete_key",
        "",
        5,
    ],
)
def test_keys_that_name_none(key: object) -> None:
    assert not is_secret_key(key)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://user:pass@host/path", "http://user:****@host/path"),
        ("redis://:pass@host:6379/0", "redis://:****@host:6379/0"),
        ("postgresql+psycopg://u:p%40ss@h/db?x=1", "postgresql+psycopg://u:****@h/db?x=1"),
        ("http://u:p@ss@host", "http://u:****@host"),
        ("http://a:b@c,https://d:e@f/", "http://a:****@c,https://d:****@f/"),
        ("see http://u:p@h for more", "see http://u:****@h for more"),
        ("https://h/v1?api_key=abc&x=1", "https://h/v1?api_key=****&x=1"),
        ("https://h/v1?x=1&access_token=abc#top", "https://h/v1?x=1&access_token=****#top"),
        ("http://host:8000/v1", "http://host:8000/v1"),
        ("http://user@host/", "http://user@host/"),
        ("https://h/a:b@c", "https://h/a:b@c"),
        ("user:pass@host", "user:pass@host"),
    ],
)
def test_secrets_inside_urls(text: str, masked: str) -> None:
    assert mask_url_passwords(text) == masked


def test_secrets_are_masked_at_any_depth_and_the_rest_stays() -> None:
    tree = {
        "policy_api_key": "k",
        "max_output_tokens": 512,
        "list": [{"password": "p"}, "http://u:p@h", {"urls": ["http://u:p@h"]}],
        "api_keys": ["a", "b"],
        "credentials": {"user": "u", "nested": {"x": 1}},
        "headers": {"Authorization": "Bearer x", "Accept": "json"},
        "curl": ["-H", "Authorization: Bearer x", 'authorization="y" and more'],
        "pin_password": 1234,
    }

    assert mask_tree(tree) == {
        "policy_api_key": "****",
        "max_output_tokens": 512,
        "list": [{"password": "****"}, "http://u:****@h", {"urls": ["http://u:****@h"]}],
        "api_keys": ["****", "****"],
        "credentials": {"user": "****", "nested": {"x": "****"}},
        "headers": {"Authorization": "****", "Accept": "json"},
        "curl": ["-H", "Authorization: ****", 'authorization="****" and more'],
        "pin_password": "****",
    }


def test_empty_values_stay_as_they_are() -> None:
    tree: dict[str, Any] = {"api_key": "", "token": None, "password": "???", "secrets": [], "credentials": {}}

    assert mask_tree(tree) == tree


def test_what_a_secret_key_refers_to_is_secret_however_far() -> None:
    tree = {
        "wandb_api_key": "${mine}",
        "mine": "${from.list[0]}",
        "from": {"list": ["sk-1", "public"]},
        "model": {"api_key": "${.fallback}", "fallback": "sk-2", "token": "${..above}"},
        "above": "sk-3",
        "credentials": "${login}",
        "login": {"user": "u", "pin": "${pin}"},
        "pin": 1234,
        "public": "text",
    }

    assert mask_tree(tree) == {
        "wandb_api_key": "${mine}",
        "mine": "${from.list[0]}",
        "from": {"list": ["****", "public"]},
        "model": {"api_key": "${.fallback}", "fallback": "****", "token": "${..above}"},
        "above": "****",
        "credentials": "${login}",
        "login": {"user": "****", "pin": "${pin}"},
        "pin": "****",
        "public": "text",
    }


def test_nothing_secret_is_left_once_a_masked_config_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_API_KEY", "hunter2")
    monkeypatch.setenv("TEST_PASSWORD", "hunter2")
    config = OmegaConf.create(
        {
            "api_key": "${oc.env:TEST_API_KEY}",
            "header": "Bearer ${api_key}",
            "innocent": "${oc.env:TEST_PASSWORD}",
            "url": "http://u:${oc.env:TEST_PASSWORD}@h",
            "other": "${innocent}",
        }
    )

    mask_secrets(config)

    resolved: Any = OmegaConf.to_container(config, resolve=True)
    assert "hunter2" not in str(resolved)
    assert resolved["header"] == "Bearer ****"


def test_secret_keys_that_refer_in_a_circle_do_no_harm() -> None:
    tree = {"token": "${a}", "a": "${b}", "b": "${a}"}

    assert mask_tree(tree) == tree


def test_a_config_is_masked_in_place_whatever_its_flags() -> None:
    config = OmegaConf.create({"a": {"token": "t", "list": [{"password": "p"}]}, "ref": "${a}"})
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config, True)
    inner = config.a

    mask_secrets(config)

    assert config == {"a": {"token": "****", "list": [{"password": "****"}]}, "ref": config.a}
    assert inner.token == "****"


@pytest.mark.parametrize(
    ("tree", "secret"),
    [
        ({"a": {"b": [{"token": "t"}]}}, True),
        ({"url": "http://u:p@h"}, True),
        ({"api_key": "${mine}", "mine": "x"}, True),
        ({"api_key": "", "token": None, "max_output_tokens": 5, "url": "http://h"}, False),
    ],
)
def test_whether_a_config_holds_a_secret(tree: dict[str, Any], secret: bool) -> None:
    assert holds_secret(OmegaConf.create(tree)) is secret


def test_a_message_that_quotes_a_secret_is_masked_wherever_the_secret_stands() -> None:
    tree = {
        "a": [{"api_key": "hunter22"}],
        "hf_token": "${mine}",
        "mine": "s3cret-text",
        "other": "harmless",
        "x_token": "no",
    }

    text = mask_message("hunter22, s3cret-text and harmless, no more", tree)

    assert text == "****, **** and harmless, no more"


def test_where_a_config_is_shown_text_is_masked_under_every_key_that_may_name_a_secret() -> None:
    tree: dict[str, Any] = {
        "tavily_key": "t",
        "subscription_key": "s",
        "key": "k",
        "keys": ["a", {"name": "b"}],
        "token_file": "path",
        "primary_key": "id",
        "access_tokens": ["x", "y"],
        "KEYFILE": "path",
        "max_output_tokens": 5,
        "return_token_id_information": True,
        "stop_token_ids": [1, 2],
        "token_id_capture": {"enabled": True, "dir": "d"},
        "tokenizer": "org/name",
        "tokenization": "bpe",
        "keywords": ["a"],
    }

    assert mask_tree(tree) == {
        **tree,
        **dict.fromkeys(("tavily_key", "subscription_key", "key", "token_file", "primary_key", "KEYFILE"), "****"),
        "keys": ["****", {"name": "****"}],
        "access_tokens": ["****", "****"],
    }
