"""A target whose distribution can be written down, for tests of the whole engine: the last two tokens tell it.

`TableLM` takes part in everything that a model does. Its cache holds tokens where a model would hold K and V,
and its logits come from what is there: a token that is stale, misplaced or missing after a rejection
changes the distribution, or is found out as a slot that was never written. `next_probs_reference` says in words what the
sampling parameters mean, and `joint_distribution` multiplies that out. `methods` and `schemes` list what there is to
test.

Shape letters are those of specdec/core.py; S counts slots.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specdec import method, rejection
from specdec.core import Context, Draft, Policy, Proposer
from specdec.drafter.base import Init
from specdec.model.contract import Contract
from specdec.model.kv import CAUSAL, Tree, Visibility
from specdec.model.target import CausalLM, Output
from specdec.params import SamplingParams
from specdec.policy.adaptive import Adaptive, Scheduled
from specdec.policy.cost_table import CostTable
from specdec.rejection import Verifier
from specdec.sampling import inverse_cdf

CONF = Path(__file__).resolve().parents[2] / "conf"
POISON = -1  # what a slot holds that was never written


class TokenCache:
    """Stands in for `specdec.model.kv.SlotCache`. Has no slot that was not asked for: a step too far fails."""

    def __init__(self) -> None:
        self.rows = 0
        self.slots = 0
        self.token_RS = np.zeros((0, 0), dtype=np.int64)

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return 8 * (max(rows, self.rows) * max(slots, self.slots) - self.rows * self.slots)

    def reserve(self, rows: int, slots: int) -> None:
        rows = max(rows, self.rows)
        slots = max(slots, self.slots)
        grown = np.full((rows, slots), POISON, dtype=np.int64)
        grown[: self.rows, : self.slots] = self.token_RS
        self.rows = rows
        self.slots = slots
        self.token_RS = grown

    def write(self, row_N: np.ndarray, slot_N: np.ndarray, token_N: np.ndarray) -> None:
        self.token_RS[row_N, slot_N] = token_N

    def move(self, row_N: Tensor, from_slot_N: Tensor, to_slot_N: Tensor) -> None:
        self.token_RS[row_N.numpy(), to_slot_N.numpy()] = self.token_RS[row_N.numpy(), from_slot_N.numpy()]

    def wipe(self) -> None:
        self.token_RS[:] = POISON


class TableLM(CausalLM):
    """logits[i] = table[token[i - 1], token[i]]; the last line is for the first token, with none before it.

    table: [V + 1, V, V]. A hidden state tells where it comes from: it is the token's one-hot, the position
    and the layer.
    """

    def __init__(self, table: np.ndarray, name: str = "table", max_model_len: int = 512) -> None:
        self.table = np.asarray(table, dtype=np.float32)
        self.name = name
        self.timers = None
        self.path = Path(name)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.vocab_size = self.table.shape[-1]
        self.num_layers = 2
        assert self.table.shape == (self.vocab_size + 1, self.vocab_size, self.vocab_size)
        self.hidden_size = self.vocab_size + 2
        self._parts()
        self.max_model_len = max_model_len
        self.eos_token_ids: list[int] = []
        self._tokenizer = None

    def _parts(self) -> None:
        """What a drafter shares with a target, and the shape that it takes after."""
        noise = torch.Generator().manual_seed(5)
        self.config = LlamaConfig(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, intermediate_size=8, num_hidden_layers=self.num_layers,
            num_attention_heads=1, num_key_value_heads=1, head_dim=4, max_position_embeddings=512,
        )  # fmt: skip
        self.head_VD = torch.randn(self.vocab_size, self.hidden_size, generator=noise)
        self.embedding_of_drafter = torch.nn.Embedding(self.vocab_size, self.hidden_size).requires_grad_(False)
        self.embedding_of_drafter.weight.copy_(torch.randn(self.vocab_size, self.hidden_size, generator=noise))
        self.config._attn_implementation = "specdec"
        decoder = SimpleNamespace(rotary_emb=LlamaRotaryEmbedding(self.config))
        layers = torch.nn.ModuleList([LlamaDecoderLayer(self.config, 0)])
        self.contract = Contract([(1, 4, 4)] * self.num_layers, self.vocab_size, layers, torch.nn.Identity())
        self.model = SimpleNamespace(get_output_embeddings=self._head, get_decoder=lambda: decoder)

    def _head(self) -> torch.nn.Linear:
        head = torch.nn.Linear(self.hidden_size, self.vocab_size, bias=False).requires_grad_(False)
        head.weight.copy_(self.head_VD)
        return head

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ValueError("a table has no tokenizer")
        return self._tokenizer

    @property
    def embedding(self) -> torch.nn.Module:
        return self.embedding_of_drafter

    @classmethod
    def random(cls, vocab_size: int, seed: int = 0, scale: float = 1.0, max_model_len: int = 512) -> TableLM:
        shape = (vocab_size + 1, vocab_size, vocab_size)
        table = scale * np.random.default_rng(seed).standard_normal(shape)
        return cls(table, f"table-{vocab_size}-{seed}", max_model_len)

    @classmethod
    def constant(cls, distribution: Sequence[float], max_model_len: int = 512) -> TableLM:
        """The same distribution everywhere."""
        table = np.broadcast_to(np.log(distribution), (len(distribution) + 1, len(distribution), len(distribution)))
        return cls(table, f"constant-{distribution}", max_model_len)

    def _with_table(self, table: np.ndarray, name: str) -> TableLM:
        other = copy.copy(self)
        other.table = table.astype(np.float32)
        other.name = name
        other.path = Path(name)
        return other

    def negated(self) -> TableLM:
        """Likes best what this model likes least."""
        return self._with_table(-self.table, f"{self.name}-negated")

    def noisy(self, scale: float, seed: int = 1) -> TableLM:
        noise = scale * np.random.default_rng(seed).standard_normal(self.table.shape)
        return self._with_table(self.table + noise, f"{self.name}-noisy")

    def new_cache(self) -> TokenCache:  # type: ignore[override]
        return TokenCache()

    @torch.inference_mode()
    def forward(  # type: ignore[override]
        self,
        cache: TokenCache,
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
        token_N = token_N.numpy()
        assert len(token_N) == length_B.sum() > 0
        assert len(start_B) == len(length_B)
        assert ((token_N >= 0) & (token_N < self.vocab_size)).all(), f"no tokens: {token_N}"
        assert first_row + len(start_B) <= cache.rows
        row_N = np.repeat(np.arange(first_row, first_row + len(start_B)), length_B)
        each_N = np.arange(len(token_N))
        if visibility is CAUSAL:
            position_N = slot_N = each_N + np.repeat(start_B - np.cumsum(length_B) + length_B, length_B)
            cache.write(row_N, slot_N, token_N)
            # a token looks at every slot up to its own, as attention does
            seen_NS = cache.token_RS[row_N, : int(slot_N.max()) + 1]
            unwritten_NS = (seen_NS == POISON) & (np.arange(seen_NS.shape[1]) <= slot_N[:, None])
            assert not unwritten_NS.any(), f"never written, but read: {np.argwhere(unwritten_NS).tolist()}"
            last_N = seen_NS[each_N, slot_N]
            before_N = np.where(slot_N > 0, seen_NS[each_N, slot_N - 1], self.vocab_size)
        else:
            assert isinstance(visibility, Tree)
            tree = visibility
            b_N = np.repeat(np.arange(len(start_B)), length_B)
            place_N = np.arange(len(token_N)) - np.repeat(np.cumsum(length_B) - length_B, length_B) + tree.num_stored
            slot_BX = start_B[:, None] + np.arange(tree.parent_BX.shape[1])
            if slot_BM is not None:
                slot_BX[:, tree.num_stored :] = slot_BM
            slot_N = slot_BX[b_N, place_N]
            position_N = start_B[b_N] + tree.depth_BX()[b_N, place_N]
            cache.write(row_N, slot_N, token_N)

            # a token looks at every slot of the prefix, and at those of its ancestors, as attention does
            sees_NX = tree.visible_BMX()[b_N, place_N - tree.num_stored]
            seen_NS = np.arange(cache.slots) < start_B[b_N, None]
            n, x = np.nonzero(sees_NX)
            seen_NS[n, slot_BX[b_N[n], x]] = True
            unwritten_NS = seen_NS & (cache.token_RS[row_N] == POISON)
            assert not unwritten_NS.any(), f"never written, but read: {np.argwhere(unwritten_NS).tolist()}"
            last_N = cache.token_RS[row_N, slot_N]
            parent_N = tree.parent_BX[b_N, place_N]
            before_slot_N = np.where(parent_N < 0, start_B[b_N] - 1, slot_BX[b_N, parent_N.clip(0)])
            before_N = np.where(position_N > 0, cache.token_RS[row_N, before_slot_N], self.vocab_size)
        assert slot_N.max() < cache.slots
        assert position_N.max() < self.max_model_len

        keep_N = each_N if logits_at_N is None else logits_at_N
        if last_only:  # of a row without tokens, some other token, as CausalLM has it
            keep_N = (np.cumsum(length_B) - 1).clip(0)
        logits = self._logits(before_N[keep_N], last_N[keep_N], position_N[keep_N])
        hidden_NTD = self._hidden(last_N, position_N, hidden_layers) if hidden_layers else None
        return Output(torch.from_numpy(logits), hidden_NTD)

    def _logits(self, before_N: np.ndarray, last_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
        return self.table[before_N, last_N]

    def _hidden(self, token_N: np.ndarray, position_N: np.ndarray, layers: tuple[int, ...]) -> Tensor:
        assert all(0 <= layer <= self.num_layers for layer in layers)
        hidden_NTD = torch.zeros(len(token_N), len(layers), self.hidden_size)
        hidden_NTD[torch.arange(len(token_N)), :, torch.from_numpy(token_N)] = 1
        hidden_NTD[:, :, -2] = torch.from_numpy(position_N).float().unsqueeze(-1)
        hidden_NTD[:, :, -1] = torch.tensor(layers, dtype=torch.float32)
        return hidden_NTD

    def logits_after(self, tokens: Sequence[int]) -> np.ndarray:
        """[V] what a forward over the tokens gives for the last of them."""
        return self.table[tokens[-2] if len(tokens) > 1 else self.vocab_size, tokens[-1]]


class FirstWriteWins(TokenCache):
    """A broken cache, for tests that must fail: what was written to a slot first stays there."""

    def write(self, row_N: np.ndarray, slot_N: np.ndarray, token_N: np.ndarray) -> None:
        empty_N = self.token_RS[row_N, slot_N] == POISON
        super().write(row_N[empty_N], slot_N[empty_N], token_N[empty_N])


# What the sampling parameters mean, slowly


def next_probs_reference(
    logits_V: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """[V] float64: the distribution of the token after prompt + output. stop_ids: what `min_tokens` forbids; bad_words: token
    ids of `params.bad_words`."""
    logits = [float(x) for x in logits_V]
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        for token in stop_ids:
            logits[token] = -math.inf
    for token in {*prompt, *output}:
        push = params.repetition_penalty
        logits[token] = logits[token] / push if logits[token] > 0 else logits[token] * push
    for token in set(output):
        logits[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    for *before, last in bad_words:
        if list(output)[len(output) - len(before) :] == before:
            logits[last] = -math.inf
    if params.allowed_token_ids is not None:
        logits = [x if token in params.allowed_token_ids else -math.inf for token, x in enumerate(logits)]

    vocab = range(len(logits))
    if params.temperature == 0:
        best = max(vocab, key=lambda token: (logits[token], -token))
        return np.array([float(token == best) for token in vocab])
    top = max(logits)
    weight = [math.exp((x - top) / params.temperature) for x in logits]  # 1 for the likeliest
    kept = {token for token in vocab if weight[token] > 0 and weight[token] >= params.min_p}
    if params.top_k > 0:
        border = sorted((weight[token] for token in kept), reverse=True)[: params.top_k][-1]
        kept = {token for token in kept if weight[token] >= border}
    if params.top_p < 1:
        total = sum(weight[token] for token in kept)
        mass = 0.0
        nucleus = set()
        for token in sorted(kept, key=lambda token: (-weight[token], token)):
            if mass < params.top_p * total:
                nucleus.add(token)
            mass += weight[token]
        kept = nucleus
    distribution = np.array([weight[token] if token in kept else 0.0 for token in vocab])
    return distribution / distribution.sum()


def digits(text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
    """A tokenizer for a table: digit d is token d. Spaces are nothing."""
    assert not add_special_tokens
    return {"input_ids": [int(digit) for digit in text.strip()]}


def with_digits(model: TableLM) -> TableLM:
    """The same model with that tokenizer."""
    same = copy.copy(model)
    same._tokenizer = digits
    return same


def joint_distribution(model: TableLM, prompt: Sequence[int], params: SamplingParams, count: int) -> Tensor:
    """[V ** count] the exact distribution of that many tokens after the prompt, in the order of itertools.product."""
    joint = np.ones(1)
    bad_words = [digits(word)["input_ids"] for word in params.bad_words]
    for length in range(count):
        distributions = [
            next_probs_reference(model.logits_after([*prompt, *output]), params, prompt, output, bad_words=bad_words)
            for output in itertools.product(range(model.vocab_size), repeat=length)
        ]
        joint = (joint[:, None] * np.stack(distributions)).reshape(-1)
    return torch.from_numpy(joint)


# Every method and every scheme


NUM_DRAFT = 3  # K of every case; a stretch of K + 1 tokens is what a step emits at most

# What a method is built with, by the name of the case. One that is not listed is built as its YAML says.
_K = {"num_speculative_tokens": NUM_DRAFT}
_TREE = {"tree_topk": 2, "tree_depth": 2}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {"none": {}},
    "ngram": {"ngram": _K | {"prompt_lookup_min": 1, "prompt_lookup_max": 3}},
    "ngram_gpu": {"ngram_gpu": _K | {"prompt_lookup_min": 1, "prompt_lookup_max": 3}},
    "suffix": {
        "suffix": _K | {"suffix_decoding_max_tree_depth": 6, "suffix_decoding_min_token_prob": 0.0},
        "suffix-trees": _K | _TREE | {"suffix_decoding_max_tree_depth": 6, "suffix_decoding_min_token_prob": 0.0},
    },
    "token_recycling": {"token_recycling-trees": _K | _TREE, "token_recycling-chains": _K | {"tree_topk": 1}},
    "draft_model": {
        f"{how}-{drafter}": _K | {"model": drafter, "draft_sample_method": how}
        for how in ("greedy", "probabilistic")
        for drafter in ("same", "noisy", "negated")
    }
    | {
        f"{how}-trees-noisy": _K | _TREE | {"model": "noisy", "draft_sample_method": how} for how in ("greedy", "probabilistic")
    },
    "pard": {
        f"{how}-pard-{drafter}": _K | {"model": drafter, "draft_sample_method": how, "pard_token": 0}
        for how in ("greedy", "probabilistic")
        for drafter in ("same", "negated")
    },
    "extract_hidden_states": {
        "extract": {
            "shared_storage_path": "fresh",
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
        }
    },
    # a reduced vocabulary: tokens that can be accepted, but never drafted
    "eagle3": {
        f"{how}-eagle3-{size}": _K | {"model": size, "draft_sample_method": how}
        for how in ("greedy", "probabilistic")
        for size in ("fresh", "fresh-reduced")
    }
    | {"probabilistic-trees-eagle3": _K | _TREE | {"model": "fresh-reduced", "draft_sample_method": "probabilistic"}},
    "mlp": {
        f"{how}-mlp-{size}": _K | {"model": size, "draft_sample_method": how}
        for how in ("greedy", "probabilistic")
        for size in ("fresh", "fresh-reduced")
    },
    # a chain and a tree, whose nodes know nothing of each other
    "medusa": {
        f"{how}-{shape}-medusa": _K | settings | {"model": "fresh", "draft_sample_method": how}
        for how in ("greedy", "probabilistic")
        for shape, settings in (("chains", {}), ("trees", _TREE))
    },
    "peagle": {
        f"{how}-peagle-{size}": _K | {"model": size, "draft_sample_method": how}
        for how in ("greedy", "probabilistic")
        for size in ("fresh", "fresh-reduced")
    }
    | {"greedy-trees-peagle": _K | _TREE | {"model": "fresh-reduced"}},
    "dflash": {
        f"{how}-dflash-{size}": _K | {"model": size, "draft_sample_method": how}
        for how in ("greedy", "probabilistic")
        for size in ("fresh", "fresh-reduced")
    }
    | {"greedy-trees-dflash": _K | _TREE | {"model": "fresh-reduced"}},
    "dspark": {
        f"{how}-{shape}-dspark-{size}": _K | settings | {"model": size, "draft_sample_method": how}
        for how in ("greedy", "probabilistic")
        for size, shape, settings in (("fresh", "chains", {}), ("fresh-reduced", "trees", _TREE))
    },
    "mtp": {
        f"{how}-mtp-{size}": _K | {"model": size, "draft_sample_method": how}
        for how in ("greedy", "probabilistic")
        for size in ("fresh-reduced", "fresh-modules")
    },
    "hybrid": {
        **{
            f"{how}-hybrid": _K
            | {
                "proposers": [
                    {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3},
                    {"method": "eagle3", "model": "fresh-reduced", "draft_sample_method": how},
                ]
            }
            for how in ("greedy", "probabilistic")
        },
        # a lookup that is grafted into a tree; and a lookup's trees beside chains that are sampled
        "hybrid-grafted": _K
        | {"proposers": [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "eagle3", "model": "fresh-reduced", **_TREE}]},
        "hybrid-of-kinds": _K
        | {
            "proposers": [
                {"method": "ngram", "prompt_lookup_min": 2, **_TREE},
                {"method": "eagle3", "model": "fresh-reduced", "draft_sample_method": "probabilistic"},
            ]
        },
        # parts that draw from distributions of their own, at lengths of their own, and a K of its own for one of them
        "hybrid-of-four": _K
        | {
            "proposers": [
                {"method": "custom_class", "model": "support.table.TableProposer", "num_speculative_tokens": 2},
                {"method": "suffix", "suffix_decoding_max_tree_depth": 6, "min_score": 0.6},
                {"method": "mlp", "model": "fresh", "draft_sample_method": "probabilistic", "max_model_len": 24},
                {"method": "draft_model", "model": "noisy"},
            ]
        },
    },
    "custom_class": {"table": _K | {"model": "support.table.TableProposer"}, "ragged": _K | {"model": "support.table.Ragged"}},
}


def _yaml(path: Path) -> tuple[str, dict[str, Any]]:
    """The name and the settings that are given."""
    settings = {key: value for key, value in yaml.safe_load(path.read_text()).items() if value is not None}
    return settings.pop("name"), settings


def methods() -> list[Any]:
    """pytest parameters (method, settings) of everything in conf/method."""
    cases = []
    for name, yaml_settings in (_yaml(path) for path in sorted((CONF / "method").glob("*.yaml"))):
        default = {name: yaml_settings}
        if method.is_trained(name):
            hows = ("greedy", "probabilistic")
            default = {f"{how}-{name}": _K | {"model": "fresh", "draft_sample_method": how} for how in hows}
        for label, settings in SETTINGS.get(name, default).items():
            cases.append(pytest.param((name, settings), id=label))
    return cases


# of `methods`: chains and trees, looked up and drafted, certain and drawn
OF_ALL_KINDS = (
    *("none", "table", "ngram", "suffix-trees", "greedy-noisy", "probabilistic-noisy", "greedy-trees-noisy"),
    *("probabilistic-trees-noisy", "probabilistic-eagle3-fresh-reduced", "probabilistic-trees-eagle3"),
)


def schemes() -> list[str]:
    """The lossless ones of everything in conf/rejection, `standard` first."""
    names = sorted(
        (_yaml(path)[0] for path in (CONF / "rejection").glob("*.yaml")), key=lambda name: (name != "standard", name)
    )
    return [name for name in names if importlib.import_module(f"specdec.rejection.{name}").lossless]


def scheme(name: str, num_draft: int = NUM_DRAFT) -> Verifier:
    """With the settings of its YAML, and the values that it has for tests."""
    settings = _yaml(CONF / "rejection" / f"{name}.yaml")[1] | getattr(rejection.find(name), "EXAMPLE", {})
    return rejection.build(name, num_draft, **settings)


def proposer(case: tuple[str, dict[str, Any]], target: CausalLM, **drafters: CausalLM) -> Proposer:
    """A method of `methods`. drafters: the models called "noisy" and "negated", if the target is no table."""
    name, settings = case
    return method.build(name, target, **with_models(name, settings, target, drafters))


def with_models(name: str, settings: dict[str, Any], target: CausalLM, drafters: dict[str, CausalLM]) -> dict[str, Any]:
    """The settings with the models that their names mean."""
    if "proposers" in settings:
        return settings | {
            "proposers": [with_models(component["method"], component, target, drafters) for component in settings["proposers"]]
        }
    model = settings.get("model")
    if settings.get("shared_storage_path") == "fresh":
        settings = settings | {"shared_storage_path": tempfile.mkdtemp()}
    if str(model).startswith("fresh"):
        ids = np.array([0, 2]) if model == "fresh-reduced" else None
        drafter: Any = method.find(name)
        architecture = {"num_modules": NUM_DRAFT} if model == "fresh-modules" else {}
        settings = settings | {"model": drafter.init_checkpoint(target, architecture, Init(scale_features=False), ids)}
    elif model == "same":
        settings = settings | {"model": target}
    elif model in ("noisy", "negated"):
        if model not in drafters:
            assert isinstance(target, TableLM)
            drafters = {"noisy": target.noisy(1.0), "negated": target.negated()}
        settings = settings | {"model": drafters[model]}
    return settings


# Policies, under which K changes from step to step


class Restless:
    """Lengths by lot, a third of them 0; and of what is drafted, a part by lot is kept."""

    needs_confidence = False

    def __init__(self, most: int = NUM_DRAFT) -> None:
        self.most = most
        self.rng = np.random.default_rng(3)

    def on_start(self, row: int) -> None:
        pass

    def draft_lengths(self, rows: np.ndarray, most_B: np.ndarray) -> np.ndarray:
        return np.minimum(most_B, self.rng.integers(0, self.most + 1, len(rows)) * (self.rng.random(len(rows)) < 0.8))

    def verify_lengths(self, rows: np.ndarray, draft: Draft) -> np.ndarray:
        return np.minimum(draft.length_B.numpy(), self.rng.integers(0, self.most + 1, len(rows)))

    def observe(self, rows: np.ndarray, draft: Draft, accepted_B: np.ndarray, path_BK: np.ndarray | None = None) -> None:
        assert (accepted_B <= draft.length_B.numpy()).all()


def costs(most: int = NUM_DRAFT, verify: float = 0.12, draft: float = 0.05) -> CostTable:
    """A step of one token takes 1, each further token `verify`, each drafted one `draft`; rows cost a fifth of that more."""
    sizes = [1, 8]
    lengths = list(range(most + 1))
    rows = {size: 1 + 0.2 * (size - 1) for size in sizes}
    verify_s = [[rows[size] + verify * k * size for k in lengths] for size in sizes]
    draft_s = [[draft * k * rows[size] for k in lengths] for size in sizes]
    return CostTable(sizes, lengths, verify_s, draft_s, {})


def adapting(drafting: Proposer, rows: int, **what: bool) -> Adaptive:
    return Adaptive(
        costs(),
        drafting.num_speculative_tokens,
        rows,
        num_confidence_features=drafting.num_confidence_features,
        drafts_trees=drafting.drafts_trees,
        predicts_acceptance=drafting.predicts_acceptance,
        **what,
    )


POLICIES: dict[str, Callable[[Proposer, int], Policy]] = {
    "restless": lambda drafting, rows: Restless(),
    "scheduled": lambda drafting, rows: Scheduled([[1, 1, 2], [2, 2, 0], [3, 5, 3], [7, 7, 0]], NUM_DRAFT),
    "auto": lambda drafting, rows: adapting(drafting, rows, auto=True, prunes=False),
    "prunes": lambda drafting, rows: adapting(drafting, rows, auto=False, prunes=True),
    "both": lambda drafting, rows: adapting(drafting, rows, auto=True, prunes=True),
}


def policy(name: str, drafting: Proposer, rows: int) -> Policy:
    return POLICIES[name](drafting, rows)


# Proposers of a user's own, for method `custom_class`


class TableProposer:
    """Draws ragged drafts from distributions of its own, which depend on the token before and on the place."""

    needs_uniforms = True

    def __init__(self, num_speculative_tokens: int, target: TableLM) -> None:
        shape = (num_speculative_tokens, target.vocab_size, target.vocab_size)
        logits_KVV = torch.randn(shape, generator=torch.Generator().manual_seed(7))
        self.q_KVV = (1.5 * logits_KVV).softmax(-1)
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, context: Context) -> Draft:
        tokens = []
        distributions = []
        last_B = context.last_token_B
        assert context.uniform_BK is not None
        for k, q_VV in enumerate(self.q_KVV):
            distributions.append(q_VV[last_B])
            last_B = inverse_cdf(distributions[-1], context.uniform_BK[:, k])
            tokens.append(last_B)
        # a length may look at committed tokens, but not at those that are offered
        sums = [int(context.tokens(b).sum()) for b in range(len(context.rows))]
        length_B = torch.tensor([self.num_speculative_tokens - total % 3 for total in sums]).clamp(min=0)
        return Draft(torch.stack(tokens, 1), length_B, torch.stack(distributions, 1))


class Ragged:
    """Returns lists: the last token again and again, 0 to K times as the length of the text has it."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, context: Context) -> list[list[int]]:
        times = context.length_B % (self.num_speculative_tokens + 1)
        return [[int(context.tokens(b)[-1])] * int(n) for b, n in enumerate(times)]
