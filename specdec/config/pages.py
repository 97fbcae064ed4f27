"""Records of the files in conf/: for the top-level YAML of each script and for each group, types and limits of the keys.

Defaults of a run are in the YAML files; those of a class are for the Python API. A key that only some choices of a group have
is None where it is missing. The settings of methods and rejection schemes are in the schema of `--speculative-config`; their
groups have its keys.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import ConfigDict, Field, ValidationError, create_model, field_validator, model_validator

from specdec import checkpoint, run_dir
from specdec.checked import Checked, first_mistake, nearest
from specdec.config import CONF, NOT_RESUMED, read, save
from specdec.measure import tasks
from specdec.measure.logger import Logger
from specdec.measure.task_sets import TaskSet
from specdec.model.distributed import SINGLE, ProcessGroup
from specdec.model.target import CausalLM, choose_device, fastest_dtype
from specdec.params import SamplingParams
from specdec.speculative_config import POLICY_KEYS, SpeculativeConfig, SpeculativePlan
from specdec.training.data import Loaded, load_for
from specdec.training.settings import Settings

# ------------------------------------------------------------------------------------------------ values

Text = Annotated[str, Field(pattern=r"\S", description="text; quote a number or a list that is a name: '\"5\"'")]
PathText = Annotated[
    str, Field(pattern=r"\S", description="the path of a file or directory; where that is its name, write {key}=./{value}")
]
Directory = Annotated[str, Field(pattern=r"\S", description="the path of a directory")]
Flag = Annotated[bool, Field(description="true or false")]
Count = Annotated[int, Field(ge=1, description="a number of at least 1")]
Number = Annotated[int, Field(ge=0, description="a number from 0 on")]
TopK = Annotated[int, Field(ge=-1, description="a number from -1 on")]
Fraction = Annotated[float, Field(gt=0, le=1, description="a number above 0, up to 1")]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63, description="a number, an integer of 64 bits")]
Threads = Annotated[int, Field(ge=1, le=1024, description="a number of at least 1 and at most 1024")]
Numbers = Annotated[list[int], Field(description="a list of numbers, such as [2,15,27]")]
Counts = Annotated[list[Count], Field(min_length=1, description="a list of numbers of at least 1")]
Temperature = Annotated[float, Field(ge=0, description="a number from 0 on")]
Temperatures = Annotated[
    list[Annotated[float, Field(ge=0)]],
    Field(min_length=1, description="a list of temperatures from 0 on, such as [0.0, 0.7]"),
]
Mapping = Annotated[dict[Any, Any], Field(description="a mapping, such as {{a: 1}}")]


# ------------------------------------------------------------------------------------------------ groups


class Model(Checked):
    """The target. path: a directory, a hub id or an embedded name, in place of the size."""

    what: ClassVar[str] = "model key"

    name: str
    size: str | int | float | None = None
    sizes: dict[Any, str] | None = None
    shape: str | None = None
    architecture: str | None = None
    path: Text | None
    revision: Text | None
    dtype: Text | None
    device: Text | None

    @property
    def source(self) -> str:
        """What `specdec.hub.resolve` takes: the path, or the name of the size. Raises ValueError if there is neither."""
        if self.path is not None:
            return self.path
        if self.sizes is None:
            raise ValueError(
                f"model.path=null: {self.name} has no sizes to choose from; give a directory, or leave the key out"
            )
        size = str(self.size)
        if size not in self.sizes:
            sizes = ", ".join(map(str, self.sizes))
            raise ValueError(f"model.size={size}: {self.name} has no such size; its sizes are {sizes}")
        return self.sizes[size]

    def load(self, processes: ProcessGroup = SINGLE, fastest: bool = False) -> CausalLM:
        """The target, with its weights. fastest: in `fastest_dtype`, if the group names no dtype."""
        dtype = fastest_dtype(choose_device(self.device)) if self.dtype is None and fastest else self.dtype
        return CausalLM(self.source, dtype, self.device, self.revision, processes)

    def arguments(self) -> str:
        """The choice as words of a command line, where it is not the default, each with a space behind it. Raises ValueError if
        there is no such choice."""
        choices = [path.stem for path in (CONF / "model").glob("*.yaml")]
        if self.name not in choices:
            raise ValueError(f"model.name={self.name!r}: no such choice; {nearest(self.name, choices)}")
        default = read(CONF / "model" / f"{self.name}.yaml")
        keys = ("size", "architecture") if self.architecture is not None else ("path", "size")
        changed = [f"model.{key}={value}" for key in keys if (value := getattr(self, key)) != default.get(key)]
        return "".join(f"{word} " for word in [*([f"model={self.name}"] if self.name != "llama" else []), *changed])


class Choice(Checked):
    """A method or a rejection scheme and its settings, which are keys of `SpeculativeConfig`."""

    model_config = ConfigDict(extra="allow")
    aliases = tuple(SpeculativeConfig.model_fields)

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of its YAML file but for the name."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _typed(self) -> Self:
        for key, value in self.settings.items():
            if isinstance(value, str) and not value.strip():
                raise ValueError(f"{self.prefix()}{key}={value!r} must not be empty; leave the key out, or give null")
        try:
            _SETTINGS.model_validate(self.settings)
        except ValidationError as error:
            raise ValueError(first_mistake(error, self.prefix(), _SETTINGS, self.settings)) from None
        return self


_TYPES: dict[str, Any] = {key: (field.annotation, None) for key, field in SpeculativeConfig.model_fields.items()}
_TYPES["num_speculative_tokens"] = (Annotated[int | Literal["auto"], Field(description="a number, or auto")] | None, None)
_SETTINGS = create_model("_SETTINGS", __config__=Checked.model_config, **_TYPES)


class Method(Choice):
    what = "method key"


class Rejection(Choice):
    what = "rejection key"


class Sampling(SamplingParams):
    what = "sampling key"


class Task(TaskSet):
    """A data set by name, or prompts of a file: those are of `task=jsonl`, and of the demo if there is no path."""

    path: PathText | None = None

    def load(self, limit: int | None = None) -> list[tasks.Task]:
        """The tasks, at most so many. Raises ValueError, one line, for rows that cannot be had, and for a malformed one."""
        return tasks.load(self.path or tasks.DEMO, limit, self.thinking) if self.styles is None else super().load(limit)


class Data(Checked):
    """hub_id, config, split, revision: of a data set of the hub; files: of it, in place of a split. path: a local copy of it.
    columns: the only ones that are read; None: all. supervise: `generated` (the tokens that the target would write), or `all`.
    """

    what: ClassVar[str] = "data key"

    name: str
    path: Text | None = None  # None: the hub's, else the demo's
    hub_id: Text | None = None
    config: Text | None = None
    split: Text
    revision: Text | None = None
    files: list[str] | None = None
    columns: list[str] | None = None
    max_length: Annotated[int, Field(ge=3, description="a number from 3 on (a token is supervised)")] | None
    limit: Count | None
    supervise: Literal["generated", "all"]
    held_out: Number
    template_kwargs: Mapping | None

    def load(self, target: CausalLM) -> Loaded:
        """The samples, tokenized for the target."""
        settings = self.model_dump(exclude={"name", "held_out", "path", "hub_id"})
        return load_for(target, self.path or self.hub_id, **settings)


class Features(Checked):
    what: ClassVar[str] = "features key"

    path: PathText | None
    layer_ids: Numbers | None
    keep_gb: Annotated[float, Field(ge=0, description="a number from 0 on")]


class Acceptance(Checked):
    """Decoding with the drafter while training."""

    what: ClassVar[str] = "eval key"

    num_prompts: Number
    max_tokens: Count
    max_batch_size: Count


class Recipe(Settings):
    """The `train` group: settings of the loop, and values for the method's own records (`architecture_type`, `init_type`,
    `objective_type` of its class)."""

    name: str
    drafter: dict[str, Any]
    init: dict[str, Any]
    objective: dict[str, Any]


class Synthesis(Checked):
    """How the target makes up user turns."""

    what: ClassVar[str] = "synthesize key"

    count: Count
    openings: PathText | None
    max_tokens: Count
    temperature: Temperature
    top_p: Fraction
    top_k: TopK


class Answers(Checked):
    what: ClassVar[str] = "answers key"

    max_tokens: Count
    temperatures: Temperatures
    top_p: Fraction
    top_k: TopK


# ------------------------------------------------------------------------------------------------ pages


class Output(Checked):
    """A script that writes a directory. not_resumed: why it cannot go on with one, if it cannot."""

    not_resumed: ClassVar[str] = ""

    name: Any
    out_dir: Directory
    resume: Flag

    @field_validator("name")
    @classmethod
    def _is_directory_name(cls, name: Any) -> Any:
        """A run's name is the last part of its directory, unless out_dir is given: it must not lead anywhere else."""
        if (
            not isinstance(name, str)
            or name in ("", ".", "..")
            or re.search(r"[/\\\x00-\x1f]", name)
            or len(name.encode()) > 200
        ):
            limit = "no slash, not '..', at most 200 bytes; out_dir= takes any path"
            raise ValueError(f"name={name!r} is no name of a directory: {limit}")
        return name

    @field_validator("resume")
    @classmethod
    def _can_be_resumed(cls, resume: bool) -> bool:
        if resume and cls.not_resumed:
            raise ValueError(f"resume=true: {cls.not_resumed}; give another out_dir=")
        return resume

    def start(self) -> Path:
        """Lock the directory for this run and return it. Nothing is written there before `claim`."""
        directory = Path(self.out_dir)
        run_dir.reserve(directory, self.resume, resumes=not self.not_resumed)
        return directory

    def claim(self, identity: dict[str, Any]) -> None:
        """Take the directory and write config.yaml there. identity: what must be equal for a run to be resumed."""
        run_dir.claim(Path(self.out_dir), self.resume, identity, resumes=not self.not_resumed)
        save(self, Path(self.out_dir) / "config.yaml")


class Run(Output):
    """A script that runs a model."""

    num_threads: Threads | None

    def start(self) -> Path:
        """As of every output; and set the number of torch threads."""
        directory = super().start()
        torch.set_num_threads(self.num_threads or 1)
        return directory


class Decoding(Run):
    """What decodes requests with a method under a rejection scheme, given by the groups or as `speculative_config`."""

    model: Model
    method: Method
    rejection: Rejection
    seed: Seed
    checkpoint: Text | None
    speculative_config: Annotated[dict[Any, Any] | str, Field(description="a JSON object, or its text")] | None
    max_batch_size: Count

    @model_validator(mode="before")
    @classmethod
    def _checkpoint_of_method(cls, values: dict[str, Any]) -> dict[str, Any]:
        """checkpoint=DIR is the model of the method that drafts with it."""
        checkpoint = values.get("checkpoint")
        if not isinstance(checkpoint, str):
            return values
        chosen = values["method"]
        if values["speculative_config"] is not None:
            raise ValueError("checkpoint= and speculative_config= say the same thing; put the directory into its key 'model'")
        if "model" not in chosen:
            raise ValueError(f"checkpoint={checkpoint}: method {chosen['name']!r} takes none; leave method= out")
        return values | {"method": chosen | {"model": checkpoint}}

    def plan(self) -> SpeculativePlan:
        """What speculative_config or the groups mean. Raises ValueError for what cannot work with any target."""
        if self.speculative_config is not None:
            return SpeculativeConfig.parse(self.speculative_config).resolve()
        policy = {key: value for key, value in self.model_dump(include=set(POLICY_KEYS)).items() if value is not False}
        settings = self.method.settings | self.rejection.settings | policy
        names = {"method": self.method.name, "rejection_sample_method": self.rejection.name}
        return SpeculativeConfig(**{key: value for key, value in settings.items() if value is not None} | names).resolve()


ENGINE_KEYS = ("max_batch_size", "max_model_len", "prefill_chunk_size", "enforce_eager")


class Serving(Decoding):
    """What decodes the requests of a task."""

    task: Task
    logger: Logger
    num_speculative_tokens_per_batch_size: (
        Annotated[list[Any] | str, Field(description="a list [[first, last, K], ...], or a file with one")] | None
    )
    enable_adaptive_verification: Flag
    cost_table: PathText | None
    sampling: Sampling
    limit: Count | None
    max_model_len: Count | None
    prefill_chunk_size: Count
    enforce_eager: Flag

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of the engine."""
        return {key: getattr(self, key) for key in ENGINE_KEYS}


class Eval(Serving):
    """conf/eval.yaml"""

    tensor_parallel_size: Count
    baseline: Flag


class Load(Serving):
    """conf/load.yaml"""

    not_resumed: ClassVar[str] = NOT_RESUMED["load"]
    arrivals: Text
    request_rate: Any  # measure.serving reads it: a number, null, inf or phases
    trace: PathText | None
    num_requests: Count | None


class ProfileCost(Decoding):
    """conf/profile_cost.yaml"""

    not_resumed: ClassVar[str] = NOT_RESUMED["profile_cost"]
    logger: Logger
    max_draft: Count | None
    context: Count
    repeats: Count
    acceptance: PathText | None
    sampling: Sampling


class Choose(Run):
    """conf/choose.yaml"""

    not_resumed: ClassVar[str] = NOT_RESUMED["choose"]
    model: Model
    rejection: Rejection
    task: Task
    methods: Annotated[list[Any], Field(description="a list, such as [none,ngram]")]
    checkpoints: (
        Annotated[dict[Any, Any], Field(description="a mapping of methods to drafters, such as {{eagle3: DIR}}")] | None
    )
    runs: Annotated[dict[Any, Any], Field(description="a mapping of names to runs, such as {{a: {{method: ngram}}}}")] | None
    rates: Annotated[list[Any], Field(description="a list, such as [one,all]")]
    repeats: Count
    logger: Logger
    seed: Seed
    cost_context: Count | None
    cost_repeats: Count
    sampling: Sampling
    limit: Count | None
    max_batch_size: Count
    max_model_len: Count | None
    prefill_chunk_size: Count
    enforce_eager: Flag

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of the engine."""
        return {key: getattr(self, key) for key in ENGINE_KEYS}


class Bench(Output):
    """conf/bench.yaml"""

    not_resumed: ClassVar[str] = NOT_RESUMED["bench"]

    model: Model
    task: Task
    limit: Count | None
    max_tokens: Count
    logger: Logger
    dtypes: Annotated[list[str], Field(min_length=1, description="a list of types, such as [float32,bfloat16]")]
    num_threads: Counts
    num_speculative_tokens: Count
    max_matching_ngram_size: Count
    draft_model: Text | None
    loop_alone: Flag
    suffix_tokens: Counts
    batch_sizes: Counts


class Train(Run):
    """conf/train.yaml"""

    seed: Number
    checkpoint: Text | None
    features: Features
    eval: Acceptance
    train: Recipe
    model: Model
    method: Method
    data: Data
    logger: Logger

    @model_validator(mode="after")
    def _of_the_method(self) -> Self:
        count = self.method.settings.get("num_speculative_tokens")
        if isinstance(count, str):
            raise ValueError(f"method.num_speculative_tokens={count!r} must be a number")
        return self


class Extract(Run):
    """conf/extract.yaml"""

    model: Model
    data: Data
    layer_ids: Numbers | None
    layout: Literal["shards", "vllm"]
    shard_mb: Annotated[int, Field(ge=0, description="the size of a file, or 0 for a file per sample")]
    dry_run: Flag


class Prepare(Checked):
    """conf/prepare.yaml"""

    model: Model
    drafter: Text | None
    num_speculative_tokens: Count
    prompts: PathText | None
    synthesize: Synthesis
    answers: Answers
    limit: Count | None
    seed: Seed
    max_batch_size: Count
    max_model_len: Count
    num_threads: Threads | None
    out: PathText
    resume: Flag


class Share(Checked):
    """conf/share.yaml"""

    checkpoint: Text | None
    revision: Text | None
    format: Text
    out_dir: Directory | None
    dtype: Text | None
    target: Text | None
    serve_target: Text | None
    num_speculative_tokens: Count | None
    eval: PathText | None
    push: Text | None
    private: Flag
    lint: PathText | None

    @field_validator("format")
    @classmethod
    def _is_written(cls, name: str) -> str:
        if name not in (engines := checkpoint.engines()):
            raise ValueError(f"format={name!r}: no such format; {nearest(name, engines)}")
        return name


PAGES: dict[str, type[Checked]] = {
    "eval": Eval, "load": Load, "choose": Choose, "profile_cost": ProfileCost, "bench": Bench, "train": Train,
    "extract": Extract, "prepare": Prepare, "share": Share,
}  # fmt: skip
