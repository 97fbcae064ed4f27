"""What the engine needs of a transformers model, checked with a few tokens when it is loaded.

Keys and values reach the slot cache through transformers' attention interface, so every layer must call it, exactly once, and
no other operation may pass information from one token to another. A model that breaks this (a bias on the scores, another mask,
a recurrent state, positions that it counts itself) would decode garbage without an error. `probe` compares the logits over the
slot cache with those of transformers' own attention, and on the way learns what no config says reliably: the shapes of keys and
values, which modules are the decoder layers, and which one is the final norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging as transformers_logging

from specdec.checked import first_line
from specdec.model.attention import Attention, SlotAttention, UnsupportedModel, attention_interface
from specdec.model.kv import ForwardBatch, SlotCache
from specdec.model.packed_linear import Packed
from specdec.model.tensor_parallel import ColumnParallelLinear

ATTENTION = "specdec"
PROBE = "specdec_probe"
AttentionInterface.register(ATTENTION, attention_interface)

NUM_TOKENS = 8  # of the probe
NUM_FIRST = 5  # of these, tokens of its first forward
# arguments of the interface that change nothing
HARMLESS = {
    "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "logits_to_keep",
}  # fmt: skip
ARGUMENT_NAMES = {"s_aux": "attention sinks (s_aux)"}  # what an argument is called, where its name does not say it
# How far logits may be from transformers' own, as a share of their spread. In float32 rounding makes less than 1e-5 for small
# models, and an error 0.25 and more. In 16 bits rounding makes 0.02, and more where a mixture's router chooses other experts.
TOLERANCE = 0.01
TOLERANCE_16_BITS = 0.25
MAX_TOLERANCE_16_BITS = 0.5


@dataclass
class Contract:
    """What the probe learned.

    kv_shapes: heads, width of keys and width of values of each layer, as this process holds them.
    vocab_size: columns of the logits.
    layers: the decoder layers.
    final_norm: the module between the last layer and the output layer; the identity if there is none.
    states_error: why hidden states cannot be read, or their logits not be derived; empty if they can.
    """

    kv_shapes: list[tuple[int, int, int]]
    vocab_size: int
    layers: nn.ModuleList | None = None
    final_norm: nn.Module | None = None
    states_error: str = ""


@dataclass
class Probe:
    """Records and checks every call of the attention interface, and makes room for its layer in a cache.

    cache: where keys and values go.
    max_positions: how long a row may become.
    calls: layers, in the order of their calls.
    masks: by address, a mask that transformers made, and its rule.
    """

    cache: SlotCache
    calls: list[int] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    max_positions: int = 2**31

    def mask(self, **arguments: Any) -> Tensor:
        """Replaces transformers' function that makes masks: keeps the rule."""
        shape = arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"]
        mask = torch.zeros(shape, dtype=arguments.get("dtype", torch.float32), device=self.cache.device)
        self.masks[mask.data_ptr()] = mask, arguments["mask_function"]
        return mask

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        attention: Attention | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """`attention_interface`, once the call is checked. Raises UnsupportedModel for what the slot cache would not do."""
        if attention is not None:
            self.check_call(module, query, key, value, attention_mask, sliding_window, unused)
        return attention_interface(module, query, key, value, None, scaling, sliding_window, softcap, attention)

    def check_call(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        sliding_window: int | None,
        unused: dict[str, Any],
    ) -> None:
        """Note a call of the interface. Raises UnsupportedModel for what the slot cache would not do."""
        layer = getattr(module, "layer_idx", None)
        if type(layer) is not int or layer < 0:
            raise UnsupportedModel(
                f"{type(module).__name__} calls transformers' attention interface without the number of its layer"
            )
        for name, argument in unused.items():
            changes = argument is not None and argument is not False and name not in HARMLESS
            if name == "dropout":
                changes = bool(argument)
            if name == "is_causal":
                changes = argument is False
            if changes:
                raise UnsupportedModel(
                    f"{type(module).__name__} attends with {ARGUMENT_NAMES.get(name, name)}, which the engine does not know"
                )
        shapes = [list(x.shape) for x in (query, key, value)]
        fits = query.shape[0] == 1 and query.shape[2] == key.shape[2] == value.shape[2] and key.shape[:2] == value.shape[:2]
        if not fits or query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
            raise UnsupportedModel(
                f"{type(module).__name__} attends by tensors of shapes {shapes}, which are not those of one row"
            )
        if attention_mask is not None:
            if attention_mask.data_ptr() not in self.masks:
                raise UnsupportedModel(f"{type(module).__name__} attends with a mask of its own")
            self._check_mask(self.masks[attention_mask.data_ptr()][1], sliding_window, module)
        self.calls.append(layer)
        self.cache.set_layer(layer, (key.shape[1], key.shape[3], value.shape[3]))

    def _check_mask(self, rule: Any, sliding_window: int | None, module: nn.Module) -> None:
        """The rule of the mask must be that of the slots: keys not later, and not further back than the window."""
        last = min(self.max_positions, 2**31) - 1
        steps = [0, *(2**i for i in range(31)), *([] if sliding_window is None else [sliding_window - 1, sliding_window])]
        pairs = [(q, q + sign * step) for q in (0, last // 3, last) for step in steps for sign in (-1, 1)]
        pairs = [pair for pair in pairs if 0 <= pair[1] <= last]
        query, key = torch.tensor(pairs, device=self.cache.device).unbind(1)
        expected = key <= query
        if sliding_window is not None:
            expected &= key > query - sliding_window
        zero = torch.zeros_like(query)
        try:
            visible = torch.as_tensor(rule(zero, zero, query, key)).expand_as(expected).bool()
        except Exception as error:  # a rule may read what a text model does not give
            raise UnsupportedModel(
                f"{type(module).__name__} attends with a mask that cannot be read ({first_line(error)})"
            ) from None
        if not torch.equal(visible, expected):
            b = int((visible != expected).nonzero()[0])
            does = "sees" if visible[b] else "does not see"
            raise UnsupportedModel(
                f"{type(module).__name__} attends with a mask that the engine does not know: position {query[b]} {does} "
                f"position {key[b]}"
            )


def probe(
    model: Any, dtype: torch.dtype, device: torch.device, scale: Callable[[Tensor], Tensor], max_positions: int = 2**31
) -> Contract:
    """Check a loaded model. Its attention implementation is `ATTENTION`, before and after.

    dtype, device: of keys and values.
    scale: what the architecture does to the output layer's result.
    max_positions: how long a row may become.
    Raises UnsupportedModel with the reason.
    """
    config = model.config.get_text_config()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    cache = SlotCache([], dtype, device)
    cache.reserve(2, NUM_TOKENS)
    recorder = Probe(cache, max_positions=max_positions)
    AttentionInterface.register(PROBE, recorder.attention)
    AttentionMaskInterface.register(PROBE, recorder.mask)
    token_N = torch.tensor(_tokens(config), device=device)

    def compare(logits_NV: Tensor, expected_NV: Tensor, why: str) -> None:
        gap = _gap(logits_NV, expected_NV)
        exact = dtype == torch.float32
        near = gap <= (TOLERANCE if exact else TOLERANCE_16_BITS)
        if not near and (exact or not gap <= _rounding(model, token_N)):
            raise UnsupportedModel(f"its logits differ by {gap:.0%} from those of transformers' own attention: {why}")

    def forward(start: list[int], counts: list[int], logits_at_N: np.ndarray | None = None) -> Tensor:
        tokens = torch.cat([token_N[first : first + count] for first, count in zip(start, counts, strict=True)])
        return call(model, tokens, ForwardBatch(cache, 0, np.array(start), np.array(counts), logits_at_N=logits_at_N))

    try:
        with torch.no_grad():
            _use(model, PROBE)
            with ModuleTrace(model) as trace:
                first = forward([0], [NUM_FIRST])
            layers = _layers(model, recorder.calls)
            if first.shape != (NUM_FIRST, config.vocab_size):
                raise UnsupportedModel(
                    f"its logits are {first.shape[-1]} wide, and its config has vocab_size={config.vocab_size}"
                )
            _use(model, ATTENTION)
            # the first row goes on from its cache, the second begins beside it; logits of some tokens only
            later = forward(
                [NUM_FIRST, 0], [NUM_TOKENS - NUM_FIRST, NUM_TOKENS], logits_at_N=np.arange(1, 2 * NUM_TOKENS - NUM_FIRST)
            )
            reference = _reference(model, token_N, "eager")
            compare(first, reference[:NUM_FIRST], "its attention or its positions are made of more than the engine gives it")
            again = torch.cat([reference[NUM_FIRST:], reference])[1:]
            compare(later, again, "it counts positions, or keeps a state, by itself")
            norm, states_error = trace.final_norm(layers, first, scale, config.hidden_size)
        return Contract(cache.layers, first.shape[-1], layers, norm, states_error)
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model does with arguments that it does not know
        raise UnsupportedModel(f"a forward of the engine fails ({first_line(error)})") from None
    finally:
        transformers_logging.set_verbosity(verbosity)


def call(model: Any, token_N: Tensor, batch: ForwardBatch) -> Tensor:
    """Logits of one forward over the slot cache: [N, V], or of the batch's `logits_at_N` only."""
    logits: Tensor = model(
        input_ids=token_N.unsqueeze(0),
        position_ids=batch.position_N.unsqueeze(0),
        use_cache=False,
        logits_to_keep=0 if batch.logits_at_N is None else batch.logits_at_N,
        attention=SlotAttention(batch),
    ).logits[0]
    if batch.logits_at_N is not None and len(logits) != len(batch.logits_at_N):  # some classes pass over `logits_to_keep`
        return logits[batch.logits_at_N]
    return logits


def _reference(model: Any, token_N: Tensor, attention: str) -> Tensor:
    """[N, V] logits by transformers' own attention."""
    _use(model, attention)
    try:
        logits: Tensor = model(input_ids=token_N.unsqueeze(0), use_cache=False).logits[0]
    except Exception as error:
        raise UnsupportedModel(f"its own forward fails, without the engine ({first_line(error)})") from None
    finally:
        _use(model, ATTENTION)
    return logits


def _use(model: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    if model.config.get_text_config()._attn_implementation != implementation:
        raise UnsupportedModel("its attention does not go through transformers' attention interface")


def _tokens(config: Any) -> list[int]:
    """Ids from all over the vocabulary, without special ones (some models count positions by the padding)."""
    special: set[int | None] = set()
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = getattr(config, key, None)
        special |= set(ids) if isinstance(ids, list | tuple) else {ids}
    ordinary = [i for i in (config.vocab_size * k // 64 for k in range(1, 63)) if i not in special]
    return (ordinary * NUM_TOKENS)[: 7 * NUM_TOKENS : 7]


def _layers(model: Any, calls: list[int]) -> nn.ModuleList | None:
    """The list of decoder layers, each of which is called once; None if they are not in one list."""
    if not calls:
        raise UnsupportedModel("none of its layers calls transformers' attention interface")
    for layer in calls:
        if calls.count(layer) > 1:
            raise UnsupportedModel(
                f"layer {layer} calls transformers' attention interface {calls.count(layer)} times in one forward"
            )
    num_layers = model.config.get_text_config().num_hidden_layers
    missing = set(range(max(num_layers, max(calls) + 1))) - set(calls)
    if missing:
        raise UnsupportedModel(f"layer {min(missing)} does not call transformers' attention interface")
    return layers_of(model, len(calls))


def layers_of(model: Any, num_layers: int) -> nn.ModuleList | None:
    """The list of decoder layers: the i-th has the attention of layer i, for every i."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            numbers = [{getattr(inner, "layer_idx", None) for inner in child.modules()} - {None} for child in module]
            if all(number == {i} for i, number in enumerate(numbers)):
                return module
    return None


def decoder_of(model: Any) -> Any:
    """The module that makes the states that the output layer reads."""
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder


def _gap(logits_NV: Tensor, expected_NV: Tensor) -> float:
    """How far logits are from the expected ones, as a share of the spread of these. Raises UnsupportedModel if these are not
    finite."""
    logits_NV = logits_NV.double()
    expected_NV = expected_NV.double()
    masked_NV = expected_NV < -1e9  # tokens that the model never predicts
    if not expected_NV.masked_fill(masked_NV, 0.0).isfinite().all() or masked_NV.all(-1).any():
        raise UnsupportedModel("its logits are not finite (nan or inf); use another dtype, or fetch the model again")
    logits_NV = logits_NV.masked_fill(masked_NV & (logits_NV < -1e9), 0.0)
    expected_NV = expected_NV.masked_fill(masked_NV, 0.0)
    spread_NV = expected_NV - expected_NV.mean(-1, keepdim=True)
    return ((logits_NV - expected_NV).norm() / spread_NV.norm().clamp(min=1e-12)).item()


def _rounding(model: Any, token_N: Tensor) -> float:
    """The gap that rounding in 16 bits may make: twice that between two attention implementations of transformers."""
    try:
        gap = _gap(_reference(model, token_N, "sdpa"), _reference(model, token_N, "eager"))
    except ValueError:  # a model that has one of them only
        return 0.0
    return min(2 * gap, MAX_TOLERANCE_16_BITS)


class ModuleTrace:
    """Records what enters and leaves every module of one forward."""

    def __init__(self, model: Any):
        self.model = model
        self.head: Any = None
        self.records: list[tuple[nn.Module, Any, Any]] = []
        self.hooks: list[Any] = []

    def __enter__(self) -> ModuleTrace:
        try:
            self.head = self.model.get_output_embeddings()
        except Exception:  # some classes have none, and raise
            self.head = None

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            self.records.append((module, entering(args, kwargs), leaving(out)))

        for module in self.model.modules():
            self.hooks.append(module.register_forward_hook(record, with_kwargs=True))
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self.hooks:
            hook.remove()

    def final_norm(
        self, layers: nn.ModuleList | None, logits_NV: Tensor, scale: Callable[[Tensor], Tensor], width: int
    ) -> tuple[nn.Module | None, str]:
        """The module between the last layer and the output layer; or None, and why there is none to read states by."""
        if layers is None:
            return None, "its decoder layers are not in one list"
        order = [module for module, _, _ in self.records]
        places = [order.index(layer) for layer in layers if layer in order]
        if len(places) < len(layers) or places != sorted(places):
            return None, "its decoder layers do not run one after the other"
        shape = (1, len(logits_NV), width)
        for place in places:
            _, before, after = self.records[place]
            if before is None or after is None or before.shape != shape or after.shape != shape:
                return None, "what passes between its decoder layers is not one state per token"
        if not isinstance(self.head, nn.Linear | Packed | ColumnParallelLinear) or self.head not in order:
            return None, "it has no output layer that is a linear one"
        last = self.records[places[-1]][2]
        read = self.records[order.index(self.head)][1]
        assert last is not None
        candidates: list[nn.Module] = [nn.Identity()] if _same(last, read) else []
        for module, before, after in self.records[places[-1] + 1 :]:
            if module is not self.head and _same(before, last) and _same(after, read):
                candidates.append(module)
        for module in candidates:
            derived_NV = scale(self.head(module(last)))[0].float()
            expected_NV = logits_NV.float()  # some models return wider ones than they compute
            if torch.allclose(derived_NV, expected_NV, rtol=2e-2, atol=2e-2 * float(expected_NV.abs().max())):
                return module, ""
        return None, "its logits do not follow from the last layer's states by a final norm and the output layer"


def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The states that enter a module."""
    states = args[0] if args else kwargs.get("hidden_states")
    return states if isinstance(states, Tensor) else None


def leaving(out: Any) -> Tensor | None:
    """The states that leave a module."""
    states = out[0] if isinstance(out, tuple) and out else out
    return states if isinstance(states, Tensor) else None


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)
