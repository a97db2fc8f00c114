import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.benchmarks import (
    BENCHMARKS_DIR,
    BenchmarkConfig,
    PrepareBenchmarkConfig,
    config_name,
    find_benchmark_configs,
    list_benchmarks,
    matches,
    prepare_benchmarks,
    search_benchmarks,
)
from nemo_gym.errors import ConfigError, GymError

ARITH = """
arith_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: arith_server}
      model_server: {type: responses_api_models, name: policy_model}
      datasets:
        - name: arith
          type: benchmark
          jsonl_fpath: benchmarks/arith/data/arith.jsonl
          prepare_script: benchmarks/arith/prepare.py
          prompt_config: benchmarks/arith/p.yaml
          num_repeats: 8
        - {name: example, type: example, jsonl_fpath: e.jsonl}
arith_server:
  resources_servers:
    adder: {entrypoint: app.py, domain: math, description: Sums for children}
"""
PREPARE = """
from pathlib import Path

OUTPUT = Path("benchmarks/{name}/data/{name}.jsonl")

def prepare(rows=1, source=None):
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text('{{"question": "q", "source": "%s"}}\\n' % source * rows)
    return OUTPUT
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file below `benchmarks` in the current folder, or in another one."""

    def file(path: str, text: str, root: Path = tmp_path) -> Path:
        target = root / "benchmarks" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    return file


def arith(name: str) -> str:
    return ARITH.replace("arith", name)


def configured(*names: str) -> Any:
    return OmegaConf.merge(*(OmegaConf.create(arith(name)) for name in names))


def prepare(config: Any, **options: Any) -> dict[str, Path]:
    return prepare_benchmarks(config, PrepareBenchmarkConfig.model_validate(options))


def test_a_config_with_one_benchmark_data_set_is_a_benchmark(write: Write) -> None:
    write("arith/config.yaml", ARITH)
    benchmark = BenchmarkConfig.from_config_path(Path("benchmarks/arith/config.yaml"))
    assert benchmark is not None
    assert benchmark.model_dump(mode="json") == {
        "name": "arith",
        "path": "benchmarks/arith/config.yaml",
        "agent_name": "arith_agent",
        "num_repeats": 8,
        "dataset": {
            "name": "arith",
            "type": "benchmark",
            "jsonl_fpath": "benchmarks/arith/data/arith.jsonl",
            "prepare_script": "benchmarks/arith/prepare.py",
            "prompt_config": "benchmarks/arith/p.yaml",
            "num_repeats": 8,
        },
    }
    assert (benchmark.domain, benchmark.description) == ("math", "Sums for children")
    assert benchmark.resources_server == "adder"


def test_none_is_no_benchmark_and_two_are_too_many() -> None:
    none = OmegaConf.create({"x": {"resources_servers": {"x": {"entrypoint": "app.py", "domain": "math"}}}})
    assert BenchmarkConfig.from_initial_config_dict(Path("c.yaml"), none) is None
    with pytest.raises(AssertionError, match=r"c\.yaml has 2 benchmark data sets.*'arith'.*'other'"):
        BenchmarkConfig.from_initial_config_dict(Path("c.yaml"), configured("arith", "other"))


def test_values_that_are_not_set_matter_only_to_those_who_run_it(write: Write) -> None:
    path = write("arith/config.yaml", ARITH.replace("Sums for children", "'${somewhere.else}'"))
    with pytest.raises(ConfigError, match=r"somewhere\.else"):
        BenchmarkConfig.from_config_path(path)
    benchmark = BenchmarkConfig.from_config_path(path, strict=False)
    assert benchmark is not None
    assert benchmark.name == "arith"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("mathy/config.yaml", "mathy"),
        ("mathy/configs/hard.yaml", "mathy/configs/hard"),
        ("mathy/v2/config.yaml", "mathy/v2/config"),
        ("mathy.yaml", "mathy"),
    ],
)
def test_a_config_is_named_after_its_path(path: str, name: str) -> None:
    assert config_name(Path(path)) == name


def test_benchmarks_are_found_by_what_their_configs_say(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    write("quoted/config.yaml", ARITH.replace("type: benchmark", 'type: "benchmark"'))
    write("flow/configs/hard.yaml", arith("flow"))
    write("prompts/p.yaml", "user: 'type: benchmark'\n# type: benchmark\n")
    write("odd/config.yaml", "a: [\n")
    with caplog.at_level(logging.WARNING, "nemo_gym"):
        found = list_benchmarks()
    assert {"quoted", "flow/configs/hard"} <= set(found)
    assert "odd" not in found
    assert "prompts/p" not in find_benchmark_configs()
    assert "the benchmark odd is left out" in caplog.text


def test_a_benchmark_of_an_earlier_root_hides_its_namesake(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = tmp_path / "extra"
    mine = write("arith/config.yaml", ARITH.replace("num_repeats: 8", "num_repeats: 2"), extra)
    write("arith/config.yaml", ARITH)
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(extra))
    assert find_benchmark_configs()["arith"] == mine
    assert list_benchmarks()["arith"].num_repeats == 2


def test_every_benchmark_of_this_distribution_is_listed_and_complete() -> None:
    names = {path.name for path in BENCHMARKS_DIR.iterdir() if (path / "config.yaml").is_file()}
    found = list_benchmarks()
    assert {"aime24", "gsm8k", "gpqa", "mmlu_pro", "reasoning_gym_mini"} <= names == set(found)
    for name, benchmark in found.items():
        assert benchmark.agent_name.startswith(f"{name}_")
        assert benchmark.description
        assert benchmark.domain
        assert benchmark.dataset.prepare_script is not None
        assert (BENCHMARKS_DIR.parent / benchmark.dataset.prepare_script).is_file()
        assert benchmark.dataset.prompt_config is not None
        assert (BENCHMARKS_DIR.parent / benchmark.dataset.prompt_config).is_file()


def test_benchmarks_are_searched_loosely(write: Write) -> None:
    write("arith/config.yaml", ARITH)
    every = {"arith": list_benchmarks()["arith"]}
    for query in ("ARI", "arithh", "math", "adder", "children", None, ""):
        assert list(search_benchmarks(every, query)) == ["arith"], query
    assert search_benchmarks(every, "chemistry") == {}


@pytest.mark.parametrize(
    ("query", "fields", "expected"),
    [
        ("aime", ["AIME_24"], True),
        ("matth", ["word_math-problems"], True),
        ("zebra", ["word_math-problems"], False),
        ("a", ["", ""], False),
    ],
)
def test_a_query_matches_parts_and_near_misses(query: str, fields: list[str], expected: bool) -> None:
    assert matches(query, fields) is expected


def test_preparing_runs_the_script_and_says_where_the_rows_are(write: Write) -> None:
    write("arith/prepare.py", PREPARE.format(name="arith"))
    assert prepare(configured("arith")) == {"arith": Path("benchmarks/arith/data/arith.jsonl")}
    assert len(Path("benchmarks/arith/data/arith.jsonl").read_text().splitlines()) == 1


def test_scripts_get_their_arguments_and_a_local_source(write: Write) -> None:
    write("arith/prepare.py", PREPARE.format(name="arith"))
    prepare(configured("arith"), prepare_script_args={"rows": 3}, source="mine.jsonl")
    rows = [json.loads(line) for line in Path("benchmarks/arith/data/arith.jsonl").read_text().splitlines()]
    assert [row["source"] for row in rows] == ["mine.jsonl"] * 3


def test_scripts_are_found_in_the_search_roots_and_write_below_the_current_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, here = tmp_path / "installed", tmp_path / "here"
    here.mkdir()
    script = "from benchmarks.arith.rows import TEXT\n" + PREPARE.format(name="arith")
    write("arith/prepare.py", script, installed)
    write("arith/rows.py", "TEXT = 1\n", installed)
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(installed))
    monkeypatch.chdir(here)

    prepare(configured("arith"))

    assert (here / "benchmarks/arith/data/arith.jsonl").is_file()
    assert not (installed / "benchmarks/arith/data").exists()


def test_a_script_that_writes_beside_itself_is_fine(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, here = tmp_path / "installed", tmp_path / "here"
    here.mkdir()
    beside = PREPARE.format(name="arith").replace(
        'Path("benchmarks/arith/data/arith.jsonl")', 'Path(__file__).parent / "data" / "arith.jsonl"'
    )
    write("arith/prepare.py", beside, installed)
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(installed))
    monkeypatch.chdir(here)
    assert prepare(configured("arith")) == {"arith": installed / "benchmarks/arith/data/arith.jsonl"}


def test_several_benchmarks_are_prepared_by_several_processes_with_one_configuration(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = (
        "import os; from nemo_gym.global_config import get_hf_token\n"
        "    OUTPUT.write_text(f'{get_hf_token()} {os.getpid()}')\n    return OUTPUT"
    )
    for name in ("arith", "other"):
        write(f"{name}/prepare.py", PREPARE.format(name=name).replace("return OUTPUT", report))
    config = OmegaConf.merge(configured("arith", "other"), {"hf_token": "secret"})
    monkeypatch.setattr("nemo_gym.global_config._GLOBAL_CONFIG_DICT", config)

    paths = prepare(config, num_prepare_benchmark_processes=2)

    tokens, processes = zip(*(path.read_text().split() for path in paths.values()), strict=True)
    assert tokens == ("secret", "secret")
    assert str(os.getpid()) not in processes


def test_data_that_is_there_can_be_left_alone(write: Write) -> None:
    write("arith/data/arith.jsonl", "kept\n")
    prepared = prepare(configured("arith"), use_cached_prepared_benchmarks=True)  # there is not even a script
    assert prepared["arith"].read_text() == "kept\n"


def test_nothing_is_run_unless_everything_can_be(write: Write) -> None:
    write("arith/prepare.py", PREPARE.format(name="arith"))
    write("broken/prepare.py", "import no_such_library\n")
    write("empty/prepare.py", "rows = 1\n")
    with pytest.raises(ConfigError) as caught:
        prepare(configured("arith", "broken", "empty", "gone"), prepare_script_args={"rows": 1, "colour": "red"})
    message = str(caught.value)
    assert "Nothing was prepared" in message
    assert "missing a valid prepare script" in message
    assert "gone: benchmarks/gone/prepare.py (looked for" in message
    assert "cannot be loaded: ModuleNotFoundError: No module named 'no_such_library'" in message
    assert "missing the prepare function" in message
    assert "'colour'; `prepare` of" in message
    assert "takes rows, source" in message
    assert not Path("benchmarks/arith/data").exists()


def test_rows_must_go_where_the_data_set_says(write: Write) -> None:
    write("arith/prepare.py", PREPARE.format(name="other"))
    with pytest.raises(
        AssertionError, match="Expected the actual prepared dataset output fpath to match the jsonl_fpath"
    ):
        prepare(configured("arith"))
    write("arith/prepare.py", "def prepare():\n    return 'benchmarks/arith/data/arith.jsonl'\n")
    with pytest.raises(GymError, match="there is no such file"):
        prepare(configured("arith"))
    write("arith/prepare.py", "def prepare():\n    return None\n")
    with pytest.raises(ConfigError, match="must return the path"):
        prepare(configured("arith"))


def test_a_script_that_fails_is_named(write: Write) -> None:
    write("arith/prepare.py", "def prepare():\n    raise KeyError('question')\n")
    with pytest.raises(GymError, match=r"arith/prepare\.py failed: KeyError: 'question'") as caught:
        prepare(configured("arith"))
    assert not isinstance(caught.value, ConfigError)


def test_a_config_without_a_benchmark_is_refused_with_what_it_has(agent_config: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"No benchmark config found.*Inspected server instances \[one, two\]"):
        prepare(OmegaConf.create(agent_config(one=[], two=[])))
    with pytest.raises(ConfigError, match="no agent instances"):
        prepare(OmegaConf.create({}))


def test_a_source_is_for_one_benchmark() -> None:
    with pytest.raises(ConfigError, match="these are configured: arith, other"):
        prepare(configured("arith", "other"), source="x.jsonl")


def test_an_agent_has_one_benchmark_at_most(agent_config: Callable[..., dict[str, Any]]) -> None:
    def dataset(name: str) -> dict[str, Any]:
        return {"name": name, "type": "benchmark", "jsonl_fpath": f"{name}.jsonl", "prepare_script": "p.py"}

    with pytest.raises(AssertionError, match=r"'two_in_one' has 2 benchmark data sets.*'a', 'b'"):
        prepare(OmegaConf.create(agent_config(two_in_one=[dataset("a"), dataset("b")])))


def test_a_benchmark_whose_rows_are_there_needs_no_script(write: Write) -> None:
    unscripted = OmegaConf.create(re.sub(r".*prepare_script.*\n", "", ARITH))
    with pytest.raises(ConfigError, match=r"without rows and without a `prepare_script`.*\n.*arith: write benchmarks/"):
        prepare(unscripted)
    rows = write("arith/data/arith.jsonl", "{}\n")

    assert {name: path.resolve() for name, path in prepare(unscripted).items()} == {"arith": rows}


def test_a_benchmark_that_cannot_be_listed_is_left_out_with_the_whole_reason(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    write("arith/config.yaml", ARITH.replace("num_repeats: 8", "num_repeats: none"))

    assert "arith" not in list_benchmarks()
    assert "the benchmark arith is left out" in caplog.text
    assert "num_repeats: Input should be a valid integer" in caplog.text
