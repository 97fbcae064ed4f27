"""A Hugging Face causal LM over a slot cache: the target of every method, and the drafter of `draft_model`.

`forward` takes ragged rows laid end to end and returns logits and tapped hidden states. This file, `contract.py` and
`attention.py` are the only ones that know transformers' model interface.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from specdec import hub
from specdec.checked import first_line, nearest
from specdec.model import contract, fused, packed_linear, tensor_parallel
from specdec.model.attention import UnsupportedModel
from specdec.model.contract import ATTENTION, Contract
from specdec.model.device import Timer
from specdec.model.distributed import SINGLE, ProcessGroup
from specdec.model.kv import CAUSAL, ForwardBatch, SlotCache, Visibility

transformers_logging.disable_progress_bar()  # loading is quick; the bars that matter are the run's

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Output:
    """What a forward returns.

    logits: [N, V], or [B, V] of each row's last token if `last_only`, or of the tokens at `logits_at_N`.
    hidden_NTD: states of the tapped layers, of all tokens.
    """

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


def fastest_dtype(device: torch.device) -> torch.dtype:
    """bfloat16, but on a CPU without instructions for it, where float32 takes half the time: for work that needs no more
    precision than decoding has, such as hidden states and answers to train on."""
    return torch.float32 if device.type == "cpu" and not packed_linear.has_bfloat16_products() else torch.bfloat16


LOADING = threading.Lock()  # transformers keeps what a load and a probe set in one place for all threads


class CausalLM:
    """Weights, tokenizer and the facts about them that decoding needs.

    name: a local directory, a hub id, or the name of an embedded model (`specdec.hub`).
    dtype, device: unless given, of `choose_dtype` and `choose_device`.
    revision: of a hub id.
    processes: that the weights are sharded among, each with its own device. All of them have all logits and hidden states, and
        each has the keys and values of its heads.
    timers: a list that gets the timer of every forward; also of a draft model that is loaded beside this target.

    max_model_len: most tokens of a row.
    max_model_len_reason: why, where the model itself has no such limit.

    Raises ValueError, one line, for what is not a model, not readable, or not of an architecture that the slot cache serves.
    """

    processes: ProcessGroup = SINGLE
    contract: Contract
    max_model_len_reason: str = ""

    def __init__(
        self,
        name: str | Path,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        revision: str | None = None,
        processes: ProcessGroup = SINGLE,
        timers: list[Timer] | None = None,
    ):
        self.name = str(name)
        self.timers = timers
        self.processes = processes
        self.device = processes.device or choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        packed_linear.turn_amx_off()
        with LOADING, processes.one_at_a_time():
            self.path = hub.resolve(self.name, revision)
            self.model = load_weights(self.path, self.dtype, self.device, processes)
            if packed_linear.can_pack(self.dtype, self.device):
                packed_linear.pack(self.model)
        self.config = self.model.config.get_text_config()

        self.max_model_len: int = getattr(self.config, "max_position_embeddings", None) or 2**31
        if (original := longrope_limit(self.config)) is not None and original < self.max_model_len:
            self.max_model_len = original
            self.max_model_len_reason = (
                "; beyond them a LongRoPE model rotates all positions of a forward by other factors, so a row would depend on "
                "its batch mates"
            )
        with LOADING:
            self.contract = check_contract(self.model, self.path, self.dtype, self.device, self.max_model_len)
        if packed_linear.can_pack(self.dtype, self.device) and self.contract.layers is not None:
            fused.fuse(self.contract.layers)
        self.vocab_size: int = self.contract.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = len(self.contract.kv_shapes)
        self.eos_token_ids = _eos_token_ids(self.path, self.config)
        self._tokenizer: Any = None
        self._taps: dict[int, Any] = {}
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

    # ---------------------------------------------------------------- modules that drafters share and training reads

    @property
    def embedding(self) -> torch.nn.Module:
        """Token ids to the input of layer 0 (with the scale, where the embedding module has one)."""
        return self.model.get_input_embeddings()

    @property
    def layers(self) -> torch.nn.ModuleList:
        """The decoder layers."""
        self.check_states()
        assert self.contract.layers is not None
        return self.contract.layers

    @property
    def final_norm(self) -> torch.nn.Module:
        """The module between the last layer and the output layer."""
        self.check_states()
        assert self.contract.final_norm is not None
        return self.contract.final_norm

    @property
    def not_finite_message(self) -> str:
        """The end of an error line about logits that hold nan or inf."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"the logits of {self.name} are not finite (nan or inf) in {dtype}; use another dtype, or fetch the model again"

    def check_states(self) -> None:
        """Raise ValueError, one line, if hidden states cannot be read, or the logits not be derived from the last of them."""
        if self.contract.states_error:
            raise ValueError(
                f"{self.name}: hidden states of model_type {self.config.model_type!r} cannot be used: "
                f"{self.contract.states_error}; it decodes with methods that read none (ngram, suffix, draft_model)"
            )

    def check_shared_parts(self) -> None:
        """Raise ValueError, one line, if a drafter cannot share this target's states, embedding and output layer."""
        self.check_states()
        if (width := self.embedding(torch.zeros(1, dtype=torch.int64, device=self.device)).shape[-1]) != self.hidden_size:
            raise ValueError(
                f"{self.name}: the embedding of model_type {self.config.model_type!r} is {width} wide, and its hidden states "
                f"are {self.hidden_size} wide; a drafter that shares both cannot be built, use method draft_model"
            )

    def head_rows(self, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Weight [n, D] and bias [n] of the output layer, for these tokens or for all."""
        head = self.model.get_output_embeddings()
        weight = tensor_parallel.full_weight(head)
        if token_ids is None:
            return weight.detach(), head.bias
        return weight.detach()[token_ids], None if head.bias is None else head.bias.detach()[token_ids]

    def scale_logits(self, logits: Tensor) -> Tensor:
        """What the architecture does to the output layer's result (Gemma 2 bends it, Cohere and Granite scale it)."""
        return scale_logits(self.config, logits)[0]

    @torch.inference_mode()
    def logits_of(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] from the states that leave the last layer, before the final norm."""
        return self.scale_logits(self.model.get_output_embeddings()(self.final_norm(hidden_ND)))

    def kv_shapes(self) -> list[tuple[int, ...]]:
        """Of every layer, what a slot cache of all processes holds: heads, width of keys and of values. MLA's keys and values
        are kept as the heads see them."""
        size = self.processes.size
        is_sharded = size > 1 and tensor_parallel.shards_heads(tensor_parallel.plan_of(self.model.config, size))
        return [(heads * size if is_sharded else heads, *widths) for heads, *widths in self.contract.kv_shapes]

    def new_cache(self) -> SlotCache:
        """A cache for this process's heads."""
        return SlotCache(self.contract.kv_shapes, self.dtype, self.device)

    def plan(
        self,
        cache: SlotCache,
        start_B: np.ndarray,
        length_B: np.ndarray,
        first_row: int = 0,
        last_only: bool = False,
        logits_at_N: np.ndarray | None = None,
        visibility: Visibility = CAUSAL,
        slot_BM: np.ndarray | None = None,
        buffers: ForwardBatch | None = None,
    ) -> ForwardBatch:
        """The host's part of a forward. The other arguments are those of `ForwardBatch`.

        last_only: logits of each row's last token only; of a row without tokens, those of some other token.
        """
        if last_only:
            logits_at_N = (np.cumsum(length_B) - 1).clip(0)
        return ForwardBatch(cache, first_row, start_B, length_B, visibility, slot_BM, logits_at_N, buffers)

    @torch.inference_mode()
    def run(self, token_N: Tensor, batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> Output:
        """The device's part of a forward: process the tokens of a plan and keep their K and V in its cache.

        token_N: int64 on the device, the rows' tokens end to end.
        hidden_layers: id i taps what enters layer i (its residual stream), id `num_layers` what leaves the last one, before the
            final norm: the ids of vLLM's EAGLE-3.
        """
        self._tap(hidden_layers)
        logits = contract.call(self.model, token_N, batch)
        hidden_NTD = torch.stack([self._taps[layer][0] for layer in hidden_layers], 1) if hidden_layers else None
        return Output(logits, hidden_NTD)

    def forward(
        self,
        cache: SlotCache,
        token_N: Tensor,
        start_B: np.ndarray,
        length_B: np.ndarray,
        first_row: int = 0,
        last_only: bool = False,
        hidden_layers: tuple[int, ...] = (),
        logits_at_N: np.ndarray | None = None,
        visibility: Visibility = CAUSAL,
        slot_BM: np.ndarray | None = None,
    ) -> Output:
        """`plan` and `run`."""
        with self.timed():
            batch = self.plan(cache, start_B, length_B, first_row, last_only, logits_at_N, visibility, slot_BM)
            return self.run(token_N, batch, hidden_layers)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """The block is a forward, whose time goes to `timers`, if there are any."""
        timer = None if self.timers is None else Timer(self.device)
        yield
        if timer is not None and self.timers is not None:
            timer.mark()
            self.timers.append(timer)

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
        """Put hooks on these layers and no others; they keep the layers' inputs in `_taps`."""
        if set(self._hooks) == set(layers):
            return
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._taps = {}
        for layer in set(layers):
            if not 0 <= layer <= self.num_layers:
                raise ValueError(f"hidden layer {layer} is outside 0..{self.num_layers} of {self.name}")

            def enters(_: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
                self._taps[layer] = contract.entering(args, kwargs)

            def leaves(_: Any, args: Any, out: Any, layer: int = layer) -> None:
                self._taps[layer] = contract.leaving(out)

            if layer < self.num_layers:
                self._hooks[layer] = self.layers[layer].register_forward_pre_hook(enters, with_kwargs=True)
            else:
                self._hooks[layer] = self.layers[-1].register_forward_hook(leaves)


def scale_logits(config: Any, logits: Tensor) -> tuple[Tensor, Tensor | float]:
    """What an architecture does to the output layer's result, and the derivative of that."""
    slope: Tensor | float = 1.0
    for factor in (getattr(config, "logit_scale", None), 1 / (getattr(config, "logits_scaling", None) or 1)):
        if factor and factor != 1:
            logits = logits * factor
            slope = slope * factor
    if softcap := getattr(config, "final_logit_softcapping", None):
        bent = torch.tanh(logits / softcap)
        logits = bent * softcap
        slope = slope * (1 - bent * bent)
    return logits, slope


def load_weights(path: Path, dtype: torch.dtype, device: torch.device, processes: ProcessGroup = SINGLE) -> Any:
    """The transformers model of a directory, for inference, reading only JSON and safetensors.

    processes: each gets its shard on its device; the full weights pass through the memory of the CPU.
    Raises ValueError, one line, for what cannot be read, and for weights that are not the model's: missing ones, integers where
    it has numbers, nan and inf.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"{path}: config.json cannot be read ({first_line(error)})") from None
    _check_can_roll_back(path, config)
    plan = tensor_parallel.plan_of(config, processes.size) if processes.size > 1 else None
    if hub.is_random(path):
        with torch.random.fork_rng(), device if plan is None else torch.device("cpu"):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    else:
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # the errors below say it in one line
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=ATTENTION,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:
            _check_can_be_built(path, config)
            raise ValueError(f"{path}: the weights cannot be read ({first_line(error)}); fetch the model again") from None
        finally:
            transformers_logging.set_verbosity(verbosity)
        model, loading_info = loaded
        if loading_info["missing_keys"]:  # transformers would leave them random
            raise ValueError(f"{path}: the weights lack {sorted(loading_info['missing_keys'])[0]!r}; fetch the model again")
        _check_weights(model, path)
    if plan is not None:
        tensor_parallel.shard(model, plan, processes)
    return model.to(device).eval().requires_grad_(False)


def _check_can_roll_back(path: Path, config: Any) -> None:
    """Raise ValueError, one line, for layers that keep more of a rejected token than K and V in its slot."""
    text = config.get_text_config()
    other_types = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if other_types or getattr(config, "is_encoder_decoder", False):
        names = ", ".join(sorted(other_types)) or "an encoder"
        raise ValueError(
            f"{path}: model_type {config.model_type!r} has {names}, which attends in another way, or keeps a state that cannot "
            "be rolled back to before a rejected draft; use a model with layers of full or sliding attention only"
        )
    if getattr(text, "attn_temperature_tuning", None) and 0 in (getattr(text, "no_rope_layers", None) or []):
        raise ValueError(
            f"{path}: model_type {config.model_type!r} scales the queries of layers without rotation by their place in the "
            "forward (attn_temperature_tuning), which is not a row's position here; use another model"
        )


def _check_can_be_built(path: Path, config: Any) -> None:
    """Raise ValueError, one line, for a failure to load that no other copy of the weights would mend."""
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    except Exception as error:
        raise ValueError(
            f"{path}: model_type {config.model_type!r} cannot be decoded here: transformers makes no causal LM of it whose "
            f"attention goes through its attention interface ({first_line(error)}); use another model"
        ) from None


def _check_weights(model: Any, path: Path) -> None:
    """Raise ValueError, one line, for nan, inf, and integers in the file of what are numbers in the model."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in sorted(opened.keys()):  # some are renamed, or fused, as they are read
                is_number = tensors[key].is_floating_point() if key in tensors else key.endswith("weight")
                if is_number and not (dtype := opened.get_slice(key).get_dtype()).startswith(("F", "BF")):
                    raise ValueError(
                        f"{file}: {key} is of type {dtype}, and the model has numbers there; fetch the model again"
                    )
    for key, tensor in tensors.items():
        if not is_finite(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"{path}: the weight {key} holds nan or inf in {dtype}; fetch the model again, or use a dtype with more range"
            )


def is_finite(tensor: Tensor) -> bool:
    """Whether it holds no nan and no inf; also of 8-bit types, which `torch.isfinite` does not take."""
    if not tensor.is_floating_point():
        return True
    if not tensor.numel():
        return True
    tensor = tensor.detach()
    # one pass over the memory, 25 times as fast as `isfinite().all()` on a CPU; both are nan if anything is
    low, high = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)
    return bool(low.isfinite() & high.isfinite())


def check_contract(model: Any, path: Path, dtype: torch.dtype, device: torch.device, max_positions: int = 2**31) -> Contract:
    """The contract of a loaded model, by a probe. Raises ValueError, one line, for one that the slot cache cannot serve."""

    def scale(logits: Tensor) -> Tensor:
        return scale_logits(model.config.get_text_config(), logits)[0]

    try:
        return contract.probe(model, dtype, device, scale, max_positions)
    except UnsupportedModel as error:
        remedy = "" if "; use " in str(error) else "; use a model of another type"
        raise ValueError(f"{path}: model_type {model.config.model_type!r} cannot be decoded here: {error}{remedy}") from None


def longrope_limit(config: Any) -> int | None:
    """Tokens of a row for which a LongRoPE model has one set of factors; None for other models.

    transformers takes the short or the long factors by the largest position of a forward, for all rows in it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limits = []
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if settings.get("rope_type") in ("longrope", "su") and any(
            settings.get(f"short_{key}") != settings.get(f"long_{key}") for key in ("factor", "mscale")
        ):
            limits.append(
                settings.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            )
    return min((limit for limit in limits if limit), default=None)


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
