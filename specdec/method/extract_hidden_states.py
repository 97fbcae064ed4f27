"""Drafts nothing, and writes the target's hidden states of every request that finishes: vLLM's method of this name.

Each request becomes a file of an artifact directory (`specdec.artifact`), readable by vLLM's `load_hidden_states` and
by `train/eagle.py features.path=DIR`. Layer ids are vLLM's: id i enters layer i, id num_layers leaves the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import artifact
from specdec.checked import nearest
from specdec.core import Context, Draft, MethodFacts, Request, StatelessProposer
from specdec.drafter.batch import Features, Sample
from specdec.model.target import CausalLM


class ExtractHiddenStates(StatelessProposer):
    """Settings as in vLLM, where `shared_storage_path` and `include_output_tokens` belong to the connector.

    draft_model_config: {"hf_config": {"eagle_aux_hidden_state_layer_ids": [...]}}.
    shared_storage_path: the directory.
    include_output_tokens: write the answer too, but for its last token, which the target never processes.
    """

    name = "extract_hidden_states"
    facts = MethodFacts(drafts=False)

    @classmethod
    def example_settings(cls, target: CausalLM, directory: Path) -> dict[str, Any]:
        layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, target.num_layers]}}
        return {"draft_model_config": layers, "shared_storage_path": str(directory)}

    def __init__(
        self,
        target: CausalLM,
        shared_storage_path: str,
        draft_model_config: dict[str, Any],
        num_speculative_tokens: int = 1,
        include_output_tokens: bool = False,
    ):
        if num_speculative_tokens != 1:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}: this method takes 1, as in vLLM, and drafts nothing"
            )
        if not shared_storage_path:
            raise ValueError("shared_storage_path='' names no directory")
        self.num_speculative_tokens = num_speculative_tokens
        self.hidden_layers = _layer_ids(draft_model_config, target)
        self.include_output_tokens = include_output_tokens
        manifest = artifact.manifest_of(target, self.hidden_layers)
        self.writer = None  # of several processes with the same states, one writes
        if target.processes.is_main:
            self.writer = artifact.Writer(Path(shared_storage_path).expanduser(), manifest, shard_bytes=0)
        self.request_R: dict[int, Request] = {}
        self.hidden_R: dict[int, list[Tensor]] = {}

    def on_start(self, row: int, request: Request) -> None:
        self.request_R[row] = request
        self.hidden_R[row] = []

    def catch_up(self, context: Context) -> bool:
        assert context.hidden is not None
        for row, hidden_nTD in zip(context.rows.tolist(), context.hidden, strict=True):
            self.hidden_R[row].append(hidden_nTD)
        return True

    def propose(self, context: Context) -> Draft:
        self.catch_up(context)
        return Draft.empty(len(context.rows), context.last_token_B.device)

    def on_finish(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        request = self.request_R.pop(row)
        hidden = [*self.hidden_R.pop(row), *hidden]
        if request.finish_reason is None or self.writer is None:
            return  # aborted
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        num_prompt = len(request.prompt_token_ids)
        length = len(tokens) - 1 if self.include_output_tokens else num_prompt
        mask_n = np.arange(length) >= num_prompt
        sample = Sample(request.id, np.array(tokens[:length], dtype=np.int64), mask_n)
        self.writer.add(sample, Features(torch.cat(hidden)[:length]))


def _layer_ids(config: Any, target: CausalLM) -> tuple[int, ...]:
    """The layers of a draft_model_config. Raises ValueError, one line, for what is none."""
    target.check_states()
    key = "eagle_aux_hidden_state_layer_ids"
    inner = config.get("hf_config") if isinstance(config, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get(key), list) or not inner[key]:
        example = f'{{"hf_config": {{"{key}": [{target.num_layers}]}}}}'
        raise ValueError(f"draft_model_config={config!r} names no layers; give {example}")
    for unknown in {*config, *inner} - {"hf_config", key}:
        raise ValueError(f"unknown draft_model_config key {unknown!r}; {nearest(unknown, ('hf_config', key))}")
    for layer in inner[key]:
        if type(layer) is not int or not 0 <= layer <= target.num_layers:
            raise ValueError(f"{key}: layer {layer!r} is outside 0..{target.num_layers}, the layers of {target.name}")
    if len(set(inner[key])) < len(inner[key]):
        raise ValueError(f"{key}={inner[key]} names a layer twice; each can be written once")
    return tuple(sorted(set(inner[key])))
