"""The offline API that users of vLLM know: `LLM(...).generate(prompts, SamplingParams(...))`, with `speculative_config={...}`.

The last module of the house: nothing else imports it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, Field, field_validator

from specdec.chat.template import unread_template_kwargs
from specdec.checked import Checked, check_text, nearest, short_repr
from specdec.core import Request
from specdec.engine import Engine
from specdec.measure.stats import Metric, SpecDecodeMetrics, Totals
from specdec.model import distributed
from specdec.model.target import DTYPES, CausalLM, choose_device
from specdec.params import SamplingParams
from specdec.prompts import answer_text, derived_seed, render_chat, token_ids
from specdec.speculative_config import SpeculativeConfig

MAX_THREADS = 1024  # beyond, a typo: torch would start so many at once


@dataclass
class CompletionOutput:
    """One answer. token_ids include the eos or stop token that ended it, as in transformers and vLLM."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None


@dataclass
class RequestOutput:
    """A prompt and its answer, shaped as vLLM's class of this name; request: the engine's record."""

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
    def _is_of_weights(cls, dtype: str | torch.dtype | None) -> str | torch.dtype | None:
        if isinstance(dtype, torch.dtype) and dtype not in DTYPES.values():
            raise ValueError(f"LLM argument dtype={dtype} is no type of weights; use {', '.join(DTYPES)}")
        return dtype


class LLM:
    """A target model, and how it speculates.

    model: a directory, a hub id, or an embedded name
    dtype, device: unless given, chosen by the model and the machine
    revision: of a hub id
    max_batch_size: requests that are decoded together
    max_model_len: the most tokens of a request, prompt included
    prefill_chunk_size: the most prompt tokens of one forward
    speculative_config: an object with vLLM's keys (`specdec.speculative_config`), or its JSON text; None: no speculation
    seed: of requests without a seed of their own
    num_threads: of torch; unless given, as they are (1 is best on a CPU that other programs use)
    tensor_parallel_size: processes that share the target, in a script started by `torchrun --nproc_per_node`; all of them make
        the same calls and get the same answers. 1: this process has all of it, under torchrun too

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
        plan = SpeculativeConfig.parse(args.speculative_config).resolve()  # a mistake is found before the target is loaded
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
            args.max_batch_size,
            args.max_model_len,
            args.prefill_chunk_size,
            policy=plan.policy.build(self.target, proposer, args.max_batch_size),
        )
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
        prompt_list = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        texts = []
        requests = []
        for prompt, params in zip(prompt_list, self._params(sampling_params, len(prompt_list)), strict=True):
            text, ids = self._tokenize(prompt)
            number = next(self._counter)
            seed = derived_seed(self.seed, number) if params.seed is None else params.seed
            texts.append(text)
            requests.append(Request(str(number), ids, params, seed))
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
        """Decode conversations (one, or a list of them), rendered by the tokenizer's chat template.

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
        prompts = []
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

    def _tokenize(self, prompt: str | dict[str, Any]) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, list(self.target.tokenizer(check_text(prompt, "prompt"))["input_ids"])
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

        # requests that an error or an interruption of the last call left behind
        self.engine.abort_all()
        finished = self.engine.run(requests)
        hidden = not use_tqdm or not self.target.processes.is_main
        for request in tqdm(finished, total=len(requests), desc="requests", unit="request", disable=hidden):
            self._totals.add(request)
        return [self._output(text, request) for text, request in zip(texts, requests, strict=True)]

    def _output(self, text: str | None, request: Request) -> RequestOutput:
        answer = answer_text(request, self.target.tokenizer)
        metrics = None
        if self.engine.proposer.num_speculative_tokens:
            metrics = SpecDecodeMetrics.of(request.stats, self.engine.proposer.num_speculative_tokens)
        completion = CompletionOutput(0, answer, request.output_token_ids, request.finish_reason, request.stop_reason, metrics)
        return RequestOutput(request.id, text, request.prompt_token_ids, [completion], request=request)
