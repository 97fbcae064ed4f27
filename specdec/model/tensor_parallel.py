"""Tensor parallelism: a model's large matrices in parts, one for each process.

transformers has a plan for every architecture of which layers can be cut, and how (`base_model_tp_plan` of its config). The
cutting is done here, into plain tensors: DTensors support neither the packed layers of `specdec.model.packed_linear` nor a
fixed order of sums. What runs between the cut layers, such as the residual stream, is complete in every process, and so are the
embedding and the logits.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from specdec.model.distributed import ProcessGroup
from specdec.model.packed_linear import Packed

# transformers' names: columns of the output in parts, the same and gathered again; columns of the input in parts, where the
# input comes in parts or complete
COLUMNS = "colwise"
COLUMNS_GATHERED = "colwise_gather_output"
ROWS = "rowwise"
ROWS_SPLIT = "rowwise_split_input"
REPLICATED = ("replicated_with_grad_allreduce", "embedding_rowwise")  # small, or shared with drafters: not cut
HINT = "use another size, or 1 (of a draft model, draft_tensor_parallel_size=1)"


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each process computes some columns of the output and gathers all: [..., out_features].

    Every process then has the same bits, whatever its states were.
    """

    def __init__(self, part: nn.Linear, out_features: int, bias: Tensor | None, processes: ProcessGroup):
        super().__init__()
        self.part = part
        self.out_features = out_features
        self.bias = bias
        self.processes = processes

    def forward(self, x: Tensor) -> Tensor:
        y = self.processes.join_columns(self.part(x))[..., : self.out_features]
        return y if self.bias is None else y + self.bias


class RowParallelLinear(nn.Module):
    """A linear layer of which each process has the weights of some columns of the input; the products are added.

    split: the input is complete, and each process takes its columns of it.
    """

    def __init__(self, part: nn.Linear, bias: Tensor | None, split: bool, processes: ProcessGroup):
        super().__init__()
        self.part = part
        self.bias = bias
        self.split = split
        self.processes = processes
        self.width = part.in_features

    def forward(self, x: Tensor) -> Tensor:
        if self.split:
            x = x.narrow(-1, self.processes.rank * self.width, self.width)
        y = self.processes.sum(self.part(x))
        return y if self.bias is None else y + self.bias


def plan_of(config: Any, size: int) -> dict[str, str]:
    """How each layer of a decoder is cut, by name (`*` stands for a number).

    config: the transformers config.
    size: number of processes.

    Raises ValueError, one line, for an architecture or a shape that cannot be cut, and for a way of cutting that is not built
    (mixtures of experts).
    """
    text = config.get_text_config()
    setting = f"tensor_parallel_size={size} of model_type {config.model_type!r}"
    plan: dict[str, str] = dict(text.base_model_tp_plan or {})
    supported = {COLUMNS, COLUMNS_GATHERED, ROWS, ROWS_SPLIT, *REPLICATED}
    if unsupported := sorted({*plan.values()} - supported):
        raise ValueError(f"{setting}: layers of kind {unsupported[0]} cannot be cut here; {HINT}")
    attention = {way for name, way in plan.items() if "attn" in name and way in (COLUMNS, COLUMNS_GATHERED)}
    if len(attention) != 1:
        raise ValueError(f"{setting}: transformers has no plan that cuts its attention one way; {HINT}")
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if attention == {COLUMNS} and (heads % size or kv_heads % size):
        raise ValueError(
            f"{setting}: num_attention_heads={heads} and num_key_value_heads={kv_heads} must be multiples of {size}; {HINT}"
        )
    return plan


def shards_heads(plan: dict[str, str]) -> bool:
    """Whether each process has the keys and values of its own heads only; otherwise it has those of all."""
    return any("attn" in name and way == COLUMNS for name, way in plan.items())


@torch.no_grad()
def shard(model: Any, plan: dict[str, str], processes: ProcessGroup) -> None:
    """Replace layers of a model by this process's parts. The output layer's columns are cut too, and the logits gathered."""
    decoder = model.get_decoder()
    cuts = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), way) for name, way in plan.items() if way not in REPLICATED]
    for name, module in list(decoder.named_modules()):
        for pattern, way in cuts:
            if pattern.fullmatch(name):
                if not isinstance(module, nn.Linear):
                    raise ValueError(f"{name} is a {type(module).__name__}, which cannot be cut; {HINT}")
                _replace(decoder, name, _part(module, way, name, processes))
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    _replace(model, name, _part(head, COLUMNS_GATHERED, name, processes))


def full_weight(layer: Any) -> Tensor:
    """[out, in] of a linear layer, packed or not. If its parts must be gathered, all processes call this."""
    if isinstance(layer, ColumnParallelLinear):
        return layer.processes.join_rows(full_weight(layer.part))[: layer.out_features]
    weight: Tensor = layer.dense() if isinstance(layer, Packed) else layer.weight
    return weight


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(root.get_submodule(parent), attribute, module)


def _part(layer: nn.Linear, way: str, name: str, processes: ProcessGroup) -> nn.Module:
    """This process's part of a layer. way: how it is cut; name: of the layer, for errors."""
    size = processes.size
    rank = processes.rank
    dim = 1 if way in (ROWS, ROWS_SPLIT) else 0  # of the weight, [out, in]
    length = layer.weight.shape[dim]
    if length % size and way != COLUMNS_GATHERED:
        raise ValueError(f"tensor_parallel_size={size}: the {length} columns of {name} are no multiple of it; {HINT}")
    part_length = -(-length // size)  # the last part of what is gathered may be short, and is padded with zeros
    first = min(rank * part_length, length)
    present = layer.weight.narrow(dim, first, min(part_length, length - first))
    shape = [part_length if i == dim else n for i, n in enumerate(layer.weight.shape)]
    weight = layer.weight.new_zeros(shape)
    weight.narrow(dim, 0, present.shape[dim]).copy_(present)
    part = nn.Linear(1, 1, bias=False, device=layer.weight.device, dtype=layer.weight.dtype)
    part.weight = nn.Parameter(weight, requires_grad=False)
    part.out_features, part.in_features = shape
    if way == COLUMNS_GATHERED:
        return ColumnParallelLinear(part, layer.out_features, layer.bias, processes)
    if way == COLUMNS:
        if layer.bias is not None:
            bias = layer.bias.narrow(0, rank * part_length, part_length).clone()
            part.bias = nn.Parameter(bias, requires_grad=False)
        return part
    return RowParallelLinear(part, layer.bias, way == ROWS_SPLIT, processes)
