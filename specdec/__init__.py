"""specdec: a research framework for speculative decoding. `from specdec import LLM, SamplingParams` is one door, `eval/run.py`
the other; both lead to `specdec.engine`."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "TextPrompt", "TokensPrompt", "__version__"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import; a script that only finds a typo in its arguments should not wait for them
    if name == "LLM":
        from specdec.llm import LLM

        return LLM
    if name == "SamplingParams":
        from specdec.params import SamplingParams

        return SamplingParams
    if name in ("TextPrompt", "TokensPrompt"):
        from specdec import prompts

        return getattr(prompts, name)
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")
