"""How one request is sampled and when it stops."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from specdec.checked import Checked

PLAIN = "none"  # the method without speculation, the baseline of every speedup
MAX_ANSWERS = 16384  # to a prompt; each is a request
GREEDY_BELOW = 1e-5  # a temperature below this is greedy, as in vLLM
# fields that records on disk leave out at their defaults, so that runs from before they existed still compare
LATER_FIELDS = ("n", "logprobs", "prompt_logprobs", "allowed_token_ids", "bad_words", "detokenize")


class SamplingParams(Checked):
    """How one request is sampled and when it stops, with the names and meanings of vLLM's class of this name. Hugging Face's
    `max_new_tokens` and `min_new_tokens` are accepted for `max_tokens` and `min_tokens`.

    Unlike in vLLM, `min_p` and `logit_bias` work with speculation; so do all others. A parameter of vLLM's that is not built is
    an error, unless its value is None or false.

    n: answers to a prompt, each with a seed of its own
    logprobs, prompt_logprobs: at each place of the answer (the prompt) the log probability of its token and of so many most
        likely ones, of the target's logits as they are; -1: of the whole vocabulary
    allowed_token_ids: no other token is sampled
    bad_words: texts whose last token is not sampled where it would complete one of them in the answer, with and without a
        space in front
    detokenize: false: the answer's text stays empty
    """

    what = "sampling parameter"
    aliases = ("max_new_tokens", "min_new_tokens")
    not_built = frozenset((
        "best_of", "early_stopping", "extra_args", "flat_logprobs", "guided_decoding", "length_penalty", "logits_processors",
        "logprob_token_ids", "output_kind", "prompt_logprob_start", "prompt_logprob_token_ids", "repetition_detection",
        "routed_experts_prompt_start", "skip_clone", "skip_reading_prefix_cache", "spaces_between_special_tokens",
        "stream_interval", "structured_outputs", "thinking_token_budget", "trace_decode_token_ids", "truncate_prompt_tokens",
        "use_beam_search", "watermarking",
    ))  # fmt: skip

    temperature: float = Field(1.0, ge=0)  # below GREEDY_BELOW means 0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 and -1 both mean: all tokens
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=1e-4, le=1e4)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    bad_words: list[str] = Field([])
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(16, ge=1)
    min_tokens: int = Field(0, ge=0)
    stop: list[str] = Field([])
    stop_token_ids: list[int] = Field([])
    ignore_eos: bool = False
    speculative_config: dict[str, Any] | None = None  # {"num_speculative_tokens": n}: for this request at most n; 0: none
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    logprobs: int | None = Field(None, ge=-1)
    prompt_logprobs: int | None = Field(None, ge=-1)

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for key, alias in (("max_tokens", "max_new_tokens"), ("min_tokens", "min_new_tokens")):
            value = values.pop(alias, None)
            if value is None:
                continue
            if values.get(key, value) != value:
                raise ValueError(f"{key}={values[key]} and {alias}={value} differ; give one of them")
            values[key] = value
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        for key in ("stop", "stop_token_ids", "bad_words"):
            if values.get(key, []) is None:
                values[key] = []
        return values

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        for key, value in (self.speculative_config or {}).items():
            if key not in ("method", "num_speculative_tokens"):
                raise ValueError(f"speculative_config key {key!r} is not a request's; it may lower num_speculative_tokens")
            if key == "method" and value != PLAIN:
                raise ValueError(f"speculative_config method={value!r} of a request: only {PLAIN!r} is possible")
            if key == "num_speculative_tokens" and (type(value) is not int or value < 0):
                raise ValueError(f"speculative_config num_speculative_tokens={value!r} of a request must be a number from 0 on")
        if "" in self.stop:
            raise ValueError("stop='': an empty stop string would stop every request; leave it out")
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop={self.stop} needs the text, and detokenize=False makes none; use stop_token_ids, or leave it out"
            )
        if not all(word.strip() for word in self.bad_words):
            raise ValueError(f"bad_words={self.bad_words}: an empty text forbids nothing; leave it out")
        if self.n > 1 and self.greedy:
            raise ValueError(
                f"n={self.n} at temperature 0 would give {self.n} times the same answer; use n=1, or a temperature"
            )
        for token, bias in (self.logit_bias or {}).items():
            if abs(bias) > 1e6:
                raise ValueError(
                    f"logit_bias of token {token} is {bias}; beyond 1e6 it would drown the logits, use -1e6 to forbid"
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}; lower it")
        return self

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        fields = type(self).model_fields
        return {key: x for key, x in values.items() if key not in LATER_FIELDS or x != fields[key].default}

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one."""
        return self.model_copy(deep=True)

    @property
    def num_speculative_tokens(self) -> int | None:
        """The most tokens of a draft for this request: 0 for no speculation, None for the engine's number."""
        config = self.speculative_config or {}
        return 0 if config.get("method") == PLAIN else config.get("num_speculative_tokens")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """Whether nothing but the temperature changes the logits."""
        return (
            self.repetition_penalty == 1
            and not self.presence_penalty
            and not self.frequency_penalty
            and not self.logit_bias
            and self.allowed_token_ids is None
            and not self.bad_words
            and not self.min_tokens
        )
