"""PUBLIC: preparing the data sets that agents declare, as a story.

`TrainDataProcessor.run` finds the data sets in scope, gets what is missing, checks and measures every
row, and writes one file per kind of data. Rows that cannot be rolled out end it before anything is
written.  A row is looked at after its prompt is filled in, or its `messages` turned into parameters:
that is what the model will be asked. Where the data comes from is the business of `nemo_gym.data`.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from nemo_gym.config.instances import find_instances
from nemo_gym.data.declared import DeclaredDataset, agents_in_scope, datasets_of
from nemo_gym.data.hub import MissingDatasetError, missing_of, obtain, validate_backend_credentials
from nemo_gym.data.metrics_files import (
    Accumulator,
    AvgMinMax,
    DatasetMetrics,
    FieldMetrics,
    MetricsConflictError,
    MetricsFiles,
    StringMetrics,
    Texts,
    scalars,
    writing_to,
)
from nemo_gym.data.row_shapes import ChatRowError, Objections, RowShapes, params_from_chat
from nemo_gym.errors import ConfigError, listed
from nemo_gym.jsonl import json_type, malformation, parse, refusal_by_servers
from nemo_gym.keys import AGENT_REF_KEY_NAME, AGENTS_TYPE, RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.paths import resolve_for_reading
from nemo_gym.prompt import (
    PromptAttributeError,
    PromptConfig,
    PromptFieldError,
    PromptTemplateError,
    apply_prompt_to_row,
    has_own_input,
)
from nemo_gym.row_files import iter_row_lines
from nemo_gym.schemas.data_config import DataType, TrainDataProcessorConfig
from nemo_gym.schemas.openai_responses import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.schemas.run_requests import RowFault, unknown_parameter
from nemo_gym.schemas.server_config import ServerInstanceConfig

logger = logging.getLogger(__name__)

_KEPT_OFFENCES = 10_000
_SHOWN_OFFENCES = 20
_REMEDY = "Correct or remove them, or pass +keep_offending_rows=true to write them as they are."
MetricsByType = dict[DataType, DatasetMetrics]
RowCheck = Callable[[str, list[dict[str, Any]]], list[list[RowFault]] | None]


class OffendingRowsError(ConfigError, ValueError):
    """Rows that cannot be rolled out."""


class Offence(NamedTuple):
    """One row that cannot be rolled out."""

    path: Path
    line: int
    """Counted from 1."""
    position: int
    """Among the rows of the file, counted from 0, blank lines left out."""
    problem: str
    can_be_kept: bool
    """Whether it is a JSON object, so that it can be written with an agent's name."""

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.problem}"


@dataclass
class Examined:
    """What one pass over a data set found out."""

    metrics: DatasetMetrics = field(default_factory=DatasetMetrics)
    offences: list[Offence] = field(default_factory=list)
    """The first ones, which are plenty."""
    offending: int = 0
    """How many there are."""
    shapes: RowShapes = field(default_factory=RowShapes)
    """Of the others."""

    def note(self, offence: Offence) -> None:
        """Remember an offence."""
        self.offending += 1
        if len(self.offences) < _KEPT_OFFENCES:
            self.offences.append(offence)

    def offending_indices(self, repeats: int) -> list[int]:
        """The positions of offending rows among all rows with their repeats."""
        return [offence.position * repeats + repeat for offence in self.offences for repeat in range(repeats)]


class CompletedRow(NamedTuple):
    """A row as it will be rolled out, or as it is, with what stands in the way."""

    line: int
    row: dict[str, Any] | None
    """None when the line holds no JSON object."""
    problem: str | None


def completed_rows(dataset: DeclaredDataset) -> Iterator[CompletedRow]:
    """Every row of a data set with its prompt filled in; parameters are not checked."""
    prompt = dataset.prompt
    for line in iter_row_lines(dataset.path):
        try:
            row = parse(line.content)
        except ValueError as error:
            yield CompletedRow(line.number, None, malformation(line.content, error))
            continue
        if isinstance(row, dict):
            refusal = refusal_by_servers(line.content)
            yield CompletedRow(line.number, *(complete(row, prompt) if refusal is None else (row, refusal)))
        else:
            yield CompletedRow(line.number, None, f"expected a JSON object, found {json_type(row)}")


def complete(row: dict[str, Any], prompt: PromptConfig | None) -> tuple[dict[str, Any], str | None]:
    """A row with its prompt filled in or its chat turned into parameters, or the row itself and the reason why not."""
    try:
        if prompt is not None:
            if has_own_input(row):
                return (
                    row,
                    f"it has a {RESPONSES_CREATE_PARAMS_KEY_NAME}.input of its own, so no prompt can be filled in",
                )
            return apply_prompt_to_row(row, prompt), None
        if row.get(RESPONSES_CREATE_PARAMS_KEY_NAME) is None:
            params = params_from_chat(row)
            return (row if params is None else {**row, RESPONSES_CREATE_PARAMS_KEY_NAME: params}), None
    except (PromptFieldError, PromptAttributeError, PromptTemplateError, ChatRowError) as error:
        return row, str(error)
    return row, None


def params_problem(row: dict[str, Any]) -> str | None:
    """Why a row's parameters are not what a model can be asked, or None."""
    params = row.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
    if params is None:
        return f"it has no {RESPONSES_CREATE_PARAMS_KEY_NAME}, no messages and no prompt"
    try:
        NeMoGymResponseCreateParamsNonStreaming.model_validate(params)
    except ValidationError as error:
        faults = [_fault(item) for item in error.errors(include_url=False, include_input=False)]
        return "; ".join(faults[:3]) + (f" and {len(faults) - 3} more" if len(faults) > 3 else "")
    return None


def examine(dataset: DeclaredDataset) -> Examined:
    """Check and measure every row of a data set."""
    examined = Examined()
    path = dataset.path
    for position, (line, row, found) in enumerate(completed_rows(dataset)):
        problem = found if found is not None or row is None else params_problem(row)
        if problem is not None:
            examined.note(Offence(path, line, position, problem, can_be_kept=row is not None))
        elif row is not None:
            examined.metrics.observe(row, dataset.config.num_repeats)
            examined.shapes.note(dataset.agent, row, line)
    return examined


def refuse_offences(examined: list[Examined], *, keep: bool) -> None:
    """Refuse rows that cannot be rolled out, all of them in one error; with `keep`, only those that are no objects.

    Raises:
        OffendingRowsError: naming each by file and line.
    """
    offences = [offence for each in examined for offence in each.offences if not (keep and offence.can_be_kept)]
    if not offences:
        return
    total = len(offences) if keep else sum(each.offending for each in examined)
    shown = "".join(f"\n  {offence}" for offence in offences[:_SHOWN_OFFENCES])
    more = f"\n  and {total - _SHOWN_OFFENCES:,} more" if total > _SHOWN_OFFENCES else ""
    remedy = "These are no JSON objects, so they cannot be kept: correct or remove them." if keep else _REMEDY
    counted = "1 row cannot" if total == 1 else f"{total:,} rows cannot"
    raise OffendingRowsError(f"{counted} be rolled out, so nothing was written:{shown}{more}\n{remedy}")


def _fault(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    is_unknown = item["type"] == "extra_forbidden" and len(item["loc"]) == 1
    text = unknown_parameter(where) if is_unknown else item["msg"]
    return f"{RESPONSES_CREATE_PARAMS_KEY_NAME}{'.' if where else ''}{where}: {text}"


def refuse_unfit(
    datasets: Sequence[DeclaredDataset], examined: Sequence[Examined], check: RowCheck, keep: bool
) -> None:
    """Put one row of each shape before the agent's class and the environment's; with `keep`, only warn.

    Raises:
        OffendingRowsError: rollouts of some rows are bound to fail.
    """
    found = Objections()
    for dataset, each in zip(datasets, examined, strict=True):
        for agent, shapes in each.shapes.by_agent().items():
            faults = check(agent, [shape.row for shape in shapes])
            if faults is not None:
                found.add(f"{dataset.path}, line", shapes, faults)
    found.settle(OffendingRowsError, _REMEDY, keep=keep)


class DatasetValidatorState(BaseModel):
    """A data set that is being measured sample by sample."""

    model_config = ConfigDict(arbitrary_types_allowed=True, defer_build=True)

    metrics: DatasetMetrics = Field(default_factory=DatasetMetrics)
    key_counts: Counter[str] = Field(default_factory=Counter)
    """In how many samples each key occurs."""
    offending_example_idxs: list[int] = Field(default_factory=list)
    other_metrics: dict[str, Any] = Field(default_factory=dict)
    """What `aggregate_other_metrics` gathers."""

    def observe(self, sample_idx: int, sample_dict_str: str) -> None:
        """Add one sample."""
        metrics, is_offending = compute_sample_metrics(sample_dict_str)
        if is_offending:
            self.offending_example_idxs.append(sample_idx)
            return
        sample = parse(sample_dict_str.encode())
        self.metrics.add(metrics)
        self.key_counts.update(sample.keys())
        aggregate_other_metrics(self.other_metrics, sample)


def compute_sample_metrics(sample_dict_str: str) -> tuple[DatasetMetrics, bool]:
    """What one sample asks the model, measured, and whether it is offending: no row that a model can be asked."""
    metrics = DatasetMetrics()
    try:
        row = parse(sample_dict_str.encode("utf-8", "surrogatepass"))
    except ValueError:
        return metrics, True
    if not isinstance(row, dict) or params_problem(row) is not None:
        return metrics, True
    metrics.observe_params(row[RESPONSES_CREATE_PARAMS_KEY_NAME])
    return metrics, False


def aggregate_other_metrics(metrics: dict[str, Any], sample: Mapping[str, Any]) -> None:
    """Add the other fields of a sample to `metrics`, by name: numbers, texts, or both where a field has both."""
    for name, value in scalars(sample):
        kind: type[AvgMinMax | Texts] = Texts if isinstance(value, str) else AvgMinMax
        found = metrics.setdefault(name, kind())
        if isinstance(found, FieldMetrics):
            found = found.texts if kind is Texts else found.numbers
        elif not isinstance(found, kind):
            both = FieldMetrics(texts=found) if kind is AvgMinMax else FieldMetrics(numbers=found)
            metrics[name], found = both, both.texts if kind is Texts else both.numbers
        found.observe(value)  # type: ignore[arg-type]


def postprocess_other_metrics(metrics: DatasetMetrics, other_metrics: Mapping[str, Any]) -> None:
    """Make what `aggregate_other_metrics` gathered attributes of `metrics`, as they are read and written."""
    for name, found in other_metrics.items():
        if isinstance(found, AvgMinMax):
            made: Any = found.aggregate()
        else:
            made = found.metrics() if isinstance(found, Texts) else found.as_dict()
        setattr(metrics, f"{name} (field)" if name in DatasetMetrics.model_fields else name, made)


def write_dataset_metrics(dataset: DeclaredDataset, metrics: DatasetMetrics, files: MetricsFiles) -> None:
    """Write, or compare, the metrics beside a data set."""
    path = dataset.beside("_metrics.json")
    files.write(path, metrics.after(dataset.config.model_dump(mode="json")), resolve_for_reading(path, Path.is_file))


def collate(
    data_type: DataType,
    datasets: Sequence[DeclaredDataset],
    metrics: DatasetMetrics,
    folder: Path,
    files: MetricsFiles,
    *,
    only_beside_data: bool = False,
) -> list[Path]:
    """Write the rows of these data sets, all of one type, to `<folder>/<type>.jsonl`, and what is known about them.

    Those of one data set also go to `<data set>_prepare.jsonl` beside its path; with `only_beside_data` not if it is
    read from another search root, so that a folder without data gets none.

    Returns:
        The files with rows; none when the metrics are in conflict with those of an earlier preparation.
    """
    content = metrics.after(datasets[0].config.model_dump(mode="json"))
    if not files.write(folder / f"{data_type}_metrics.json", content):
        return []
    whole = folder / f"{data_type}.jsonl"
    parts = [
        dataset.beside("_prepare.jsonl") if dataset.is_here or not only_beside_data else None for dataset in datasets
    ]
    with writing_to(whole) as together:
        for dataset, part in zip(datasets, parts, strict=True):
            with nullcontext() if part is None else writing_to(part) as alone:
                for line in prepared_lines(dataset):
                    if alone is not None:
                        alone.write(line)
                    together.write(line)
    return [*filter(None, parts), whole]


def prepared_lines(dataset: DeclaredDataset) -> Iterator[bytes]:
    """Every row as often as its data set says, named after its agent."""
    repeats = dataset.config.num_repeats
    if repeats > 1:
        logger.info("Each row is written %d times, its copies one after the other: %s", repeats, dataset)
    agent = {"type": AGENTS_TYPE, "name": dataset.agent}
    for _, row, _ in completed_rows(dataset):
        assert row is not None  # examined before: lines without an object were refused
        yield from _repeated({**row, AGENT_REF_KEY_NAME: agent}, repeats)


def by_type(datasets: Iterable[DeclaredDataset], types: Sequence[DataType]) -> dict[DataType, list[DeclaredDataset]]:
    """The data sets of each type there is one of, in the order of `types`."""
    found = list(datasets)
    grouped = {data_type: [each for each in found if each.config.type == data_type] for data_type in types}
    return {data_type: group for data_type, group in grouped.items() if group}


def _repeated(row: dict[str, Any], repeats: int) -> Iterator[bytes]:
    line = json.dumps(row).encode() + b"\n"
    for _ in range(repeats):
        yield line


__all__ = [
    "Accumulator",
    "AvgMinMax",
    "DatasetMetrics",
    "DatasetValidatorState",
    "MetricsConflictError",
    "MissingDatasetError",
    "OffendingRowsError",
    "StringMetrics",
    "TrainDataProcessor",
    "TrainDataProcessorConfig",
    "aggregate_other_metrics",
    "compute_sample_metrics",
    "postprocess_other_metrics",
    "prepare_data",
    "validate_backend_credentials",
]


class NoDatasetsError(ConfigError, ValueError):
    """No agent declares a data set of the kind that is wanted."""


class TrainDataProcessor(BaseModel):
    """Prepares data sets; its steps may be called one by one."""

    types: tuple[DataType, ...] | None = None
    """Only data sets of these types; those of the mode when unset."""
    agent_name: str | None = None
    """Only data sets of this agent; of all when unset."""
    prompt_config: str | None = None
    """A prompt file that takes the place of those the data sets declare; their metrics files are then left aside."""
    replaces_output: bool = False
    """The output belongs to one run: forget the combined metrics of an earlier preparation instead of comparing with
    them, and write the rows of each data set beside it only where it lies at its path, not in another search root."""
    row_check: RowCheck | None = None
    """Says what an agent, and the environment behind it, would refuse in rows; None from it: that is not known."""
    _written: list[Path] = PrivateAttr(default_factory=list)

    def run(self, global_config: Any) -> list[Path]:
        """Prepare the data sets of a configuration, which also holds the options; every file written.

        Raises:
            ConfigError: a data set is missing or rows cannot be rolled out, and nothing was written; or metrics are in
                conflict with those of an earlier preparation.
        """
        config = TrainDataProcessorConfig.model_validate(_options(global_config))
        if not config.output_dirpath:
            raise ConfigError("+output_dirpath is empty; name the folder to write to, such as +output_dirpath=data")
        logger.info("== Load and validate server instance configs")
        agents = self.load_and_validate_server_instance_configs(config, global_config)
        logger.info("== Load datasets")
        self.load_datasets(config, agents)
        logger.info("== Validate samples and aggregate metrics")
        metrics = self.validate_samples_and_aggregate_metrics(
            agents, config.overwrite_metrics_conflicts, config.keep_offending_rows
        )
        logger.info("== Collate samples")
        self.collate_samples(config, agents, metrics)
        return self._written

    def load_and_validate_server_instance_configs(
        self, config: TrainDataProcessorConfig, global_config: Any
    ) -> list[ServerInstanceConfig]:
        """The agents with a data set in scope, and with no others."""
        types = self.types or config.in_scope_dataset_types
        agents = agents_in_scope(global_config, types)
        wanted = [agent for agent in agents if self.agent_name in (None, agent.name)]
        if not wanted:
            of_agent = f" of the agent {self.agent_name!r}" if self.agent_name else ""
            raise NoDatasetsError(
                f"the configuration declares no data set{of_agent} of the type {' or '.join(types)}"
                f"{_declared(global_config, self.agent_name, agents)}; name the config "
                "of an environment or benchmark that does, or add one to `datasets` of an agent"
            )
        return wanted

    def load_datasets(self, config: TrainDataProcessorConfig, agents: Sequence[ServerInstanceConfig]) -> None:
        """Make sure that every data set is there, getting what is missing if that is allowed."""
        missing = missing_of(list(self._datasets(agents)))
        obtain(missing, config.mode, should_download=config.should_download, data_source=config.data_source)

    def validate_samples_and_aggregate_metrics(
        self,
        agents: Sequence[ServerInstanceConfig],
        overwrite_metrics_conflicts: bool = False,
        keep_offending_rows: bool = False,
    ) -> MetricsByType:
        """Check and measure all rows, then write the metrics beside each data set; the metrics by type.

        Raises:
            OffendingRowsError: rows cannot be rolled out; nothing was written.
            MetricsConflictError: metrics files say something else, and are not to be overwritten.
        """
        datasets = list(self._datasets(agents))
        examined = [examine(dataset) for dataset in datasets]
        refuse_offences(examined, keep=keep_offending_rows)
        if self.row_check is not None:
            refuse_unfit(datasets, examined, self.row_check, keep=keep_offending_rows)
        files = MetricsFiles(overwrite_metrics_conflicts)
        metrics: MetricsByType = {}
        for dataset, of_dataset in zip(datasets, examined, strict=True):
            if of_dataset.offending:
                logger.warning("%d rows of %s are kept but not measured", of_dataset.offending, dataset)
            if self.prompt_config is None:
                write_dataset_metrics(dataset, of_dataset.metrics, files)
            metrics.setdefault(dataset.config.type, DatasetMetrics()).add(of_dataset.metrics)
        self._written += files.written
        files.settle()
        return metrics

    def collate_samples(
        self,
        config: TrainDataProcessorConfig,
        agents: Sequence[ServerInstanceConfig],
        metrics: MetricsByType,
    ) -> None:
        """Write one file of rows per type, and what each data set contributes to it.

        Raises:
            MetricsConflictError: the metrics of a type say something else than before; its rows were not written.
        """
        files = MetricsFiles(config.overwrite_metrics_conflicts)
        folder = Path(config.output_dirpath).expanduser()
        for data_type, group in by_type(self._datasets(agents), get_args(DataType)).items():
            if data_type not in metrics:
                continue
            if self.replaces_output:
                (folder / f"{data_type}_metrics.json").unlink(missing_ok=True)
            self._written += collate(
                data_type, group, metrics[data_type], folder, files, only_beside_data=self.replaces_output
            )
        self._written += files.written
        files.settle()

    def _datasets(self, agents: Iterable[ServerInstanceConfig]) -> Iterable[DeclaredDataset]:
        return datasets_of(agents, self.prompt_config)


def _declared(global_config: Any, agent_name: str | None, in_scope: Sequence[ServerInstanceConfig]) -> str:
    """What there is in place of a data set that there is not."""
    if agent_name and in_scope:
        return f", only of {listed(repr(agent.name) for agent in in_scope)}"
    agents = [instance for instance in find_instances(global_config)[0] if instance.SERVER_TYPE == AGENTS_TYPE]
    types = {str(dataset.type) for agent in agents for dataset in agent.datasets or ()}
    return f", only of {listed(sorted(types))}" if types else ""


def _options(global_config: Any) -> dict[str, Any]:
    return {name: global_config[name] for name in TrainDataProcessorConfig.model_fields if name in global_config}


def prepare_data() -> None:
    """What `ng_prepare_data` does."""
    import_module("nemo_gym.cli").run_command("prepare_data")
