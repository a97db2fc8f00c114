"""`ng_prepare_benchmark`: make the data of benchmarks."""

from nemo_gym.cli.command import command, whole_config
from nemo_gym.schemas.data_config import PrepareBenchmarkConfig


@command(PrepareBenchmarkConfig, needs_model=False, offline=True)
def main(config: PrepareBenchmarkConfig) -> None:
    r"""Run the prepare script of every benchmark in the configuration, which downloads or generates its rows.

    All scripts are checked before the first is run. Rows go to the path that the benchmark's data set names, below the
    current folder.

    Examples:
        ng_prepare_benchmark "+config_paths=[benchmarks/gsm8k/config.yaml]"
        ng_prepare_benchmark "+config_paths=[benchmarks/gsm8k/config.yaml]" +source=my_download/test.parquet
        ng_prepare_benchmark "+config_paths=[benchmarks/gsm8k/config.yaml,benchmarks/aime24/config.yaml]" \
            +num_prepare_benchmark_processes=2 +use_cached_prepared_benchmarks=true
    """
    from nemo_gym.benchmarks import prepare_benchmarks

    for name, path in prepare_benchmarks(whole_config(), config).items():
        print(f"{name}: {path}")
