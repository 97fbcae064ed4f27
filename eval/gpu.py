"""What only a CUDA machine can show, in under 8 minutes and without a network: `make gpu`.

Exactness in float32 on `tiny`, the chi-square tests with the device's own kernels, and the speed of the loop on random models
of real shapes in bfloat16 with synthetic acceptance, so that it is seen apart from any model's quality. A short table ends it.

    python eval/gpu.py                     # everything; the numbers also go to gpu.json
    python eval/gpu.py --shapes llama-135m --device cpu --max-tokens 8     # a rehearsal without a GPU

With graphs: verification forwards of fixed shapes (enforce_eager=false), each a CUDA graph. A rehearsal works through the same
buffers without capturing anything.
"""

from __future__ import annotations

from specdec import script

with script.one_line():
    import itertools
    import subprocess
    import sys
    import time
    from pathlib import Path

    import torch

    from specdec import method, rejection
    from specdec.core import Context, Draft, Request, StatelessProposer
    from specdec.engine import Engine
    from specdec.files import write_json
    from specdec.measure import bench
    from specdec.model.target import CausalLM, choose_device
    from specdec.params import SamplingParams
    from specdec.policy import profiling

BUDGET_S = 420
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12, "B200": 8.0e12}  # bytes/s, as the makers state them
PROMPT_LENGTH = 256
BATCH_SIZES = (1, 8, 64)
NUM_DRAFT = 5
ACCEPTANCE_LENGTH = 3.0


def main() -> None:
    parser = script.Parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="*", default=["llama-1b", "llama-8b"])
    parser.add_argument("--max-tokens", type=script.count, default=128)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    arguments = parser.parse_args()
    choose_device(arguments.device)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    begin = time.monotonic()
    lines: list[tuple[str, str]] = [("machine", machine(arguments.device))]

    tests = Path(__file__).resolve().parents[1] / "tests" / "distribution" / "test_device.py"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)], check=False)
    lines.append(
        ("exactness and distributions on the device", "passed" if done.returncode == 0 else f"FAILED (exit {done.returncode})")
    )
    for name in ("tiny", *(f"random-{shape}" for shape in arguments.shapes)):
        if time.monotonic() - begin > BUDGET_S:
            lines.append((name, "left out: no time left"))
            continue
        lines += measure(name, arguments.device, arguments.max_tokens)
    print()
    for name, value in lines:
        print(f"{name:52} {value}")
    write_json(arguments.out, dict(lines))
    sys.exit(done.returncode)


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    return f"{name}, torch {torch.__version__}"


def measure(name: str, device: str, max_tokens: int) -> list[tuple[str, str]]:
    """tokens/s of plain decoding against the bandwidth floor, the verify cost, and the share of time outside forwards."""
    target = CausalLM(name, "bfloat16", device, timers=[])
    weights = bench.weight_bytes(target)
    lines = [(f"{name}, batch 1: HF generate", f"{hugging_face(target, max_tokens):.0f} tokens/s")]
    bandwidth = next((value for chip, value in BANDWIDTH.items() if chip in machine(device)), None)
    for rows, enforce_eager in itertools.product(BATCH_SIZES, (True, False)):
        about = f"{name}, batch {rows}, {'eager' if enforce_eager else 'graphs'}"
        verify_s = profiling.verify_seconds(target, rows, 16, context=PROMPT_LENGTH, enforce_eager=enforce_eager)
        costs = " ".join(f"{n}:{verify_s(n) / verify_s(1):.2f}" for n in (1, 2, 4, 6, 8, 11, 16))
        lines.append((f"{about}: v(n)", f"{costs}; v(1) {verify_s(1) * 1e3:.2f} ms"))
        plain = 0.0
        for speculate in (False, True):
            engine = make_engine(target, rows, speculate, enforce_eager)
            list(engine.run(requests(rows, max_tokens)))  # warm up; all shapes are captured
            speed = bench.batch_speed(engine, requests(rows, max_tokens))
            text = f"{speed.tokens_per_s:.0f} tokens/s"
            if not speculate:
                plain = speed.tokens_per_s
                if bandwidth is not None:
                    text += f" ({plain / rows * weights / bandwidth:.0%} of the bandwidth floor)"
            else:  # drafts cost nothing here: what remains is verification and the loop
                text += f" (speedup {speed.tokens_per_s / plain:.2f}, of {ACCEPTANCE_LENGTH:.0f} tokens per step)"
            label = f"drafts K={NUM_DRAFT}" if speculate else method.PLAIN
            lines.append((f"{about}: {label}", f"{text}, {speed.outside_forwards:.1%} outside forwards"))
    return lines


def hugging_face(target: CausalLM, max_tokens: int) -> float:
    """tokens/s of transformers' own loop over the same weights, prefill included as in the engine's figures."""
    target.model.set_attn_implementation("sdpa")
    try:
        decode = bench.hugging_face(target.model, max_tokens, min_new_tokens=max_tokens)
        prompt = requests(1, max_tokens)[0].prompt_token_ids
        return bench.run_side_by_side({"theirs": decode}, [prompt])["theirs"].tokens_per_s
    finally:
        target.model.set_attn_implementation("specdec")


class ConstantProposer(StatelessProposer):
    """Drafts K tokens for every row at no cost, so that only the loop and the target are timed."""

    def __init__(self, num_speculative_tokens: int):
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, context: Context) -> Draft:
        token_BK = context.last_token_B.unsqueeze(1).repeat(1, self.num_speculative_tokens)
        return Draft(token_BK, torch.from_numpy(context.max_draft_B))


def make_engine(target: CausalLM, rows: int, speculate: bool, enforce_eager: bool) -> Engine:
    if not speculate:
        plain = method.build(method.PLAIN, target)
        return Engine(target, plain, rejection.build("standard"), rows, enforce_eager=enforce_eager)
    scheme = rejection.build("synthetic", NUM_DRAFT, synthetic_acceptance_length=ACCEPTANCE_LENGTH)
    return Engine(target, ConstantProposer(NUM_DRAFT), scheme, rows, enforce_eager=enforce_eager)


def requests(rows: int, max_tokens: int) -> list[Request]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [Request(str(i), [(7 * i + j) % 250 for j in range(PROMPT_LENGTH)], params, seed=i) for i in range(rows)]


if __name__ == "__main__":
    with script.one_line():
        main()
