"""The offline API that users of vLLM know: `LLM(...).generate(prompts, SamplingParams(...))`, with `speculative_config={...}`.

The last module of the house: nothing else imports it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict, Field, field_validator, model_validator

from specdec import method
from specdec.chat.template import unread_template_kwargs
from specdec.checked import Checked, check_text, nearest, short_repr
from specdec.core import Request, TokenLogprobs
from specdec.engine import Engine
from specdec.measure.stats import Metric, SpecDecodeMetrics, Totals
from specdec.model import distributed
from specdec.model.target import DTYPES, CausalLM, choose_device
from specdec.params import SamplingParams
from specdec.prompts import (
    MAX_CHARACTER_TOKENS,
    TextPrompt,
    TokensPrompt,
    answer_text,
    derived_seed,
    render_chat,
    settled_text,
    token_ids,
    token_text,
)
from specdec.speculative_config import SpeculativeConfig

DEFAULT_BATCH_SIZE = 8
MAX_THREADS = 1024  # beyond, a typo: torch would start so many at once
Prompt = str | TextPrompt | TokensPrompt | Sequence[int]
PROMPT_KEYS = ("prompt", "prompt_token_ids")
PROMPT_KEYS_NOT_BUILT = ("cache_salt", "mm_processor_kwargs", "multi_modal_data", "multi_modal_uuids", "prompt_embeds")
PROMPT_FORMS = "a string, token ids, {'prompt': ...} or {'prompt_token_ids': [...]}"


@dataclass
class Logprob:
    """The log probability of a token at one place, its rank there (1: no other is likelier) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass
class CompletionOutput:
    """One answer, shaped as vLLM's class of this name.

    index: among the answers to the prompt
    token_ids: with the eos or stop token that ended it, as in transformers and vLLM
    cumulative_logprob: of the answer so far, if the sampling parameters ask for log probabilities
    logprobs: of each token, likewise: that of the token itself, then the likeliest ones'
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class RequestOutput:
    """A prompt and its answers, shaped as vLLM's class of this name; request: the engine's record of the first answer.

    prompt_logprobs: of each prompt token, None for the first, if the sampling parameters ask for them
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    request: Request | None = field(default=None, repr=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass
class _Prompt:
    """A prompt, with the engine's request for each of its answers."""

    request_id: str
    text: str | None
    requests: list[Request]


@dataclass
class _StreamedAnswer:
    """An answer that is streamed, and how much of it has been: characters and tokens."""

    prompt: _Prompt
    index: int
    request: Request
    text: str = ""
    num_tokens: int = 0


class EngineArgs(Checked):
    """The arguments of `LLM`, checked before anything is loaded."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    what = "LLM argument"
    not_built = frozenset((
        "allowed_local_media_path", "allowed_media_domains", "async_scheduling", "attention_backend", "attention_config",
        "block_size", "chat_template", "code_revision", "compilation_config", "config_format", "convert", "cpu_offload_gb",
        "data_parallel_size", "disable_custom_all_reduce", "disable_log_stats", "disable_sliding_window",
        "distributed_executor_backend", "download_dir", "enable_chunked_prefill", "enable_expert_parallel", "enable_lora",
        "enable_prefix_caching", "enable_prompt_embeds", "enable_return_routed_experts", "enable_sleep_mode",
        "generation_config", "gpu_memory_utilization", "guided_decoding_backend", "hf_config_path", "hf_overrides", "hf_token",
        "ignore_patterns", "kv_cache_dtype", "kv_cache_memory_bytes", "kv_transfer_config", "limit_mm_per_prompt",
        "load_format", "logits_processors", "logprobs_mode", "long_prefill_token_threshold", "lora_dtype", "max_cpu_loras",
        "max_logprobs", "max_lora_rank", "max_loras", "max_num_batched_tokens", "max_seq_len_to_capture",
        "mm_processor_kwargs", "model_impl", "model_loader_extra_config", "moe_backend", "num_gpu_blocks_override",
        "offload_group_size", "offload_num_in_group", "offload_params", "offload_prefetch_step", "override_generation_config",
        "pipeline_parallel_size", "pooler_config", "profiler_config", "quantization", "quantization_config",
        "reasoning_parser", "return_sampling_mask", "runner", "scheduling_policy", "served_model_name", "skip_tokenizer_init",
        "spec_method", "spec_model", "spec_tokens", "stream_interval", "structured_outputs_config", "swap_space", "task",
        "tokenizer", "tokenizer_mode", "tokenizer_revision", "trust_remote_code", "ubatch_size", "worker_cls",
        "worker_extension_cls",
    ))  # fmt: skip

    model: str | Path
    dtype: str | torch.dtype | None = None
    device: str | torch.device | None = None
    revision: str | None = None
    max_batch_size: int | None = Field(None, ge=1)
    max_num_seqs: int | None = Field(None, ge=1)
    max_model_len: int | None = Field(None, ge=2)
    prefill_chunk_size: int = Field(512, ge=1)
    speculative_config: dict[str, Any] | str | None = None
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    num_threads: int | None = Field(None, ge=1, le=MAX_THREADS)
    tensor_parallel_size: int = 1

    enforce_eager: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> EngineArgs:
        if None not in (self.max_batch_size, self.max_num_seqs) and self.max_batch_size != self.max_num_seqs:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} and max_num_seqs={self.max_num_seqs} differ; give one of them"
            )
        return self

    @property
    def num_rows(self) -> int:
        """Requests that are decoded together."""
        return self.max_batch_size or self.max_num_seqs or DEFAULT_BATCH_SIZE

    @field_validator("dtype")
    @classmethod
    def _is_of_weights(cls, dtype: str | torch.dtype | None) -> str | torch.dtype | None:
        if isinstance(dtype, torch.dtype) and dtype not in DTYPES.values():
            raise ValueError(f"LLM argument dtype={dtype} is no type of weights; use {', '.join(DTYPES)}")
        return dtype


class LLM:
    """A target model, and how it speculates.

    model: a directory, a hub id, or an embedded name
    dtype, device: unless given, chosen by the model and the machine
    revision: of a hub id
    max_batch_size, or max_num_seqs: requests that are decoded together (default: 8)
    max_model_len: the most tokens of a request, prompt included
    prefill_chunk_size: the most prompt tokens of one forward
    speculative_config: an object with vLLM's keys (`specdec.speculative_config`), or its JSON text; None: no speculation. Where
        a method needs num_speculative_tokens, its default is the command line's (conf/method/)
    seed: of requests without a seed of their own
    num_threads: of torch; unless given, as they are (1 is best on a CPU that other programs use)
    tensor_parallel_size: processes that share the target, in a script started by `torchrun --nproc_per_node`; all of them make
        the same calls and get the same answers. 1: this process has all of it, under torchrun too
    enforce_eager: False: verification forwards have few fixed shapes, each a CUDA graph on a GPU; unless given, they have not
    arguments: others of vLLM's are not built: an error, unless they are None or false

    Raises ValueError, one line, for an argument of another type or beyond its limit.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        revision: str | None = None,
        max_batch_size: int | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        prefill_chunk_size: int = 512,
        speculative_config: dict[str, Any] | str | None = None,
        seed: int = 0,
        num_threads: int | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool | None = None,
        **arguments: Any,
    ):
        args = EngineArgs(
            model=model, dtype=dtype, device=device, revision=revision, max_batch_size=max_batch_size,
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, prefill_chunk_size=prefill_chunk_size,
            speculative_config=speculative_config, seed=seed, num_threads=num_threads,
            tensor_parallel_size=tensor_parallel_size, enforce_eager=enforce_eager, **arguments,
        )  # fmt: skip
        if args.num_threads is not None:
            torch.set_num_threads(args.num_threads)
        # a mistake is found before the target is loaded
        plan = _with_default_length(SpeculativeConfig.parse(args.speculative_config)).resolve()
        plan.check_processes(args.tensor_parallel_size)
        device = None if args.device is None else str(args.device)
        processes = distributed.join(args.tensor_parallel_size, choose_device(device))
        self.target = CausalLM(args.model, args.dtype, device, args.revision, processes)
        proposer, verifier = plan.build(self.target)
        if not verifier.lossless:
            print(f"note: rejection scheme {verifier.name} does not preserve the target's distribution", file=sys.stderr)
        self.engine = Engine(
            self.target,
            proposer,
            verifier,
            args.num_rows,
            args.max_model_len,
            args.prefill_chunk_size,
            policy=plan.policy.build(self.target, proposer, args.num_rows),
            enforce_eager=args.enforce_eager is not False,
        )
        self.seed = args.seed
        self._counter = itertools.count()
        self._num_calls = 0
        self._totals = Totals(self.target.name, proposer.num_speculative_tokens)

    def get_tokenizer(self) -> Any:
        return self.target.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Decode prompts: strings, token ids, `TextPrompt` and `TokensPrompt`. One SamplingParams for all, or one for each.

        Raises ValueError, one line, for a prompt of another kind, and for one that cannot be decoded.
        """
        from tqdm import tqdm

        parsed = self._prompts(prompts, sampling_params)
        requests = [request for prompt in parsed for request in prompt.requests]
        self._new_call()
        finished = self.engine.run(requests)
        hidden = not use_tqdm or not self.target.processes.is_main
        for request in tqdm(finished, total=len(requests), desc="requests", unit="request", disable=hidden):
            self._totals.add(request)
        outputs = []
        for prompt in parsed:
            completions = [
                self._completion(index, request, answer_text(request, self.target.tokenizer), request.output_token_ids)
                for index, request in enumerate(prompt.requests)
            ]
            outputs.append(self._output(prompt, completions))
        return outputs

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Decode as `generate` does, and yield each answer in pieces: after every step what has become final of its text, with
        the tokens since its last piece. Text that may yet change (half a character, the beginning of a stop string) waits.

        The pieces' texts, token ids and logprobs joined are those of `generate`. A piece has one answer, whose `index` says
        which; the last piece of a prompt has `finished=True`, the first one of its first answer its `prompt_logprobs`.

        Raises ValueError as `generate` does, here; and amid the pieces if another call takes the engine over.
        """
        parsed = self._prompts(prompts, sampling_params)
        call = self._new_call()
        self.engine.add(*(request for prompt in parsed for request in prompt.requests))
        return self._pieces(parsed, call)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Decode conversations (one, or a list of them), rendered by the tokenizer's chat template.

        tools: schemas of functions, which the template shows to the model.

        Raises ValueError, one line, for what is no conversation, and for one that the template refuses.
        """
        for key, value, kinds, hint in (
            ("messages", messages, list | tuple, "a list of {'role': ..., 'content': ...}, or a list of such lists"),
            ("chat_template", chat_template, str | None, "the text of a Jinja template"),
            ("tools", tools, list | None, "a list of schemas of functions"),
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
        if tools and "tools" not in (chat_template or str(tokenizer.chat_template)):
            print("note: the chat template does not read tools", file=sys.stderr)
        options = {"chat_template": chat_template, "tools": tools, **(chat_template_kwargs or {})}
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = render_chat(tokenizer, conversation, add_generation_prompt=add_generation_prompt, **options)
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_metrics(self) -> list[Metric]:
        """Sums over all finished requests, named as in vLLM's method of this name: `Counter` (`value`) and `Vector` (`values`)
        of `specdec.measure.stats`, which documents where values differ from vLLM's."""
        return self._totals.metrics()

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        """The sampling parameters of each of `count` prompts."""
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if not isinstance(params, list | tuple) or not all(isinstance(each, SamplingParams) for each in params):
            raise ValueError(
                f"sampling_params={short_repr(params)}: give SamplingParams(...), or a list with one for each prompt"
            )
        if len(params) != count:
            raise ValueError(f"{len(params)} sampling_params for {count} prompts; give one for all or one for each")
        return list(params)

    def _prompts(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Prompt]:
        """Every prompt with a request for each of its answers."""
        if not isinstance(prompts, str | dict | Iterable) or getattr(prompts, "ndim", 1) == 0:
            raise ValueError(f"prompts={short_repr(prompts)}: give {PROMPT_FORMS}, or a list of these")
        one = isinstance(prompts, str | dict) or _is_token_ids(prompts)
        prompt_list: list[Any] = [prompts] if one else list(prompts)
        parsed = []
        for prompt, params in zip(prompt_list, self._params(sampling_params, len(prompt_list)), strict=True):
            text, ids = self._tokenize(prompt)
            number = next(self._counter)
            seed = derived_seed(self.seed, number) if params.seed is None else params.seed
            requests = [Request(str(number), ids, params, seed)]
            if params.n > 1:
                requests = []
                for index in range(params.n):
                    # the prompt's own numbers are the same for all answers
                    prompt_logprobs = None if index else params.prompt_logprobs
                    answer_params = params.model_copy(update={"n": 1, "prompt_logprobs": prompt_logprobs})
                    answer_seed = derived_seed(seed, 0, index) if index else seed
                    requests.append(Request(f"{index}_{number}", ids, answer_params, answer_seed))
            parsed.append(_Prompt(str(number), text, requests))
        for each in parsed:  # before requests of another call are dropped
            for request in each.requests:
                self.engine.check(request)
        return parsed

    def _tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, list(self.target.tokenizer(check_text(prompt, "prompt"))["input_ids"])
        if isinstance(prompt, list | tuple | np.ndarray | torch.Tensor):
            return None, token_ids(prompt, "prompt")
        if not isinstance(prompt, dict):
            raise ValueError(f"prompt {short_repr(prompt)} is none of: {PROMPT_FORMS}")
        for key, value in prompt.items():
            if key in PROMPT_KEYS_NOT_BUILT and value is not None:
                raise ValueError(f"prompt key {key!r} is not built here; leave it out")
            if key not in (*PROMPT_KEYS, *PROMPT_KEYS_NOT_BUILT):
                raise ValueError(f"unknown prompt key {key!r}; {nearest(str(key), PROMPT_KEYS)}")
        text = prompt.get("prompt")
        if not isinstance(text, str | None):
            raise ValueError(f"prompt={short_repr(text)} must be a string")
        if "prompt_token_ids" in prompt:
            return text, token_ids(prompt["prompt_token_ids"], "prompt_token_ids")
        if text is None:
            raise ValueError("a prompt object needs 'prompt' or 'prompt_token_ids'")
        return self._tokenize(text)

    def _new_call(self) -> int:
        """Drop the requests that an error, an interruption or an unfinished stream left behind. Returns the call's number."""
        self.engine.abort_all()
        self._num_calls += 1
        return self._num_calls

    def _pieces(self, prompts: list[_Prompt], call: int) -> Iterator[RequestOutput]:
        """The steps of `stream`."""
        answers = {
            request.id: _StreamedAnswer(prompt, index, request)
            for prompt in prompts
            for index, request in enumerate(prompt.requests)
        }

        def check_call() -> None:
            if self._num_calls != call:
                raise ValueError("another call on this LLM has dropped the stream's requests; read a stream to its end first")

        while answers:
            check_call()
            finished = self.engine.step()
            # copies: what comes between two pieces may be another call
            for request, output_token_ids in [(request, output_n.tolist()) for request, output_n in self.engine.running()]:
                check_call()
                answer = answers[request.id]
                text = settled_text(output_token_ids, request.params, self.target.tokenizer)
                size = len(text) if request.params.detokenize else len(output_token_ids)
                if size > (len(answer.text) if request.params.detokenize else answer.num_tokens):
                    yield self._piece(answer, output_token_ids, text, False)
            for request in finished:
                check_call()
                self._totals.add(request)
                answer = answers.pop(request.id)
                is_last = not any(each.prompt is answer.prompt for each in answers.values())
                text = answer_text(request, self.target.tokenizer)
                yield self._piece(answer, request.output_token_ids, text, is_last)

    def _piece(self, answer: _StreamedAnswer, output_token_ids: list[int], text: str, finished: bool) -> RequestOutput:
        """What an answer has more than its last piece had.

        output_token_ids, text: of the answer so far.
        """
        assert text.startswith(answer.text), "text that was final has changed"
        num_before = answer.num_tokens
        completion = self._completion(answer.index, answer.request, text[len(answer.text) :], output_token_ids, num_before)
        answer.text = text
        answer.num_tokens = len(output_token_ids)
        return self._output(answer.prompt, [completion], finished, is_first=not answer.index and not num_before)

    def _output(
        self, prompt: _Prompt, completions: list[CompletionOutput], finished: bool = True, is_first: bool = True
    ) -> RequestOutput:
        """A piece of a prompt's output, or all of it. is_first: it has the prompt's own log probabilities."""
        request = prompt.requests[0]
        ids = request.prompt_token_ids
        output = RequestOutput(prompt.request_id, prompt.text, ids, completions, finished, request)
        if is_first and request.params.prompt_logprobs is not None:
            places = enumerate(request.prompt_logprobs, start=1)
            output.prompt_logprobs = [None]
            output.prompt_logprobs += [
                self._logprobs(each, ids[max(0, place - MAX_CHARACTER_TOKENS) : place], request) for place, each in places
            ]
        return output

    def _completion(self, index: int, request: Request, text: str, ids: list[int], first: int = 0) -> CompletionOutput:
        """An answer, or a piece of one. text: of the piece; ids: of the answer so far; first: the tokens from this one on."""
        completion = CompletionOutput(index, text, ids[first:], request.finish_reason, request.stop_reason)
        max_draft = self.engine.proposer.num_speculative_tokens
        if request.finish_reason is not None and max_draft:
            completion.spec_decode_metrics = SpecDecodeMetrics.of(request.stats, max_draft)
        if request.params.logprobs is not None:
            completion.cumulative_logprob = sum(each.logprobs[0] for each in request.logprobs)
            places = enumerate(request.logprobs[first:], start=first)
            completion.logprobs = [
                self._logprobs(each, ids[max(0, place - MAX_CHARACTER_TOKENS) : place], request) for place, each in places
            ]
        return completion

    def _logprobs(self, place: TokenLogprobs, before: Sequence[int], request: Request) -> dict[int, Logprob]:
        """By token id; the token at the place comes first."""
        logprobs = {}
        for i, (token, logprob) in enumerate(zip(place.token_ids, place.logprobs, strict=True)):
            text = token_text(token, before, self.target.tokenizer) if request.params.detokenize else None
            logprobs[token] = Logprob(logprob, i or place.rank, text)
        return logprobs


def _is_token_ids(prompts: Any) -> bool:
    """Whether this is one prompt's token ids, not a list of prompts."""
    if isinstance(prompts, torch.Tensor):
        return prompts.ndim == 1
    return isinstance(prompts, list | tuple | np.ndarray) and len(prompts) > 0 and isinstance(prompts[0], int | np.number)


def _with_default_length(config: SpeculativeConfig) -> SpeculativeConfig:
    """With the command line's num_speculative_tokens, where the method needs it and it is not given."""
    if config.num_speculative_tokens is not None:
        return config
    name = config.infer_method()
    if not method.needs_length(name):
        return config
    from specdec.config import CONF, read  # imports Hydra, which LLM does not need otherwise

    length = read(CONF / "method" / f"{name}.yaml")["num_speculative_tokens"]
    return config.model_copy(update={"num_speculative_tokens": length})
