"""What a training step of EAGLE-3 costs: ours, and a direct one that keeps a dense mask and all logits in float32.

    python train/bench.py                                              # S = 1024, K = 7, the shape of SmolLM2
    python train/bench.py --length 2048 --vocab 152000 --width 256 --draft-vocab 0 --only ours     # memory, large vocabulary

Times are of forward, backward and optimiser on the same features, one after the other in turn, in one process; peak memory is
that of a process for each.
"""

from __future__ import annotations

from specdec import script

with script.one_line():
    import argparse
    import json
    import subprocess
    import sys
    import tempfile
    import time
    from pathlib import Path
    from typing import Any

    import numpy as np
    import torch
    from torch import Tensor

    from specdec.drafter.base import Init, UnrolledObjective
    from specdec.drafter.batch import Sample
    from specdec.method.eagle3 import Eagle3
    from specdec.model.target import CausalLM
    from specdec.training import features
    from specdec.training.samples import draft_vocabulary


def target_of(args: argparse.Namespace) -> CausalLM:
    """A random target of the shape asked for, with as many layers as EAGLE-3 needs."""
    heads = max(args.width // 64, 1)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": args.vocab, "hidden_size": args.width,
        "intermediate_size": args.width * 8 // 3, "num_hidden_layers": 6, "num_attention_heads": heads,
        "num_key_value_heads": heads // 3 if heads % 3 == 0 else heads, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "random.json").write_text("{}")
        return CausalLM(directory, "bfloat16", "cpu")


def prepare(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """A drafter, its optimiser and a batch."""
    torch.manual_seed(0)
    target = target_of(args)
    rng = np.random.default_rng(0)
    mask_n = np.arange(args.length) >= args.prompt
    sample = Sample("0", rng.integers(0, args.vocab, args.length), mask_n)
    ids = draft_vocabulary([sample], args.draft_vocab, args.vocab) if args.draft_vocab else None
    drafter = Eagle3(target, Eagle3.init_checkpoint(target, {}, Init(), ids), 1)
    batch = features.OnlineFeatures(target, drafter.hidden_layers)([sample])
    # every supervised row takes part, as in the direct step
    objective = UnrolledObjective(ttt_steps=args.steps, mask_outside_vocab=False)
    drafter.for_training(objective, Init(), batch.hidden(drafter.hidden_layers))
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], 1e-4)
    return drafter, optimizer, batch


def ours(drafter: Any, batch: Any) -> Tensor:
    return drafter.loss(batch)[0]


class DenseAttention:
    """Attention of one layer: every row sees keys of step 0 up to its position, and its own keys of later steps."""

    def __init__(self, length: int):
        self.causal_SS = torch.full((length, length), float("-inf")).triu(1)
        self.diagonal_SS = torch.full((length, length), float("-inf")).fill_diagonal_(0)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.keys.append(key)
        self.values.append(value)

    def attend(self, layer: int, query: Tensor, scaling: float, *_: Any) -> Tensor:
        group = query.shape[1] // self.keys[0].shape[1]
        keys, values = (torch.cat(x).repeat_interleave(group, 1).transpose(0, 1) for x in (self.keys, self.values))
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * scaling
        bias = torch.cat([self.causal_SS, *[self.diagonal_SS] * (len(self.keys) - 1)], 1)
        weight = (scores.float() + bias).softmax(-1).to(values.dtype)
        return (weight @ values).transpose(0, 1)


def direct(drafter: Any, batch: Any) -> Tensor:
    """Every row at every step, one dense mask [S, S (k + 1)], logits of the whole target vocabulary, autograd for the rest."""
    target = drafter.target
    length = len(batch.token_N)
    mask_S = torch.from_numpy(batch.mask_N)
    logits_SV = target.logits_of(batch.hidden([target.num_layers])[:, 0]).clone().float()
    p_SV = (logits_SV if drafter.vocab_ids is None else logits_SV[:, drafter.vocab_ids]).softmax(-1)
    position = torch.arange(length)
    hidden = drafter.fuse(batch.hidden(drafter.hidden_layers))
    loss = torch.zeros(())
    attention = DenseAttention(length)
    for k in range(drafter.objective.ttt_steps):
        state, hidden = drafter.step(drafter.embed(batch.token_N.roll(-1 - k)), hidden, position + k, attention)
        log_q = drafter.draft_logits(state).float().log_softmax(-1)
        label_SV = p_SV.roll(-1 - k, 0)
        weight_S = mask_S.roll(-2 - k).float()
        weight_S[length - 2 - k :] = 0
        loss = loss + drafter.objective.ttt_step_loss_decay**k * (-(label_SV * log_q).sum(-1) * weight_S).sum()
    return loss


def step(loss_of: Any, drafter: Any, optimizer: Any, batch: Any, precision: bool) -> float:
    begin = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision):
        loss = loss_of(drafter, batch)
    (loss / batch.mask_N.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.isfinite(loss)
    return time.perf_counter() - begin


def memory(key: str) -> int:
    """KiB of memory of this process by Linux: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def peak(way: str) -> tuple[float, float]:
    """GiB that two steps add to a process of their own, and GiB of that process at its peak."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", way]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    of_steps, of_process = done.stdout.split()[-2:]
    return float(of_steps), float(of_process)


def main() -> None:
    parser = script.Parser(__doc__)
    parser.add_argument("--length", type=int, default=1024, help="tokens of the sample (S)")
    parser.add_argument("--prompt", type=int, default=64, help="of which so many are not supervised")
    parser.add_argument("--steps", type=int, default=7, help="unrolled steps (K)")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--draft-vocab", type=int, default=8192, help="0: the whole vocabulary")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast")
    parser.add_argument("--only", choices=["ours", "direct"])
    parser.add_argument("--measure", choices=["ours", "direct"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ways = {"ours": ours, "direct": direct}
    drafter, optimizer, batch = prepare(args)
    if args.measure:
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading the model
        for _ in range(2):
            step(ways[args.measure], drafter, optimizer, batch, not args.float32)
        print((memory("VmHWM") - before) / 2**20, memory("VmHWM") / 2**20)
        return
    chosen = [args.only] if args.only else list(ways)
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(args.repeats + 1):
        for name in chosen:
            times[name].append(step(ways[name], drafter, optimizer, batch, not args.float32))
    supervised = int(batch.mask_N.sum())
    print(
        f"S={args.length}, K={args.steps}, V={args.vocab}, draft V={args.draft_vocab or args.vocab}, width {args.width}, "
        f"{args.threads} thread(s), {'float32' if args.float32 else 'bfloat16 autocast'}"
    )
    for name in chosen:
        rate = supervised / np.median(times[name][1:])
        of_steps, of_process = peak(name)
        memory_text = f"peak memory of a step {of_steps:.2f} GiB, of the process {of_process:.2f} GiB"
        print(f"{name:>7}: {rate:8.0f} supervised tokens/s, {memory_text}")
    if len(chosen) == 2:
        print(f"  ratio: {np.median(np.array(times['direct'][1:]) / np.array(times['ours'][1:])):.2f} x faster")


if __name__ == "__main__":
    with script.one_line():
        main()
