"""A model's large matrices in parts, one for each of the processes that decode together.

transformers says for every architecture which layers can be cut, and which way (`base_model_tp_plan` of its config); the
cutting is ours, into plain tensors, since DTensors know neither the packed layers of `specdec.model.packed_linear` nor an order of sums.
What runs between the cut layers, the residual stream among it, is whole in every process, and so are embedding and logits.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from specdec.model.distributed import ProcessGroup
from specdec.model.packed_linear import PackedLinear

# transformers' words: the columns of a layer's output in parts, or gathered again; its input in parts, or whole and cut here
COLUMNS, GATHERED, ROWS, ROWS_OF_WHOLE = "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"
REPLICATED = "use another size, or 1 (of a draft model, draft_tensor_parallel_size=1)"
_UNCUT = ("replicated_with_grad_allreduce", "embedding_rowwise")  # small, or shared with drafters: not cut


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each process makes some columns of the output, and gets all: [..., out_features].

    Every process holds the same bits then, whatever its states were.
    """

    def __init__(self, part: nn.Linear, out_features: int, bias: Tensor | None, processes: ProcessGroup):
        super().__init__()
        self.part, self.out_features, self.bias, self.processes = part, out_features, bias, processes

    def forward(self, x: Tensor) -> Tensor:
        whole = self.processes.join_columns(self.part(x))[..., : self.out_features]
        return whole if self.bias is None else whole + self.bias


class RowParallelLinear(nn.Module):
    """A linear layer of which each process holds the weights of some columns of the input; the parts are added.

    cut: the input comes whole.
    """

    def __init__(self, part: nn.Linear, bias: Tensor | None, cut: bool, processes: ProcessGroup):
        super().__init__()
        self.part, self.bias, self.cut, self.processes = part, bias, cut, processes
        self.width = part.in_features

    def forward(self, x: Tensor) -> Tensor:
        if self.cut:
            x = x.narrow(-1, self.processes.rank * self.width, self.width)
        whole = self.processes.sum(self.part(x))
        return whole if self.bias is None else whole + self.bias


def plan_of(config: Any, size: int) -> dict[str, str]:
    """Names of a decoder's layers (`*` stands for a number) and how each is cut. Raises ValueError, one line, for an
    architecture or a shape that cannot be, and for a way of cutting that is not built (mixtures of experts)."""
    text = config.get_text_config()
    what = f"tensor_parallel_size={size} of model_type {config.model_type!r}"
    plan: dict[str, str] = dict(text.base_model_tp_plan or {})
    attention = {way for name, way in plan.items() if "attn" in name and way in (COLUMNS, GATHERED)}
    if foreign := sorted({*plan.values()} - {COLUMNS, GATHERED, ROWS, ROWS_OF_WHOLE, *_UNCUT}):
        raise ValueError(f"{what}: layers of kind {foreign[0]} cannot be cut here; {REPLICATED}")
    if len(attention) != 1:
        raise ValueError(f"{what}: transformers has no plan that cuts its attention one way; {REPLICATED}")
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if attention == {COLUMNS} and (heads % size or kv_heads % size):
        raise ValueError(
            f"{what}: num_attention_heads={heads} and num_key_value_heads={kv_heads} must be multiples of {size}; {REPLICATED}"
        )
    return plan


def shards_heads(plan: dict[str, str]) -> bool:
    """True if each process holds its own heads' keys and values, false if all of them."""
    return any("attn" in name and way == COLUMNS for name, way in plan.items())


@torch.no_grad()
def shard(model: Any, plan: dict[str, str], processes: ProcessGroup) -> None:
    """Leave of a model what this process holds. The output layer's columns are cut too, and the logits gathered."""
    decoder = model.get_decoder()
    patterns = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), way) for name, way in plan.items() if way not in _UNCUT]
    for name, module in list(decoder.named_modules()):
        for pattern, way in patterns:
            if pattern.fullmatch(name):
                if not isinstance(module, nn.Linear):
                    raise ValueError(f"{name} is a {type(module).__name__}, which cannot be cut; {REPLICATED}")
                _replace(decoder, name, _part(module, way, name, processes))
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    _replace(model, name, _part(head, GATHERED, name, processes))


def whole_weight(layer: Any) -> Tensor:
    """[out, in] of a linear layer, which may be packed, or gathered from parts (then all processes call this)."""
    if isinstance(layer, ColumnParallelLinear):
        return layer.processes.join_rows(whole_weight(layer.part))[: layer.out_features]
    weight: Tensor = layer.packed.to_dense() if isinstance(layer, PackedLinear) else layer.weight
    return weight


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    setattr(root.get_submodule(owner), own, module)


def _part(layer: nn.Linear, way: str, name: str, processes: ProcessGroup) -> nn.Module:
    size, rank, bias = processes.size, processes.rank, layer.bias
    along = 1 if way in (ROWS, ROWS_OF_WHOLE) else 0
    length = layer.weight.shape[along]
    if length % size and way != GATHERED:
        raise ValueError(f"tensor_parallel_size={size}: the {length} columns of {name} are no multiple of it; {REPLICATED}")
    share = -(-length // size)  # of what is gathered, the last part may be short; it is filled up with zeros
    own = layer.weight.narrow(along, first := min(rank * share, length), min(share, length - first))
    part = nn.Linear(1, 1, bias=False, device=layer.weight.device, dtype=layer.weight.dtype)
    shape = [share if i == along else n for i, n in enumerate(layer.weight.shape)]
    weight = layer.weight.new_zeros(shape)
    weight.narrow(along, 0, own.shape[along]).copy_(own)
    part.weight, (part.out_features, part.in_features) = nn.Parameter(weight, requires_grad=False), shape
    if way == GATHERED:
        return ColumnParallelLinear(part, layer.out_features, bias, processes)
    if way == COLUMNS:
        if bias is not None:
            part.bias = nn.Parameter(bias.narrow(0, rank * share, share).clone(), requires_grad=False)
        return part
    return RowParallelLinear(part, bias, way == ROWS_OF_WHOLE, processes)
