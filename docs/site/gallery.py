"""The gallery: every environment, agent, model server and benchmark, from their READMEs, settings and configs."""

from importlib import import_module
from pathlib import Path

from pydantic import BaseModel

from docs.site.fields import fields_table
from docs.site.markdown import block, contents, first_sentence, page, table
from nemo_gym.paths import PARENT_DIR
from nemo_gym.schemas.server_config import BaseRunServerInstanceConfig
from nemo_gym.servers.base import one_server_class

FOLDER = "gallery"
KINDS = {
    "resources_servers": ("environments", "Environments", "An environment gives tasks, may give tools, and scores."),
    "responses_api_agents": ("agents", "Agents", "An agent attempts a task: it asks the model and calls the tools."),
    "responses_api_models": ("models", "Model servers", "A model server answers for a model, whatever API that has."),
    "benchmarks": ("benchmarks", "Benchmarks", "A benchmark is a published test set with its environment and prompt."),
}


def modules(kind: str) -> list[Path]:
    """The folders of one kind that have a README."""
    return sorted(readme.parent for readme in (PARENT_DIR / kind).glob("*/README.md"))


def page_of(readme: str) -> str | None:
    """The page that shows a README, given as a path below the root; None for other files."""
    kind, _, rest = readme.partition("/")
    name, _, file = rest.partition("/")
    return f"{FOLDER}/{KINDS[kind][0]}/{name}.md" if kind in KINDS and file in ("", "README.md") else None


def pages() -> dict[str, tuple[str, Path]]:
    """Path, text and the file whose links the text has; index pages have no such file but the folder's own."""
    made: dict[str, tuple[str, Path]] = {}
    for kind, (folder, heading, about) in KINDS.items():
        rows = []
        for module in modules(kind):
            readme = (module / "README.md").read_text(encoding="utf-8")
            made[f"{FOLDER}/{folder}/{module.name}.md"] = (_page(module, readme), module / "README.md")
            rows.append((f"[{module.name}]({module.name}.md)", first_sentence(readme)))
        names = [module.name for module in modules(kind)]
        made[f"{FOLDER}/{folder}/index.md"] = (
            page(
                f"# {heading}",
                about,
                table(("Name", ""), rows),
                contents(names).replace("\n\n", "\n:hidden:\n\n", 1),
            ),
            Path(),
        )
    listed = [f"- [{heading}]({folder}/index.md): {about}" for folder, heading, about in KINDS.values()]
    entries = [f"{folder}/index" for folder, *_ in KINDS.values()]
    made[f"{FOLDER}/index.md"] = (page("# Gallery", "What comes along.", "\n".join(listed), contents(entries)), Path())
    return made


def _page(module: Path, readme: str) -> str:
    parts = [readme]
    config_class = _config_class(module)
    if config_class is not None:
        settings = fields_table(config_class, without=BaseRunServerInstanceConfig.model_fields)
        if settings:
            parts += ["## Every setting", "Keys of its block in a config file.", settings]
    configs = [module / "config.yaml"] if module.parent.name == "benchmarks" else sorted(module.glob("configs/*.yaml"))
    parts.append("## Config files" if configs else "")
    for config in configs:
        text = config.read_text(encoding="utf-8")
        parts += [f"`{config.relative_to(PARENT_DIR)}`", block(text, "yaml")]
    return page(*parts)


def _config_class(module: Path) -> type[BaseModel] | None:
    if not (module / "app.py").is_file():
        return None
    server = one_server_class(import_module(f"{module.parent.name}.{module.name}.app"))
    annotation = server.model_fields["config"].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
