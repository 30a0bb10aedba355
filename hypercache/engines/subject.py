"""What the demo runs: an engine with its tokenizer, and a document with two questions about it."""

from __future__ import annotations

import importlib.resources
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypercache.engines import smollm
from hypercache.engines.cached import Engine
from hypercache.engines.reference import ReferenceConfig, ReferenceModel
from hypercache.errors import HyperCacheError

QUESTIONS = (
    "How quickly can the engines be changed over, and who was quickest?",
    "What happened to the steamer Aurelia, and what did the new assistant do about it?",
)
MODELS = ("auto", "smollm2", "reference")
# Big enough that its prefill is work, small enough that NumPy does it in seconds.
_REFERENCE = ReferenceConfig(layers=8, hidden=512, heads=8, kv_heads=2, head_dim=64, mlp=1408, vocab=8192)

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """encode: question -> token ids of document and question. decode: ids -> text.

    kind: one of MODELS but "auto". note: "" or why this is not what "auto" prefers.
    """

    kind: str
    name: str
    engine: Engine
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    note: str = ""


def document() -> str:
    """The text in the package: about 2,500 tokens of SmolLM2's."""
    return (importlib.resources.files("hypercache") / "data" / "demo.txt").read_text("utf-8")


def load(model: str, dtype: str, report: Report) -> Subject:
    """``model``: one of MODELS; "auto" takes the reference engine where SmolLM2 cannot be had, and says so.

    ``dtype``: "float32" or "bfloat16", for SmolLM2. Raises HyperCacheError when it cannot be had.
    """
    if model == "reference":
        return _reference("")
    try:
        return _smollm(dtype, report)
    except HyperCacheError as error:
        if model != "auto":
            raise
        return _reference(f"SmolLM2 cannot be had here, so this is the reference engine: {error}")


def _smollm(dtype: str, report: Report) -> Subject:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise smollm.ModelUnavailable(f"{error}; pip install 'hypercache-llm[demo]'") from error
    from hypercache.engines.transformers import TransformersEngine

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = smollm.ensure(report=report)
    report("loading SmolLM2-135M-Instruct")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), local_files_only=True
    )
    engine = TransformersEngine(model.eval(), weights=path)
    text = document()

    def encode(question: str) -> list[int]:
        turn = [{"role": "user", "content": f"{text}\n\n{question}"}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        return [int(token) for token in ids]

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return Subject("smollm2", f"SmolLM2-135M-Instruct, {dtype}", engine, encode, decode)


def _reference(note: str) -> Subject:
    engine = ReferenceModel(_REFERENCE)
    text = document()

    def encode(question: str) -> list[int]:
        pieces = re.findall(r"\w+|[^\w\s]", f"{text}\n\n{question}")
        return [zlib.crc32(piece.encode()) % _REFERENCE.vocab for piece in pieces]

    def decode(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    return Subject("reference", "reference engine, random weights, float32", engine, encode, decode, note)
