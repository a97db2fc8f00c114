"""`ng_init_resources_server`: a new environment to begin with."""

from nemo_gym.cli.command import command
from nemo_gym.schemas.authoring_config import InitResourcesServerConfig


@command(InitResourcesServerConfig, reads_config=False)
def main(config: InitResourcesServerConfig) -> None:
    """Write a small environment that works: server, config, example rows, tests and a README to make your own.

    Examples:
        ng_init_resources_server +entrypoint=resources_servers/my_env
    """
    from nemo_gym.cli.scaffold import create_resources_server

    folder = create_resources_server(config.entrypoint)
    if folder is None:
        print(f"Folder already exists: {config.entrypoint}. Nothing was written.")
        return
    print(f"Wrote {config.entrypoint}:")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"  {path.relative_to(folder)}")
    print(f"Its tests: ng_test +entrypoint={config.entrypoint}")
