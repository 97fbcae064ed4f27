"""A Hugging Face causal LM over a slot cache: the target of every method, and the drafter of `draft_model`.

`forward` takes ragged rows laid end to end and returns logits and tapped hidden states. This file and `kv.py` are the only ones
that know transformers' model interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from specdec import hub, linear, shard
from specdec.core import first_line, nearest
from specdec.kv import SlotCache, Window, slot_attention
from specdec.parallel_state import ALONE, Processes

AttentionInterface.register("specdec", slot_attention)
transformers_logging.disable_progress_bar()  # loading is quick; the bars that matter are the run's

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Output:
    """logits: [N, V], or [B, V] when only each row's last token was asked for. hidden: [N, T, D] of the tapped layers."""

    logits: Tensor
    hidden_NTD: Tensor | None = None


def choose_device(device: str | None = None) -> torch.device:
    """cuda if there is one, else cpu; a name that torch does not know is a ValueError."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device={device!r} is not a device; use cpu, cuda or cuda:N") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: the engine runs on cpu and cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch sees no CUDA device; use device=cpu")
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """bfloat16 on cuda, float32 on the CPU, unless named (`auto` means the same)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in (None, "auto"):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    short = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
    name = short.get(dtype, dtype)
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    return DTYPES[name]


class CausalLM:
    """Weights, tokenizer and the facts about them that decoding needs.

    name: a local directory, a hub id, or the name of an embedded model (`specdec.hub`).
    dtype, device: chosen as `choose_dtype` and `choose_device` say, unless given. processes: among which the weights are cut,
    each with its own device; logits and hidden states are whole in all of them, keys and values are not.
    Raises ValueError, one line, for what is not a model, not readable, or not of an architecture that can be rolled back.
    """

    processes: Processes = ALONE

    def __init__(
        self,
        name: str | Path,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        revision: str | None = None,
        processes: Processes = ALONE,
    ):
        self.name, self.processes = str(name), processes
        self.device = processes.device or choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        with processes.in_turn():
            self.path = hub.resolve(self.name, revision)
            self.model = load_weights(self.path, self.dtype, self.device, processes)
            if linear.can_pack(self.dtype, self.device):
                linear.pack(self.model)
        self.config = self.model.config.get_text_config()

        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_model_len: int = getattr(self.config, "max_position_embeddings", None) or 2**31
        self.eos_token_ids = _eos_token_ids(self.path, self.config)
        self._tokenizer: Any = None
        self._taps: dict[int, Tensor] = {}
        self._hooks: dict[int, Any] = {}

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
            except Exception as error:
                raise ValueError(f"{self.path}: no tokenizer that can be read ({first_line(error)})") from None
        return self._tokenizer

    @property
    def num_parameters(self) -> int:
        """Parameters read by one forward (tied embeddings count once)."""
        return hub.num_parameters(self.config)

    # ---------------------------------------------------------------- parts that a drafter shares, and training reads

    @property
    def embedding(self) -> torch.nn.Module:
        """Token ids to what enters layer 0 (with the scale, where the embedding module has one)."""
        return self.model.get_input_embeddings()

    @property
    def final_norm(self) -> torch.nn.Module:
        return self.model.get_decoder().norm

    def head_rows(self, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Weight [n, D] and bias [n] of the output layer, for these tokens or for all."""
        head = self.model.get_output_embeddings()
        weight = shard.whole_weight(head)
        if token_ids is None:
            return weight.detach(), head.bias
        return weight.detach()[token_ids], None if head.bias is None else head.bias.detach()[token_ids]

    def cap(self, logits: Tensor) -> Tensor:
        """What the architecture does to the output layer's result (Gemma 2 caps, Cohere and Granite scale)."""
        return capped(self.config, logits)[0]

    @torch.inference_mode()
    def logits_of(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] from the states that leave the last layer, before the final norm."""
        return self.cap(self.model.get_output_embeddings()(self.final_norm(hidden_ND)))

    def slots(self) -> list[tuple[int, ...]]:
        """What a slot cache holds for every layer: heads, width of keys, and of values where that is another (MLA, whose
        compressed keys and values are kept as the heads see them)."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        width = getattr(self.config, "head_dim", None) or self.hidden_size // self.config.num_attention_heads
        of_layer: tuple[int, ...] = (heads, width)
        if of_key := getattr(self.config, "qk_head_dim", None):
            of_layer = (self.config.num_attention_heads, of_key, self.config.v_head_dim)
        return [of_layer] * self.num_layers

    def new_cache(self) -> SlotCache:
        """For this process's own heads, where those are cut among several."""
        size, share = self.processes.size, 1
        if size > 1 and shard.cuts_heads(shard.plan_of(self.model.config, size)):
            share = size
        return SlotCache([(heads // share, *widths) for heads, *widths in self.slots()], self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        cache: SlotCache,
        token_N: Tensor,
        start_B: np.ndarray,
        length_B: np.ndarray,
        first_row: int = 0,
        last_only: bool = False,
        hidden_layers: tuple[int, ...] = (),
        keep: np.ndarray | None = None,
    ) -> Output:
        """Process each row's tokens at its positions and keep their K and V in the cache.

        token_N: int64 on the device, the rows' tokens end to end; start_B, length_B: on the host, where each row's tokens
        begin and how many there are (0 is allowed); rows first_row ... of the cache. last_only: logits of each row's last
        token only; of a row without tokens, those of some other token. keep: places among the tokens, for logits of these
        only. hidden_layers: id i taps what enters layer i (its residual stream), id `num_layers` what leaves the last one,
        before the final norm: the ids of vLLM's EAGLE-3.
        """
        window = Window(cache, first_row, start_B, length_B)
        self._tap(hidden_layers)
        if last_only:
            keep = (np.cumsum(length_B) - 1).clip(0)
        places: Any = 0 if keep is None else torch.from_numpy(keep).to(self.device, non_blocking=True)
        out = self.model(
            input_ids=token_N.unsqueeze(0),
            position_ids=window.slot_N.unsqueeze(0),
            use_cache=False,
            logits_to_keep=places,
            window=window,
        )
        hidden_NTD = None
        if hidden_layers:
            hidden_NTD = torch.stack([self._taps[layer][0] for layer in hidden_layers], 1)
        return Output(out.logits[0], hidden_NTD)

    def prefill(
        self, cache: SlotCache, row: int, tokens: np.ndarray, start: int, chunk: int, hidden_layers: tuple[int, ...] = ()
    ) -> Output:
        """Process tokens of one row from position `start` on, `chunk` at a time. Logits [1, V] of the last one."""
        hidden: list[Tensor] = []
        for first in range(start, len(tokens), chunk):
            part = tokens[first : first + chunk]
            out = self.forward(
                cache,
                torch.from_numpy(part).to(self.device),
                np.array([first]),
                np.array([len(part)]),
                first_row=row,
                last_only=True,
                hidden_layers=hidden_layers,
            )
            if out.hidden_NTD is not None:
                hidden.append(out.hidden_NTD)
        return Output(out.logits, torch.cat(hidden) if hidden else None)

    def _tap(self, layers: tuple[int, ...]) -> None:
        """Hooks that keep what enters the layers asked for (and only those)."""
        if set(self._hooks) == set(layers):
            return
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._taps = {}, {}
        decoder = self.model.get_decoder()
        for layer in set(layers):
            if not 0 <= layer <= self.num_layers:
                raise ValueError(f"hidden layer {layer} is outside 0..{self.num_layers} of {self.name}")
            module = decoder.norm if layer == self.num_layers else decoder.layers[layer]

            def keep(_: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
                self._taps[layer] = args[0] if args else kwargs["hidden_states"]

            self._hooks[layer] = module.register_forward_pre_hook(keep, with_kwargs=True)


def capped(config: Any, logits: Tensor) -> tuple[Tensor, Tensor | float]:
    """What an architecture does to the output layer's result, and the slope of that."""
    slope: Tensor | float = 1.0
    for factor in (getattr(config, "logit_scale", None), 1 / (getattr(config, "logits_scaling", None) or 1)):
        if factor and factor != 1:
            logits, slope = logits * factor, slope * factor
    if limit := getattr(config, "final_logit_softcapping", None):
        bent = torch.tanh(logits / limit)
        logits, slope = bent * limit, slope * (1 - bent * bent)
    return logits, slope


def load_weights(path: Path, dtype: torch.dtype, device: torch.device, processes: Processes = ALONE) -> Any:
    """The transformers model of a directory, for inference, reading only JSON and safetensors. Of several processes each has
    its part on its device; the whole passes through the memory of the CPU."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"{path}: config.json cannot be read ({first_line(error)})") from None
    _refuse_what_cannot_roll_back(path, config)
    plan = shard.plan_of(config, processes.size) if processes.size > 1 else None
    if hub.is_random(path):
        with torch.random.fork_rng(), device if plan is None else torch.device("cpu"):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="specdec")
    else:
        loud = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # what is wrong is said below, in one line
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation="specdec",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:
            raise ValueError(f"{path}: the weights cannot be read ({first_line(error)}); fetch the model again") from None
        finally:
            transformers_logging.set_verbosity(loud)
        model, told = loaded
        if told["missing_keys"]:  # transformers would leave them random
            raise ValueError(f"{path}: the weights lack {sorted(told['missing_keys'])[0]!r}; fetch the model again")
    if plan is not None:
        shard.shard(model, plan, processes)
    return model.to(device).eval().requires_grad_(False)


def _refuse_what_cannot_roll_back(path: Path, config: Any) -> None:
    text = config.get_text_config()
    foreign = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if foreign or getattr(config, "is_encoder_decoder", False):
        what = ", ".join(sorted(foreign)) or "an encoder"
        raise ValueError(
            f"{path}: model_type {config.model_type!r} has {what}, whose state cannot be rolled back to before a rejected "
            "draft; use a model with attention layers only"
        )


def _eos_token_ids(path: Path, config: Any) -> list[int]:
    """All ids that end a generation: those of generation_config.json, else those of config.json."""
    ids = None
    if (path / "generation_config.json").exists():
        try:
            ids = GenerationConfig.from_pretrained(path).eos_token_id
        except Exception as error:
            raise ValueError(f"{path}: generation_config.json cannot be read ({first_line(error)})") from None
    ids = config.eos_token_id if ids is None else ids
    listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int for token in listed):
        raise ValueError(f"{path}: eos_token_id is {str(ids)[:40]!r}, and should be a token id, or a list of them")
    return listed
