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
    """engine: a :class:`hypercache.blend.Layered`, or one that is run as a whole: ``unlayered`` says why.

    path: its checkpoint, None without one.

    encode: text -> token ids, None for a model without a tokenizer. vocab: ids are below it.
    """

    name: str
    engine: Any
    path: Path | None
    encode: Callable[[str], list[int]] | None
    vocab: int
    unlayered: str = ""


def load(model: str, dtype: str = "auto", report: Callable[[str], None] = lambda line: None) -> Loaded:
    """``model``: as MODEL_HELP says. dtype: one of DTYPES, "auto" is the checkpoint's own.

    Raises SpecError for what is no model, or one whose K/V cannot be reused at all, with the reason.
    """
    if model == "reference":
        return Loaded("reference engine", ReferenceModel(_REFERENCE), None, None, _REFERENCE.vocab)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise SpecError(f"{error}; pip install 'hypercache-llm[transformers]'") from None
    from hypercache.engines.layered import LayeredTransformer
    from hypercache.engines.loaded import reason
    from hypercache.engines.transformers import TransformersEngine

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
    except Exception as error:  # whatever is raised over a file: by safetensors, by a config's own class
        raise SpecError(
            f"{path} cannot be loaded as a causal language model: {reason(error)}; it must be a whole "
            "directory as save_pretrained makes it, its config.json and its weights of one model"
        ) from error
    plain = TransformersEngine(found.eval(), weights=path)
    vocab = int(found.get_input_embeddings().weight.shape[0])
    encode = _encoder(path, vocab)
    try:
        return Loaded(path.name, LayeredTransformer(plain), path, encode, vocab)
    except SpecError as error:
        return Loaded(path.name, plain, path, encode, vocab, str(error))


def _encoder(path: Path, vocab: int) -> Callable[[str], list[int]] | None:
    """Text -> ids below ``vocab`` without special tokens; None where the directory has no tokenizer.

    A tokenizer may know more tokens than the model has embeddings, of images for one: it is refused for a
    text that has such a token.
    """
    if not any(
        (path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        return None
    import transformers

    from hypercache.engines.loaded import reason

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise SpecError(
            f"the tokenizer in {path} cannot be loaded: {reason(error)}; save it there anew with the "
            "tokenizer's save_pretrained, or remove its files to use token ids"
        ) from error

    def encode(text: str) -> list[int]:
        ids = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        if ids and max(ids) >= vocab:
            raise SpecError(
                f"the tokenizer in {path} gives token {max(ids)}, the model has only 0..{vocab - 1}: "
                "it belongs to another model; copy this model's own tokenizer there"
            )
        return ids

    return encode
