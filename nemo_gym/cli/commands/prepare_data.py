"""`ng_prepare_data`: check, measure and collate the data sets that agents declare."""

from nemo_gym.cli.command import command, whole_config
from nemo_gym.schemas.data_config import TrainDataProcessorConfig


@command(TrainDataProcessorConfig, needs_model=False, offline=True)
def main(config: TrainDataProcessorConfig) -> None:
    r"""Check every row of the data sets that the configured agents declare, and write one file per kind of data.

    Each row gets the name of its agent, benchmarks their prompt, and rows are repeated as their data set says. What
    the rows are like is written to a metrics file beside each data set; one that is there already and says something
    else is a conflict. Rows that cannot be rolled out, because of their parameters or because the environment would
    refuse them, are listed with file and line, and nothing is written.

    Examples:
        ng_prepare_data "+config_paths=[resources_servers/my_env/configs/my_env.yaml]" \
            +mode=example_validation +output_dirpath=results/my_env
        ng_prepare_data "+config_paths=[resources_servers/my_env/configs/my_env.yaml]" \
            +mode=train_preparation +output_dirpath=results/my_env +should_download=true
    """
    from nemo_gym.launch.server_checks import OfflineRowCheck
    from nemo_gym.train_data_utils import TrainDataProcessor

    everything = whole_config()
    for path in TrainDataProcessor(row_check=OfflineRowCheck(everything)).run(everything):
        print(path)
