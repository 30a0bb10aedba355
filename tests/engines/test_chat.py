"""Chats -> ids and segments, under templates that are not known to the code: what moves, moves as one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip(
    "transformers", reason="transformers is an extra: pip install 'hypercache-llm[transformers]'"
)

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hypercache.engines import smollm
from hypercache.engines.chat import chat_segments
from hypercache.errors import SpecError

CHATML = (
    "{% if tools %}<|im_start|>system\nTools:\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    "</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 3.1 does it: contents trimmed, the system prompt first, the tools inside the first user message.
LLAMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n"
    "{{ system }}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if loop.first and tools %}Given the following functions, respond with a JSON.\n\n"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
)
# As Mistral does it: no markup for the system prompt, which goes into the last user message; a list of tools.
INST = (
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{% if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] "
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# As reasoning models do it: what an assistant thought is left out of its earlier messages.
THINK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>\n"
    "{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "inst": INST}

SYSTEM = "You are an agent for an airline. Never rebook without a yes."
LONG = "Flight records:\n" + "\n".join(
    f"{n}: seat {n % 7}{'ABCDEF'[n % 6]} to Zürich — €{n * 13}" for n in range(9)
)
MESSAGES = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Where do I sit?"},
    {"role": "assistant", "content": LONG},
    {"role": "user", "content": "Book it, please."},
]
CORPUS = [SYSTEM, LONG, *TEMPLATES.values(), "Book it, please. Where do I sit? Tools schema functions JSON"]


def tool(name: str, text: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"id": {"type": "string", "description": text}}}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


TOOLS = [
    tool("cancel_booking", "Cancel a booking by its id"),
    tool("find_booking", "Find a booking by its id, in any state"),
    tool("refund", "Give the money back"),
]


def tokenizer(template: str | None, kind: str = "bytes") -> Any:
    """A small one, trained here: byte-level BPE, or one that normalises and marks word starts."""
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<unk>"]
    if kind == "bytes":
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        inner = Tokenizer(models.Unigram())
        inner.normalizer = normalizers.NFKC()
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        inner.decoder = decoders.Metaspace()
        alphabet = []
    make = trainers.BpeTrainer if kind == "bytes" else trainers.UnigramTrainer
    more = {} if kind == "bytes" else {"unk_token": "<unk>"}
    trainer = make(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False, **more
    )
    inner.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module", params=["bytes", "words"])
def kinds(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {name: tokenizer(template, request.param) for name, template in TEMPLATES.items()}


def texts(tok: Any, messages: Any, tools: Any = None, **options: Any) -> list[str]:
    """The text under each segment, by offsets, after the ids were compared with the template's own."""
    ids, segments = chat_segments(tok, messages, tools, **options)
    assert ids == tok.apply_chat_template(messages, tools=tools, return_dict=False, **options)
    text = tok.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    offsets = tok(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert all(a[1] <= b[0] for a, b in pairwise(segments))
    return [text[offsets[start][0] : offsets[stop - 1][1]] for start, stop in segments]


def covers(pieces: list[str], wanted: str) -> bool:
    """Whether a piece is ``wanted``, but for characters at its edges whose token reaches out of it."""
    return any(piece in wanted and len(piece) >= len(wanted) - 3 for piece in pieces)


@pytest.mark.parametrize("name", TEMPLATES)
def test_contents_and_schemas_are_found_under_any_template(kinds: dict[str, Any], name: str) -> None:
    for tools in (None, TOOLS, TOOLS[:1]):
        pieces = texts(kinds[name], MESSAGES, tools, add_generation_prompt=True)
        assert len(pieces) == len(MESSAGES) + len(tools or ())
        for message in MESSAGES:
            assert covers(pieces, message["content"]), message
        for one in tools or ():
            (piece,) = [p for p in pieces if one["function"]["name"] in p]
            assert piece.count('"type"') == 3, "one schema and nothing of the next"
            assert piece.count("{") - piece.count("}") in (
                -1,
                0,
                1,
            )  # a brace may be one token with what follows


def by_segment(tok: Any, messages: Any, tools: Any = None) -> list[tuple[int, ...]]:
    ids, segments = chat_segments(tok, messages, tools)
    return [tuple(ids[start:stop]) for start, stop in segments]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_inserted_or_edited_moves_the_rest_as_one(name: str) -> None:
    """An insertion before a document, an edit in the middle, a turn more: the others keep their ids."""
    tok = tokenizer(TEMPLATES[name])
    before = set(by_segment(tok, MESSAGES))
    system, first, *rest, last = MESSAGES
    edited = [system, {**first, "content": "Hello! Tell me, where?"}, *rest, last]
    longer = [
        system,
        first,
        *rest,
        {**first, "content": "Hm."},
        {"role": "assistant", "content": "Yes?"},
        last,
    ]
    shifted = [{**system, "content": "Today is Monday. " + SYSTEM}, first, *rest, last]
    assert len(before) == len(MESSAGES)
    for messages, changed in ((edited, 1), (longer, 0), (shifted, 1)):
        assert len(before - set(by_segment(tok, messages))) == changed


@pytest.mark.parametrize("name", TEMPLATES)
def test_reordered_tools_are_the_same_segments(name: str) -> None:
    tok = tokenizer(TEMPLATES[name])
    some, reordered = by_segment(tok, MESSAGES, TOOLS), by_segment(tok, MESSAGES, TOOLS[::-1])
    assert len(some) == len(set(some)) == len(MESSAGES) + len(TOOLS)
    assert set(some) == set(reordered)
    assert some != reordered


def test_what_the_template_trims_strips_or_doubles() -> None:
    messages = [
        {"role": "user", "content": "  \n Where do I sit?\n\n"},
        {"role": "assistant", "content": "<think>Flight records first.</think>\n\n" + LONG},
        {"role": "user", "content": "Book it, please."},
        {"role": "assistant", "content": "<think>yes</think>"},
        {"role": "user", "content": "   "},
        {"role": "user", "content": "Book it, please."},
    ]
    assert texts(tokenizer(LLAMA), messages)[0] == "Where do I sit?"
    # A message that is rewritten is no segment, and those behind it still are.
    pieces = texts(tokenizer(THINK), messages)
    assert pieces.count("Book it, please.") == 2
    assert not any("records" in piece for piece in pieces)
    twice = "{% for m in messages %}{{ m.content }} | {{ m.content }}\n{% endfor %}"
    assert texts(tokenizer(twice), MESSAGES) == []
    upper = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"
    assert texts(tokenizer(upper), MESSAGES) == []


def test_a_short_content_is_not_taken_for_the_template() -> None:
    messages = [{"role": "user", "content": word} for word in ("user", "s", "im", "start", "user")]
    ids, segments = chat_segments(tok := tokenizer(CHATML), messages)
    assert [tok.decode(ids[start:stop]) for start, stop in segments] == [m["content"] for m in messages]
    starts = [index for index, token in enumerate(ids) if token == tok.convert_tokens_to_ids("<|im_start|>")]
    assert [start for start, _ in segments] == [s + len(tok.encode("user\n")) + 1 for s in starts]


def test_contents_may_be_parts_and_absent() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content or [] %}"
        "{{ p.text if p.type == 'text' else '<image>' }}\n{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": SYSTEM}, {"type": "image"}, {"type": "text", "text": LONG}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert texts(tokenizer(template), messages) == [SYSTEM, LONG]


def test_a_template_that_refuses_the_stand_ins_gives_ids_and_no_segments() -> None:
    picky = (
        "{% for m in messages %}{% if 'x7segment' in m.content %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    assert texts(tokenizer(picky), MESSAGES) == []


def test_stand_ins_never_meet_the_text() -> None:
    messages = [{"role": "user", "content": "x7segment000000 and x7segmentx000001"}, MESSAGES[1]]
    assert texts(tokenizer(CHATML), messages) == [m["content"] for m in messages]


def test_what_cannot_be_done_is_refused() -> None:
    tok = tokenizer(CHATML)
    with pytest.raises(SpecError, match="option 'return_tensors' has no place here"):
        chat_segments(tok, MESSAGES, return_tensors="np")
    with pytest.raises(SpecError, match="sanitize_control_tokens gives no offsets"):
        chat_segments(tok, MESSAGES, sanitize_control_tokens=True)
    with pytest.raises(SpecError, match="one conversation: a list of dicts"):
        chat_segments(tok, [MESSAGES, MESSAGES])  # type: ignore[list-item]
    with pytest.raises(SpecError, match="has no chat template"):
        chat_segments(tokenizer(None), MESSAGES)
    with pytest.raises(SpecError, match="str does not say which text"):
        chat_segments("gpt2", MESSAGES)
    assert chat_segments(tokenizer(None), MESSAGES, chat_template=CHATML) == chat_segments(tok, MESSAGES)


def test_smollm_under_its_own_template() -> None:
    try:
        directory = smollm.ensure()
    except smollm.ModelUnavailable as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")
    tok = AutoTokenizer.from_pretrained(directory)
    for messages in (MESSAGES, MESSAGES[1:]):
        assert texts(tok, messages, add_generation_prompt=True) == [m["content"] for m in messages]
    assert texts(tok, MESSAGES, TOOLS) == [m["content"] for m in MESSAGES], "its template leaves tools out"
    document = by_segment(tok, MESSAGES)[2]
    moved = by_segment(tok, [MESSAGES[0], *MESSAGES[2:]])
    assert document in moved
