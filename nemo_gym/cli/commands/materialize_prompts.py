"""`ng_materialize_prompts`: fill a prompt template for every row of a data set."""

from nemo_gym.cli.command import command
from nemo_gym.prompt import MaterializePromptsConfig, materialize_prompts


@command(MaterializePromptsConfig, reads_config=False)
def main(config: MaterializePromptsConfig) -> None:
    """Fill a prompt template with the fields of every row and write the rows with their messages.

    Rows may not bring a `responses_create_params.input` of their own. All rows are checked before anything is
    written.

    Examples:
        ng_materialize_prompts +input_jsonl_fpath=in.jsonl +prompt_config=prompt.yaml +output_jsonl_fpath=out.jsonl
    """
    count = materialize_prompts(config.input_jsonl_fpath, config.prompt_config, config.output_jsonl_fpath)
    print(f"{count} rows with their prompts are in {config.output_jsonl_fpath}")
