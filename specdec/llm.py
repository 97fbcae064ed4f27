"""The offline API that users of vLLM know: `LLM(...).generate(prompts, SamplingParams(...))`, with `speculative_config={...}`.

`SpeculativeConfig` is the one schema of a method and its rejection scheme: the YAML groups of these names have its keys.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field, field_validator

from specdec import method, rejection, sampling
from specdec.checked import Checked, first_line, nearest, short_repr, whole_text
from specdec.core import Policy, Proposer, Request
from specdec.engine import Engine
from specdec.files import parse_json
from specdec.measure.stats import Metric, SpecDecodeMetrics, Totals
from specdec.method import hybrid
from specdec.model import distributed
from specdec.model.target import DTYPES, CausalLM, choose_device
from specdec.params import SamplingParams
from specdec.policy import adaptive, cost_table, profiling
from specdec.policy.adaptive import Adaptive, Scheduled
from specdec.rejection import Verifier
from specdec.training.data import unread_template_kwargs

# keys of vLLM's object whose feature is not built, with the values that ask for nothing
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "enforce_eager": (None, True),
    "quantization": (None,),
    "moe_backend": (None,),
    "attention_backend": (None, "auto"),
    "kv_cache_dtype": (None, "auto"),
    "draft_lm_head_quantization": (None,),
    "code_revision": (None,),
    "index_share_for_mtp_iteration": (None, False),
    "disable_padded_drafter_batch": (None, False),
    "disable_eagle_block_drop": (None, False),
    "disable_lookahead_block_hashes": (None, False),
    "use_local_argmax_reduction": (None, False),
    "dspark_draft_topk": (None,),
    "xpress_topc": (None,),
    "fly_window_size": (None,),
    "fly_entropy_threshold": (None, 0.3),
    "fly_entropy_top_k": (None, 3),
}
MAX_THREADS = 1024  # beyond, a typo: torch would start so many at once
_NOT_BUILT_METHODS = ("medusa", "dflash", "dspark")
_ALIASES = {"mlp_speculator": "mlp"}  # vLLM's name up to 0.32
_PARALLEL = {"draft_model": "pard", "eagle3": "peagle"}  # what a method is called here when it drafts in one pass


class SpeculativeConfig(Checked):
    """The object of vLLM's `--speculative-config`, with its names, defaults and inference of an omitted `method`.

    A key whose feature is not built is an error that says so. Ours are `prompt_lookup_latest`: the rightmost match counts;
    `pard_token`, for a parallel draft model whose config.json lacks it; `min_score` of suffix; `proposers` of hybrid: objects
    like this one, without what is the whole's; `num_speculative_tokens="auto"`: as many as pay, by row and step; a file with a
    schedule as `num_speculative_tokens_per_batch_size`; `cost_table`: a file of eval/profile_cost.py, for what decides by
    costs; without it they are measured at the start.
    `shared_storage_path` and `include_output_tokens` of extract_hidden_states are settings of a connector in vLLM.
    """

    what = "speculative_config key"
    aliases = (*_NOT_BUILT, "tensor_parallel_size")

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | Literal["auto"] | None = None
    num_speculative_tokens_per_batch_size: list[Any] | str | None = None
    enable_adaptive_verification: bool | None = None
    cost_table: str | None = None
    draft_tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    revision: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_latest: bool | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    min_score: float | None = None
    proposers: list[dict[str, Any]] | None = None
    draft_sample_method: str | None = None
    parallel_drafting: bool | None = None
    pard_token: int | None = None
    use_heterogeneous_vocab: bool | None = None
    draft_model_config: dict[str, Any] | None = None
    shared_storage_path: str | None = None
    include_output_tokens: bool | None = None
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None

    def __init__(self, **values: Any) -> None:
        if "tensor_parallel_size" in values:
            raise ValueError("speculative_config key 'tensor_parallel_size' is the target's; use draft_tensor_parallel_size")
        for key, idle in _NOT_BUILT.items():
            if key in values and values.pop(key) not in idle:
                raise ValueError(f"speculative_config key {key!r}: this feature is not built yet; leave the key out")
        if isinstance(asked := values.get("num_speculative_tokens"), str) and asked != "auto":
            raise ValueError(f"speculative_config key num_speculative_tokens={asked!r}: give an integer, or 'auto'")
        super().__init__(**values)

    @classmethod
    def parse(cls, given: str | dict[str, Any] | None) -> SpeculativeConfig:
        """From JSON text, or the object itself; None means no speculation."""
        if isinstance(given, str):
            try:
                given = parse_json(given, "speculative_config")
            except ValueError as error:
                raise ValueError(f"{error}: {short_repr(given)}") from None
        if given is None:
            return cls(method="none")
        if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
            raise ValueError(
                f"speculative_config={short_repr(given)} must be a JSON object, such as {{'method': 'ngram', ...}}"
            )
        return cls(**given)

    @property
    def resolved_method(self) -> str:
        """The method, inferred from `model` as vLLM does when it is omitted."""
        name = self._inferred_method() if self.method is None else self.method
        if self.method is None and self.parallel_drafting is False and name in _PARALLEL.values():
            if name == "peagle":
                raise ValueError(f"parallel_drafting=false, and {self.model} drafts in one pass only; leave it out")
            name = "draft_model"
        name = "mtp" if name.endswith("_mtp") else _ALIASES.get(name, name)
        if self.parallel_drafting:
            if name not in (*_PARALLEL, *_PARALLEL.values()):
                raise ValueError(f"parallel_drafting=true is for {' and '.join(_PARALLEL)}, not for {name!r}; leave it out")
            name = _PARALLEL.get(name, name)
        if name in _NOT_BUILT_METHODS:
            raise ValueError(f"method {name!r} is not built yet; built: {', '.join(method.names())}")
        if name not in method.names():
            raise ValueError(f"unknown method {name!r}; {nearest(name, method.names())}")
        if name == "hybrid":
            self._parts()
        return name

    def _parts(self) -> list[SpeculativeConfig]:
        """The proposers of `hybrid`, each with what it takes over from the whole. Raises ValueError for one that cannot be."""
        if self.proposers is None:
            raise ValueError("method 'hybrid' needs proposers, a list of {'method': ..., ...}; see conf/method/hybrid.yaml")
        parts, num_draft = [], adaptive.AUTO_MOST if self.num_speculative_tokens == "auto" else self.num_speculative_tokens
        for place, own in enumerate(hybrid.with_model(self.proposers, self.model)):
            try:
                hybrid.refuse(own.get("method"))
                for key in own:
                    if key in (*_POLICY, "proposers") or key.startswith(_SCHEME) or own[key] == "auto":
                        raise ValueError(f"{key}={own[key]} is not a part's; give it to the whole")
                if not {"method", "model"} & set(own):
                    raise ValueError("it has neither method nor model; give its model (eval/run.py: checkpoint=DIR)")
                part = SpeculativeConfig(**({"num_speculative_tokens": num_draft} | own))
                hybrid.refuse(part.resolved_method)
                name, given = part._settings()
                method.check(name, given)
            except ValueError as error:
                raise ValueError(f"proposers[{place}]: {error}") from None
            parts.append(part)
        return parts

    def _inferred_method(self) -> str:
        if self.model is None:
            raise ValueError("speculative_config has neither method nor model; name one, such as method='ngram'")
        lower = self.model.lower()
        if lower in ("ngram", "[ngram]"):
            return "ngram"
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", self.model) and not Path(self.model).exists():
            return "custom_class"
        if any((Path(self.model).expanduser() / part / "config.json").exists() for part in ("", "best", "last")):
            return method.of_checkpoint(self.model, self.revision)
        for mark, name in (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark")):
            if mark in lower:
                return name
        return "draft_model"

    @property
    def schedule(self) -> list[list[int]] | None:
        """K by batch size, in order, if it is given."""
        given = self.num_speculative_tokens_per_batch_size
        if isinstance(given, str):
            try:
                found = cost_table.load(given).schedule
            except ValueError as error:
                what = f"num_speculative_tokens_per_batch_size={given!r}"
                raise ValueError(f"{what} is no list [[first, last, K], ...], and as a file: {error}") from None
            if found is None:
                raise ValueError(f"{given} holds no schedule; eval/profile_cost.py proposes one with acceptance=DIR")
            given = found
        return None if given is None else adaptive.check_schedule(given)

    @property
    def decides(self) -> bool:
        """Whether costs and acceptance decide how much is drafted or verified."""
        return self.num_speculative_tokens == "auto" or bool(self.enable_adaptive_verification)

    def policy(self, target: CausalLM, proposer: Proposer, max_batch_size: int) -> Policy | None:
        """What says by row and step how much to draft and to verify; None: always as much as there is. Costs are measured here
        if no table is given."""
        most, schedule = proposer.num_speculative_tokens, self.schedule
        scheduled = None if schedule is None else Scheduled(schedule, most)
        if not self.decides or not most:
            return scheduled
        if self.cost_table is not None:
            table = cost_table.load(self.cost_table)
            cost_table.check_fits(table, target, proposer)
        else:
            if target.processes.is_main:
                print("note: measuring costs; cost_table=FILE of eval/profile_cost.py saves that", file=sys.stderr)
            table = profiling.measure(target, proposer, profiling.sizes_up_to(max_batch_size))
        auto, trims = self.num_speculative_tokens == "auto", bool(self.enable_adaptive_verification)
        if auto and proposer.num_confidence_features and adaptive.drafts_are_free(table, most):
            auto, trims = False, True  # the draft itself is looked at before its length is chosen
        return Adaptive(table, most, max_batch_size, auto, trims, proposer.num_confidence_features, scheduled)

    def check_processes(self, size: int) -> None:
        """Raise ValueError, one line, if the drafter cannot be cut as asked. size: the target's tensor_parallel_size."""
        name, asked = self.resolved_method, self.draft_tensor_parallel_size
        if asked not in (None, 1, size):
            raise ValueError(f"draft_tensor_parallel_size={asked} must be 1 or the target's tensor_parallel_size={size}")
        if asked not in (None, 1) and "draft_tensor_parallel_size" not in method.settings(name):
            raise ValueError(
                f"draft_tensor_parallel_size={asked}: of method {name!r} every process holds the whole drafter; use 1"
            )

    def check(self, size: int = 1) -> None:
        """Raise ValueError, one line, for what cannot work with any target: a typo is found before one is loaded. size: the
        target's tensor_parallel_size."""
        self.check_processes(size)
        _, given = self._settings()
        if (num_draft := given.get("num_speculative_tokens")) is not None:
            rejection.build(self.rejection_sample_method, num_draft, **self._scheme_params())

    def _scheme_params(self) -> dict[str, Any]:
        return {k: v for k, v in self.model_dump().items() if k.startswith("synthetic_") and v is not None}

    def _settings(self) -> tuple[str, dict[str, Any]]:
        """The method and what is said to it. Raises ValueError for what cannot work with any target."""
        name = self.resolved_method
        given = {key: value for key, value in self.model_dump().items() if value is not None}
        self.check_policy(name)
        if self.num_speculative_tokens == "auto":
            del given["num_speculative_tokens"]
            if name != "suffix":  # whose drafts end by themselves
                given["num_speculative_tokens"] = adaptive.AUTO_MOST
        for key in ("method", "parallel_drafting", *_POLICY, *(key for key in list(given) if key.startswith(_SCHEME))):
            given.pop(key, None)
        if "draft_tensor_parallel_size" not in method.settings(name):
            given.pop("draft_tensor_parallel_size", None)  # 1, which is so
        if given.get("model") in ("ngram", "[ngram]"):  # vLLM's other spelling of method="ngram"
            given.pop("model")
        if given.get("draft_sample_method") == "greedy" and "draft_sample_method" not in method.settings(name):
            given.pop("draft_sample_method")  # true of every deterministic drafter
        if not given.get("use_heterogeneous_vocab"):
            given.pop("use_heterogeneous_vocab", None)  # true of every other method
        elif "use_heterogeneous_vocab" not in method.settings(name):
            raise ValueError(f"use_heterogeneous_vocab=true is for draft_model and pard, not for {name!r}; leave it out")
        num_draft = given.get("num_speculative_tokens")
        if num_draft is not None and num_draft < 1 and name != "none":
            raise ValueError(f"num_speculative_tokens={num_draft}: at least 1 is needed; method 'none' drafts nothing")
        if num_draft is None and name not in ("none", "suffix"):
            raise ValueError(f"method {name!r} needs num_speculative_tokens; give how many tokens to draft per step")
        if name in _MODEL_HINT and "model" not in given:
            raise ValueError(f"method {name!r} needs model; {_MODEL_HINT[name]}")
        if name == "extract_hidden_states":
            for key in ("shared_storage_path", "draft_model_config"):
                if key not in given:
                    raise ValueError(f"method {name!r} needs {key}; see conf/method/{name}.yaml")
        if name == "hybrid":
            given["proposers"] = []
            for part, own in zip(self._parts(), hybrid.with_model(self.proposers or [], self.model), strict=True):
                part_name, settings = part._settings()
                if "num_speculative_tokens" not in own:  # the part takes as many as it can
                    settings.pop("num_speculative_tokens", None)
                given["proposers"].append({"method": part_name} | settings)
            given.pop("model", None)  # a part has it now
        return name, given

    def build(self, target: CausalLM) -> tuple[Proposer, Verifier]:
        """The proposer and the rejection scheme. Raises ValueError, one line, for what cannot work."""
        self.check(target.processes.size)
        name, given = self._settings()
        for place, part in enumerate(self._parts() if name == "hybrid" else ()):
            try:
                part.check_processes(target.processes.size)
            except ValueError as error:
                raise ValueError(f"proposers[{place}]: {error}") from None
        scheme, num_draft = self.rejection_sample_method, given.get("num_speculative_tokens")
        scheme_params = self._scheme_params()
        for own in (given, *given.get("proposers", ())):
            if (limit := own.get("max_model_len")) is not None and limit > target.max_model_len:
                raise ValueError(f"max_model_len={limit} of the draft is over the target's {target.max_model_len}; lower it")
        if num_draft is not None and num_draft >= target.max_model_len:
            raise ValueError(
                f"num_speculative_tokens={num_draft} is beyond the {target.max_model_len} tokens that {target.name} can hold; "
                "lower it"
            )
        if self.num_speculative_tokens == "auto" and num_draft is not None:
            proposer = method.build_up_to(given.pop("num_speculative_tokens"), name, target, **given)
        else:
            proposer = method.build(name, target, **given)
        return proposer, rejection.build(scheme, proposer.num_speculative_tokens, **scheme_params)

    def check_policy(self, name: str) -> None:
        """Raise ValueError for keys about the length of drafts that do not go together."""
        said = [key for key in _POLICY if getattr(self, key) not in (None, False)]
        if self.num_speculative_tokens == "auto":
            said.append("num_speculative_tokens=auto")
        if said and name in ("none", "extract_hidden_states"):
            raise ValueError(f"method {name!r} drafts nothing, so {said[0]} says nothing; leave it out")
        if self.num_speculative_tokens == "auto" and self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError("num_speculative_tokens=auto and num_speculative_tokens_per_batch_size both choose K; give one")
        if self.num_speculative_tokens == "auto" and self.rejection_sample_method == "synthetic":
            raise ValueError("num_speculative_tokens=auto: synthetic acceptance needs a number, which its rates are for")
        if self.cost_table is not None and not self.decides:
            raise ValueError(
                "cost_table is for num_speculative_tokens=auto and enable_adaptive_verification=true; leave it out, or add one"
            )
        _ = self.schedule
        if self.cost_table is not None:
            cost_table.load(self.cost_table)


_POLICY = ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification", "cost_table")
_SCHEME = ("rejection_sample_method", "synthetic_")  # how the keys of the rejection scheme begin
_MODEL_HINT = {
    "draft_model": "give a directory, a hub id or an embedded name of a smaller model with the target's vocabulary "
    "(use_heterogeneous_vocab=true: with another)",
    "custom_class": "give the dotted path of your class, 'package.module.Class'",
    **{
        name: f"give the directory of a drafter that train/{script}.py made (eval/run.py: checkpoint=DIR)"
        for name, script in (("eagle", "eagle"), ("eagle3", "eagle"), ("peagle", "eagle"), ("mlp", "mlp"), ("pard", "pard"))
    },
}


@dataclass
class CompletionOutput:
    """One answer. token_ids end with the eos or stop token that ended them, as in Hugging Face and vLLM."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None


@dataclass
class RequestOutput:
    """A prompt and its answer, shaped as vLLM's class of this name; `request` is the engine's own record."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    request: Request | None = field(default=None, repr=False)


class EngineArgs(Checked):
    """The arguments of `LLM`, checked before anything is loaded."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    what = "LLM argument"

    model: str | Path
    dtype: str | torch.dtype | None = None
    device: str | torch.device | None = None
    revision: str | None = None
    max_batch_size: int = Field(8, ge=1)
    max_model_len: int | None = Field(None, ge=2)
    prefill_chunk_size: int = Field(512, ge=1)
    speculative_config: dict[str, Any] | str | None = None
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    num_threads: int | None = Field(None, ge=1, le=MAX_THREADS)
    tensor_parallel_size: int = 1

    @field_validator("dtype")
    @classmethod
    def _of_weights(cls, dtype: str | torch.dtype | None) -> str | torch.dtype | None:
        if isinstance(dtype, torch.dtype) and dtype not in DTYPES.values():
            raise ValueError(f"LLM argument dtype={dtype} holds no weights; use {', '.join(DTYPES)}")
        return dtype


class LLM:
    """A target with a way to speculate.

    model: directory, hub id, or embedded name; dtype, device: chosen unless given; max_batch_size: rows decoded together;
    max_model_len: most tokens of a request; speculative_config: an object with vLLM's keys; seed: for requests without one;
    num_threads: torch's threads, left as they are unless given (1 is best on a CPU that others use too);
    tensor_parallel_size: processes that hold a part of the target each, in a script that `torchrun --nproc_per_node` starts.
    All of them make the same calls and get the same answers. At 1 a process is on its own, under torchrun too.
    Raises ValueError, one line, for an argument of another type or beyond its limit.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        revision: str | None = None,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        prefill_chunk_size: int = 512,
        speculative_config: dict[str, Any] | str | None = None,
        seed: int = 0,
        num_threads: int | None = None,
        tensor_parallel_size: int = 1,
    ):
        args = EngineArgs(
            model=model, dtype=dtype, device=device, revision=revision, max_batch_size=max_batch_size,
            max_model_len=max_model_len, prefill_chunk_size=prefill_chunk_size, speculative_config=speculative_config,
            seed=seed, num_threads=num_threads, tensor_parallel_size=tensor_parallel_size,
        )  # fmt: skip
        if args.num_threads is not None:
            torch.set_num_threads(args.num_threads)
        self.speculative_config = SpeculativeConfig.parse(args.speculative_config)
        self.speculative_config.check(args.tensor_parallel_size)  # before the target is loaded
        device = None if args.device is None else str(args.device)
        processes = distributed.join(args.tensor_parallel_size, choose_device(device))
        self.target = CausalLM(args.model, args.dtype, device, args.revision, processes)
        proposer, verifier = self.speculative_config.build(self.target)
        policy = self.speculative_config.policy(self.target, proposer, args.max_batch_size)
        shape = args.max_batch_size, args.max_model_len, args.prefill_chunk_size
        self.engine = Engine(self.target, proposer, verifier, *shape, policy=policy)
        self.seed = args.seed
        self._counter = itertools.count()
        self._totals = Totals(self.target.name, proposer.num_speculative_tokens)

    def get_tokenizer(self) -> Any:
        return self.target.tokenizer

    def generate(
        self,
        prompts: str | dict[str, Any] | Sequence[str | dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Decode prompts: strings, or {"prompt_token_ids": [...]}. One SamplingParams for all, or one for each.

        Raises ValueError, one line, for a prompt that is neither, and for one that cannot be decoded.
        """
        if not isinstance(prompts, str | dict | Iterable):
            raise ValueError(f"prompts={short_repr(prompts)}: give a string, {{'prompt_token_ids': [...]}}, or a list of these")
        listed = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        params = self._params(sampling_params, len(listed))
        texts, requests = [], []
        for prompt, own in zip(listed, params, strict=True):
            text, ids = self._tokenize(prompt)
            number = next(self._counter)
            seed = derived_seed(self.seed, number) if own.seed is None else own.seed
            texts.append(text)
            requests.append(Request(str(number), ids, own, seed))
        return self._run(texts, requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Decode conversations (one, or a list of them), rendered by the tokenizer's own chat template.

        Raises ValueError, one line, for what is no conversation, and for one that the template refuses.
        """
        for key, value, kinds, hint in (
            ("messages", messages, list | tuple, "a list of {'role': ..., 'content': ...}, or a list of such lists"),
            ("chat_template", chat_template, str | None, "the text of a Jinja template"),
            ("chat_template_kwargs", chat_template_kwargs, dict | None, "a mapping of the template's variables"),
            ("add_generation_prompt", add_generation_prompt, bool, "true or false"),
        ):
            if not isinstance(value, kinds):
                raise ValueError(f"{key}={short_repr(value)}: give {hint}")
        if not messages:
            raise ValueError("messages=[]: give at least one message with 'role' and 'content'")
        conversations: Any = [messages] if isinstance(messages[0], dict) else messages
        tokenizer = self.target.tokenizer
        if chat_template is None and not tokenizer.chat_template:
            raise ValueError(f"{self.target.name} has no chat template (a base model?); use generate, or give chat_template=")
        for name in unread_template_kwargs(tokenizer, chat_template_kwargs or {}, "chat_template_kwargs", chat_template):
            print(f"note: the chat template does not read {name}", file=sys.stderr)
        options = {"chat_template": chat_template, **(chat_template_kwargs or {})}
        texts = [render_chat(tokenizer, own, add_generation_prompt=add_generation_prompt, **options) for own in conversations]
        rendered = [{"prompt": p, "prompt_token_ids": tokenizer(p, add_special_tokens=False)["input_ids"]} for p in texts]
        return self.generate(rendered, sampling_params, use_tqdm=use_tqdm)

    def get_metrics(self) -> list[Metric]:
        """Sums over all requests that have finished, under the names that vLLM's method of this name has: `Counter` (`value`)
        and `Vector` (`values`) of `specdec.measure.stats`, where it says how values differ from vLLM's."""
        return self._totals.metrics()

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or SamplingParams()] * count
        if not isinstance(given, list | tuple) or not all(isinstance(own, SamplingParams) for own in given):
            raise ValueError(
                f"sampling_params={short_repr(given)}: give SamplingParams(...), or a list with one for each prompt"
            )
        if len(given) != count:
            raise ValueError(f"{len(given)} sampling_params for {count} prompts; give one for all or one for each")
        return list(given)

    def _tokenize(self, prompt: str | dict[str, Any]) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, list(self.target.tokenizer(whole_text(prompt, "prompt"))["input_ids"])
        if not isinstance(prompt, dict):
            raise ValueError(f"prompt {short_repr(prompt)} is neither a string nor {{'prompt_token_ids': [...]}}")
        for key in prompt:
            if key not in ("prompt", "prompt_token_ids"):
                raise ValueError(f"unknown prompt key {key!r}; {nearest(str(key), ('prompt', 'prompt_token_ids'))}")
        text = prompt.get("prompt")
        if not isinstance(text, str | None):
            raise ValueError(f"prompt={short_repr(text)} must be a string")
        if "prompt_token_ids" in prompt:
            return text, token_ids(prompt["prompt_token_ids"], "prompt_token_ids")
        if text is None:
            raise ValueError("a prompt object needs 'prompt' or 'prompt_token_ids'")
        return self._tokenize(text)

    def _run(self, texts: list[str | None], requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        # what an error or an interruption left behind belongs to nobody
        self.engine.abort_all()
        finished = self.engine.run(requests)
        silent = not use_tqdm or not self.target.processes.is_main
        for request in tqdm(finished, total=len(requests), desc="requests", unit="request", disable=silent):
            self._totals.add(request)
        return [self._output(text, request) for text, request in zip(texts, requests, strict=True)]

    def _output(self, text: str | None, request: Request) -> RequestOutput:
        answer = answer_text(request, self.target.tokenizer)
        metrics = None
        if self.engine.proposer.num_speculative_tokens:
            metrics = SpecDecodeMetrics.of(request.stats, self.engine.proposer.num_speculative_tokens)
        completion = CompletionOutput(0, answer, request.output_token_ids, request.finish_reason, request.stop_reason, metrics)
        return RequestOutput(request.id, text, request.prompt_token_ids, [completion], request=request)


def token_ids(given: Any, key: str) -> list[int]:
    """Token ids as a list of ints. given: a list, a tuple, or a one-dimensional array or tensor of integers. Raises ValueError
    for anything that would have to be cast: text, floats, booleans."""
    values = given.tolist() if isinstance(given, np.ndarray | torch.Tensor) else given
    if not isinstance(values, list | tuple):
        raise ValueError(f"{key}={short_repr(given)} must be a list of token ids")
    ids = []
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{key}[{place}]={short_repr(value)} is no token id; ids are integers")
        ids.append(int(value))
    return ids


def render_chat(tokenizer: Any, messages: Any, **options: Any) -> str:
    """The text of a conversation by the tokenizer's chat template, with `add_generation_prompt` and other options of
    `apply_chat_template`. Raises ValueError, one line, for what is no conversation, and where the template fails."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages={short_repr(messages)}: a conversation is a list of {{'role': ..., 'content': ...}}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {short_repr(message)} needs a 'role', such as 'user', and 'content'")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise ValueError(f"content={short_repr(content)} of a message must be text, or a list of parts")
        if content is None and message["role"] in ("user", "system"):
            raise ValueError(f"message {short_repr(message)} needs 'content'; give its text")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except Exception as error:  # a template is a program, and raises what it likes
        raise ValueError(f"the chat template refuses the messages ({first_line(error)}); mend one of them") from None
    return whole_text(str(text), "the conversation")


def answer_text(request: Request, tokenizer: Any) -> str:
    """The text of a finished request. The token that stopped it is left out of the text (not of the ids), as in vLLM."""
    if request.text is not None:
        return request.text
    ids = request.output_token_ids
    if request.finish_reason == "stop" and not request.params.include_stop_str_in_output:
        ids = ids[:-1]
    return str(tokenizer.decode(ids, skip_special_tokens=request.params.skip_special_tokens))


def derived_seed(seed: int, number: int) -> int:
    """The seed of request `number` of a run: distinct per request, the same in every run with that seed."""
    return int(sampling.uniforms(np.array(seed), sampling.SEED, np.array(number), 0) * 2**53)
