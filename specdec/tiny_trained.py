"""A tiny language model for a first look, trained on the spot: it speaks a sort of English, repeats itself, and so shows what
every method does, in seconds and without a network. Its answers are not to be believed."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from specdec.files import ASSETS

SPECIAL = ("<s>", "</s>", "<pad>")
VOCAB_SIZE, NUM_STEPS, BATCH_SIZE, LENGTH, LEARNING_RATE = 1024, 300, 16, 64, 8e-3
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def write(directory: Path) -> None:
    """Train a llama of three narrow layers, and a tokenizer of 1,024 tokens, on the demo conversations: about half a minute of
    one core. One thread, or the weights would depend on their number.

    directory: receives them, as transformers saves them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    print("specdec: training tiny-trained, once, on the demo conversations (half a minute)", file=sys.stderr, flush=True)
    with gzip.open(ASSETS / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        next(file)  # the header
        chats = [json.loads(line)["messages"] for line in file]
    tokenizer = _train_tokenizer([message["content"] for messages in chats for message in messages])
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB_SIZE, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.05, **special,
    )  # fmt: skip
    tokens = torch.tensor([token for chat in tokenizer.apply_chat_template(chats)["input_ids"] for token in chat])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _train(model, tokens)
    finally:
        torch.set_num_threads(num_threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _train(model: Any, tokens: Any) -> None:
    """Steps of AdamW on random stretches of the tokens. tokens: [N], all conversations end to end."""
    import torch

    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95))
    warm_up = lambda step: min(1.0, (step + 1) / 20) * (1 - step / NUM_STEPS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    for _ in range(NUM_STEPS):
        begins = torch.randint(len(tokens) - LENGTH, (BATCH_SIZE, 1), generator=generator)
        batch = tokens[begins + torch.arange(LENGTH)]
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _train_tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    split_at_bytes(tokenizer).train_from_iterator(texts, trainer)
    return with_template(tokenizer)


def split_at_bytes(tokenizer: Any) -> Any:
    """The tokenizer itself, whose symbols are now those of bytes."""
    from tokenizers import decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_template(tokenizer: Any) -> Any:
    """The tokenizer for transformers, with the special tokens' roles and a ChatML-like template."""
    from transformers import PreTrainedTokenizerFast

    bos, eos, pad = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, chat_template=TEMPLATE
    )
