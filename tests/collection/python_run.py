"""A program that collects rollouts from Python, with the arguments of `ng_collect_rollouts`: `python -m` it."""

import asyncio
import json
import logging
import sys
from typing import Any

from omegaconf import OmegaConf

from nemo_gym.global_config import GlobalConfigDictParserConfig, get_global_config_dict
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper


def main() -> None:
    """Print the keys of all results; Ctrl-C ends it as it ends any program."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = OmegaConf.from_dotlist([argument.removeprefix("+") for argument in sys.argv[1:]])
    get_global_config_dict(GlobalConfigDictParserConfig(initial_global_config_dict=given, skip_load_from_cli=True))
    options: Any = OmegaConf.to_container(given)
    try:
        results = asyncio.run(
            RolloutCollectionHelper().run_from_config(RolloutCollectionConfig.model_validate(options))
        )
    except KeyboardInterrupt:
        sys.exit(130)
    sys.stdout.write(json.dumps([(it["_ng_task_index"], it["_ng_rollout_index"]) for it in results]))


if __name__ == "__main__":
    main()
