"""Small tokenizers, built on the spot: byte-level with merges, and one that looks at where a text begins."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

MARKS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start>", "<end>")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CORPUS = ["the prompt's keys and values are there, and then they are there again", "user system assistant tool"] * 3


def byte_level(*more: AddedToken) -> Tokenizer:
    """With merges across a space and its word, and the marks of the chat templates as special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.add_tokens(list(more))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def metaspace(*more: AddedToken) -> Tokenizer:
    """In the manner of Llama 2: a space is put before the text, but not before what follows a special token."""
    pieces = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *"▁abcdehilnoprstuvy'.,<|>_", "▁the", "▁a"])}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first", split=False), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.add_tokens(list(more))
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, template: str | None, **config: object) -> Path:
    """As a model's folder holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
