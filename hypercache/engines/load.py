"""A model by name, with its tokenizer, for the commands that look into one: ``doctor``, ``calibrate``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypercache.engines import smollm
from hypercache.engines.reference import ReferenceConfig, ReferenceModel
from hypercache.errors import SpecError

DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL_HELP = (
    "a directory as Hugging Face's save_pretrained makes it, 'smollm2' (SmolLM2-135M-Instruct, from the "
    "package index), or 'reference' (the built-in NumPy engine, random weights)"
)
# Big enough to be worth a cache, small enough that NumPy computes it in a moment.
_REFERENCE = ReferenceConfig(layers=4, hidden=256, heads=8, kv_heads=2, head_dim=32, mlp=704, vocab=4096)


@dataclass(frozen=True, slots=True)
class Loaded:
    """engine: a :class:`hypercache.blend.Layered`. path: its checkpoint, None without one.

    encode: text -> token ids, None for a model without a tokenizer. vocab: ids are below it.
    """

    name: str
    engine: Any
    path: Path | None
    encode: Callable[[str], list[int]] | None
    vocab: int


def load(model: str, dtype: str = "auto", report: Callable[[str], None] = lambda line: None) -> Loaded:
    """``model``: as MODEL_HELP says. dtype: one of DTYPES, "auto" is the checkpoint's own.

    Raises SpecError for what is no model or cannot be computed layer by layer, with the reason.
    """
    if model == "reference":
        return Loaded("reference engine", ReferenceModel(_REFERENCE), None, None, _REFERENCE.vocab)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise SpecError(f"{error}; pip install 'hypercache-llm[transformers]'") from None
    from hypercache.engines.layered import LayeredTransformer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    path = smollm.ensure(report=report) if model == "smollm2" else Path(model)
    if not (path / "config.json").is_file():
        raise SpecError(f"{path} has no config.json; give {MODEL_HELP}")
    report(f"loading {path.name}")
    try:
        found = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype if dtype == "auto" else getattr(torch, dtype), local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(f"{path} cannot be loaded as a causal language model: {error}") from None
    engine = LayeredTransformer(found.eval(), weights=path)
    return Loaded(path.name, engine, path, _encoder(path), int(found.config.get_text_config().vocab_size))


def _encoder(path: Path) -> Callable[[str], list[int]] | None:
    """Text -> ids without special tokens; None where the directory has no tokenizer."""
    if not any(
        (path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        return None
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]

    return encode
