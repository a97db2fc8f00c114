import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.data.hub import (
    Hub,
    HubConfigError,
    HubError,
    collection_of,
    download_dataset,
    explained,
    files_of_split,
    repo_id_of,
    upload_dataset,
)
from nemo_gym.errors import ConfigError
from nemo_gym.schemas.data_config import DownloadJsonlDatasetHuggingFaceConfig, UploadJsonlDatasetHuggingFaceConfig

download_dataset_from_hf = command_named("download_dataset_from_hf")
upload_dataset_to_hf = command_named("upload_dataset_to_hf")


ROWS = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]


def parquet(*rows: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()


def client(hub: Any, tmp_path: Path, token: str | None = None) -> Hub:
    return Hub(token=token, endpoint=hub.url, cache_dir=tmp_path / "hub_cache")


def rows_in(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def download(given: Hub, **options: Any) -> list[Path]:
    return download_dataset(DownloadJsonlDatasetHuggingFaceConfig.model_validate(options), given)


def test_a_split_is_read_from_its_files_whatever_their_format(hub: Any, tmp_path: Path) -> None:
    hub.publish(
        "o/parquet",
        {
            "data/test-00000-of-00002.parquet": parquet(ROWS[0]),
            "data/test-00001-of-00002.parquet": parquet(ROWS[1]),
            "data/train-00000-of-00001.parquet": parquet({"question": "no", "answer": "no"}),
        },
    )
    hub.publish("o/csv", {"test.csv": "question,answer\n1+1,2\n2+2,4\n"})
    hub.publish("o/jsonl", {"test.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS)})
    given = client(hub, tmp_path)
    for name in ("parquet", "csv", "jsonl"):
        assert list(given.rows(f"o/{name}", "test")) == ROWS


def test_download_writes_one_file_per_split(hub: Any, tmp_path: Path) -> None:
    hub.publish("o/d", {"train.jsonl": '{"a": 1}\n', "validation.jsonl": '{"a": 2}\n', "README.md": "no front matter"})

    written = download(client(hub, tmp_path), repo_id="o/d", output_dirpath="data")

    assert written == [Path("data/train.jsonl"), Path("data/validation.jsonl")]
    assert [rows_in(path) for path in written] == [[{"a": 1}], [{"a": 2}]]


def test_download_writes_one_split_or_one_raw_file_where_it_is_told(hub: Any, tmp_path: Path) -> None:
    hub.publish("o/d", {"train.jsonl": '{"a": 1}\n', "notes/x.bin": b"\x00\x01"})
    given = client(hub, tmp_path)
    assert download(given, repo_id="o/d", split="train", output_fpath="deep/t.jsonl") == [Path("deep/t.jsonl")]
    assert rows_in("deep/t.jsonl") == [{"a": 1}]
    assert download(given, repo_id="o/d", artifact_fpath="notes/x.bin", output_dirpath="raw") == [Path("raw/x.bin")]
    assert Path("raw/x.bin").read_bytes() == b"\x00\x01"


def test_a_private_data_set_needs_the_token(hub: Any, tmp_path: Path) -> None:
    hub.publish("o/d", {"train.jsonl": '{"a": 1}\n'})
    hub.private.add("o/d")
    with pytest.raises(HubConfigError, match=r"o/d.*\+hf_token="):
        list(client(hub, tmp_path).rows("o/d", "train"))
    assert list(client(hub, tmp_path, "good_token").rows("o/d", "train")) == [{"a": 1}]


def test_what_is_not_there_is_named(hub: Any, tmp_path: Path) -> None:
    hub.publish("o/d", {"train.jsonl": '{"a": 1}\n'})
    given = client(hub, tmp_path)
    with pytest.raises(HubConfigError, match="o/gone"):
        list(given.rows("o/gone", "train"))
    with pytest.raises(HubConfigError, match=r"no file that looks like the split 'test'.*train\.jsonl"):
        list(given.rows("o/d", "test"))
    with pytest.raises(HubConfigError, match=r"gone\.jsonl of the data set o/d"):
        given.file("o/d", "gone.jsonl")
    with pytest.raises(HubConfigError, match="check the name"):
        given.files("not a / name")
    hub.publish("o/pictures", {"cat.png": b""})
    with pytest.raises(HubConfigError, match="looks like a split"):
        download(given, repo_id="o/pictures", output_dirpath="data")


def test_a_hub_that_cannot_be_reached_is_no_mistake_of_the_user() -> None:
    with (
        pytest.raises(HubError, match="the data set o/d cannot be read from the hub: no route"),
        explained("the data set o/d"),
    ):
        raise ConnectionRefusedError("no route")


@pytest.mark.parametrize(
    ("files", "split", "name", "expected"),
    [
        (["data/train-0.parquet", "data/test-0.parquet"], "test", None, ["data/test-0.parquet"]),
        (["main/test-0.parquet", "socratic/test-0.parquet"], "test", "main", ["main/test-0.parquet"]),
        (["dev.jsonl", "train.jsonl"], "validation", None, ["dev.jsonl"]),
        (["everything.jsonl", "notes.txt", ".gitattributes"], "train", None, ["everything.jsonl"]),
        (["everything.jsonl"], "test", None, []),
        (["gpqa_diamond.csv", "gpqa_main.csv"], "train", "gpqa_main", ["gpqa_main.csv"]),
        (["contest/a.jsonl", "test/b.jsonl"], "test", None, ["test/b.jsonl"]),
    ],
)
def test_files_of_a_split_are_known_by_their_names(
    files: list[str], split: str, name: str | None, expected: list[str]
) -> None:
    assert files_of_split(files, split, name) == expected


CARD = """---
configs:
- config_name: hard
  data_files: hard.jsonl
- config_name: easy
  default: true
  data_files:
  - split: test
    path: [x/*.parquet, y.jsonl]
  - split: train
    path: "**/z.jsonl"
---
# A data set
"""


def test_what_the_card_says_comes_before_names() -> None:
    files = ["test.jsonl", "x/1.parquet", "y.jsonl", "deep/z.jsonl", "z.jsonl", "hard.jsonl"]
    assert files_of_split(files, "test", None, CARD) == ["x/1.parquet", "y.jsonl"]
    assert files_of_split(files, "train", None, CARD) == ["deep/z.jsonl", "z.jsonl"]
    assert files_of_split(files, "train", "hard", CARD) == ["hard.jsonl"]
    assert files_of_split(["test.jsonl"], "test", None, "---\n: [\n---\n") == ["test.jsonl"]


def upload_config(**more: Any) -> UploadJsonlDatasetHuggingFaceConfig:
    given = {
        "hf_token": "t",
        "hf_organization": "org",
        "hf_collection_name": "My Environments",
        "hf_collection_slug": "65ab",
        "input_jsonl_fpath": "train.jsonl",
        "resource_config_path": "env.yaml",
    }
    return UploadJsonlDatasetHuggingFaceConfig.model_validate(given | more)


@pytest.fixture
def environment() -> None:
    Path("env.yaml").write_text("env:\n  resources_servers:\n    my_env: {entrypoint: app.py, domain: math}\n")


def test_names_on_the_hub_follow_from_the_environment(environment: None) -> None:
    assert repo_id_of(upload_config()) == "org/Nemotron-RL-math-my_env"
    assert repo_id_of(upload_config(dataset_name="d", hf_dataset_prefix="")) == "org/math-d"
    assert collection_of(upload_config()) == "org/my-environments-65ab"


def test_upload_makes_a_private_repository_and_adds_it_to_the_collection(
    hub: Any, tmp_path: Path, environment: None
) -> None:
    Path("train.jsonl").write_text('{"responses_create_params": {"input": "q"}}\n')

    url = upload_dataset(upload_config(commit_message="first"), client(hub, tmp_path, "t"))

    assert url.startswith(hub.url)
    assert hub.created == [
        {
            "name": "Nemotron-RL-math-my_env",
            "organization": "org",
            "type": "dataset",
            **{key: value for key, value in hub.created[0].items() if key in ("private", "visibility")},
        }
    ]
    assert hub.created[0].get("private") or hub.created[0].get("visibility") == "private"
    (commit,) = hub.commits
    assert "/api/datasets/org/Nemotron-RL-math-my_env/commit/main" in commit["path"]
    header, file = commit["lines"]
    assert header["value"]["summary"] == "first"
    assert file["value"]["path"] == "train.jsonl"
    assert hub.collected == [
        (
            "/api/collections/org/my-environments-65ab/items",
            {"item": {"id": "org/Nemotron-RL-math-my_env", "type": "dataset"}},
        )
    ]


def test_upload_can_propose_instead_of_commit(hub: Any, tmp_path: Path, environment: None) -> None:
    Path("train.jsonl").write_text('{"responses_create_params": {"input": "q"}}\n')
    config = upload_config(create_pr=True, split="validation")
    assert upload_dataset(config, client(hub, tmp_path)).endswith("/discussions/1")
    assert "create_pr=1" in hub.commits[0]["query"]
    assert hub.commits[0]["lines"][1]["value"]["path"] == "validation.jsonl"


def test_rows_of_another_format_are_uploaded_as_json_lines(hub: Any, tmp_path: Path, environment: None) -> None:
    Path("rows.csv").write_text("question\n1+1\n")
    upload_dataset(upload_config(input_jsonl_fpath="rows.csv", split="test"), client(hub, tmp_path))
    file = hub.commits[0]["lines"][1]["value"]
    assert file["path"] == "test.jsonl"
    assert json.loads(base64.b64decode(file["content"])) == {"question": "1+1"}


def test_the_commands_move_data_sets(
    hub: Any, tmp_path: Path, environment: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub_cache"))
    hub.publish("o/d", {"train.jsonl": '{"a": 1}\n'})
    download_dataset_from_hf.run(["+repo_id=o/d", "+split=train", "+output_fpath=t.jsonl"])
    assert capsys.readouterr().out == "t.jsonl\n"
    assert rows_in("t.jsonl") == [{"a": 1}]
    given = upload_config(input_jsonl_fpath="t.jsonl", split="test").model_dump(exclude_none=True)
    upload_dataset_to_hf.run(
        [f"+{name}={str(value).lower() if value is False else value}" for name, value in given.items()]
    )
    assert capsys.readouterr().out.startswith(f"{hub.url}/datasets/org/")


def test_training_rows_without_parameters_are_not_uploaded(hub: Any, tmp_path: Path, environment: None) -> None:
    Path("train.jsonl").write_text('{"responses_create_params": {"input": "q"}}\n\n{"question": "q"}\n')
    with pytest.raises(ConfigError, match=r"lines 3 lack"):
        upload_dataset(upload_config(), client(hub, tmp_path))
    assert hub.commits == []


def test_an_upload_without_file_or_environment_is_refused(hub: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"input file 'train\.jsonl' not found"):
        upload_dataset(upload_config(), client(hub, tmp_path))
    Path("train.jsonl").write_text('{"responses_create_params": {}}\n')
    with pytest.raises(ConfigError, match=r"resource_config_path 'env\.yaml' not found"):
        upload_dataset(upload_config(), client(hub, tmp_path))
    Path("env.yaml").write_text("a: {b: 1}\n")
    with pytest.raises(ConfigError, match="defines no resources server"):
        upload_dataset(upload_config(), client(hub, tmp_path))


@pytest.mark.parametrize("artifact", ["../../secret.jsonl", "/etc/passwd", "data/..", "data/../../x.jsonl"])
def test_a_file_that_leads_out_of_the_data_set_is_neither_asked_for_nor_written(
    hub: Any, tmp_path: Path, artifact: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    with pytest.raises(SystemExit) as ended:
        download_dataset_from_hf.run(
            ["+repo_id=o/d", f"+artifact_fpath={artifact}", f"+output_dirpath={tmp_path / 'out'}"]
        )

    assert ended.value.code == 2
    assert "must be a path below its folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_hub_that_lists_files_outside_of_the_data_set_is_not_followed(hub: Any, tmp_path: Path) -> None:
    hub.publish("o/evil", {"data/../../../train.jsonl": '{"a": 1}\n'})
    with pytest.raises(ConfigError, match="must be a path below its folder"):
        list(client(hub, tmp_path).rows("o/evil", "train"))


@pytest.mark.parametrize("repo_id", ["../../etc", "o/../d", "/etc/passwd", "a/b/c"])
def test_a_data_set_is_named_not_located(hub: Any, tmp_path: Path, repo_id: str) -> None:
    with pytest.raises(ConfigError, match="check the name"):
        download(client(hub, tmp_path), repo_id=repo_id, output_dirpath=str(tmp_path))
