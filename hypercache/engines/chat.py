"""Chats as prompts: token ids by the model's own template, and the segments that may move as one.

No template is known here. The chat is rendered once as it is and once with a stand-in for each content; where
the stand-ins come out says in which order the contents stand and what surrounds them. A tool schema is what
repeats when its tool is given twice.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from hypercache.errors import SpecError
from hypercache.segments import Segment

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Sequence[Any] | None], str]

_AROUND = 16  # characters of the template on either side that must surround a content, too
_SHAPES = (
    "tokenize",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
)


def chat_segments(
    tokenizer: Any, messages: Messages, tools: Sequence[Any] | None = None, **options: Any
) -> tuple[list[int], list[Segment]]:
    """The prompt of a chat, and its parts that may move as one.

    tokenizer: a Transformers tokenizer that knows offsets ("fast") and has a chat template.
    messages, tools, options: as ``tokenizer.apply_chat_template`` takes them, for one conversation
        (``add_generation_prompt``, ``documents``, ``chat_template``, what the template itself knows, ...).

    Returns the token ids, equal to ``apply_chat_template``'s, and the spans ``(start, stop)`` of tokens,
    sorted and disjoint, of each message's content (the system prompt's, too) and each tool schema. What the
    template leaves out or rewrites is no segment, nor are the template's own words. A token that reaches
    beyond the text of a segment does not belong to it. No segments at all ([]) means that nothing was
    recognised, not that nothing may move.
    Raises SpecError for a tokenizer without offsets or template, several conversations at once, and options
    that say in what shape ids are returned; what the template itself raises passes through.
    """
    _check(tokenizer, messages, options)
    extra = options.pop("tokenizer_kwargs", None) or {}
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, tokenizer_kwargs={**extra, "return_offsets_mapping": True}, **options
    )
    if "offset_mapping" not in encoded:
        raise SpecError(
            "sanitize_control_tokens gives no offsets, so no segments; clean the messages before, "
            "or take the ids of apply_chat_template and match them without segments"
        )

    def render(messages: Messages, tools: Sequence[Any] | None) -> str:
        text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        return text

    text = render(messages, tools)
    spans = sorted(_places(render, messages, tools, text))
    offsets = encoded["offset_mapping"]
    starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
    segments: list[Segment] = []
    end = 0
    for first, last in spans:
        start, stop = bisect_left(starts, first), bisect_right(stops, last)
        if end <= start < stop:
            segments.append((start, stop))
            end = stop
    return list(encoded["input_ids"]), segments


def _check(tokenizer: Any, messages: Messages, options: Mapping[str, Any]) -> None:
    name = type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise SpecError(
            f"{name} does not say which text a token stands for; "
            "load the tokenizer with transformers.AutoTokenizer.from_pretrained(...), which takes a fast one"
        )
    if not (getattr(tokenizer, "chat_template", None) or options.get("chat_template")):
        raise SpecError(
            f"{name} has no chat template; pass chat_template=..., or tokenize the prompt yourself"
        )
    if not isinstance(messages, Sequence) or not all(isinstance(one, Mapping) for one in messages):
        raise SpecError(
            'messages must be one conversation: a list of dicts such as {"role": "user", "content": "..."}'
        )
    if taken := [name for name in _SHAPES if name in options]:
        raise SpecError(f"option {taken[0]!r} has no place here: ids always come as one flat, whole list")


def _places(
    render: Render, messages: Messages, tools: Sequence[Any] | None, text: str
) -> Iterator[tuple[int, int]]:
    """Where contents and tool schemas lie in ``text``, in characters."""
    stand_in = "x7segment"
    while stand_in in text:
        stand_in += "x"
    contents: list[str] = []
    marked = [_marked(message, stand_in, contents) for message in messages]
    # A template may refuse what it is shown here (a content that is no JSON, say): then nothing is known.
    try:
        yield from _contents(render(marked, tools), stand_in, contents, text)
    except (TemplateError, TypeError, ValueError, LookupError):
        return
    place = 0
    for tool in tools or ():
        try:
            schema = _repeated(render(marked, [tool]), render(marked, [tool, tool]))
        except (TemplateError, TypeError, ValueError, LookupError):
            continue
        found = text.find(schema, place) if schema else -1
        if found >= 0:
            place = found + len(schema)
            yield found, place


def _marked(message: Mapping[str, Any], stand_in: str, contents: list[str]) -> dict[str, Any]:
    """``message`` with a stand-in for each text in its content; the texts are appended to ``contents``."""

    def mark(content: str) -> str:
        contents.append(content)
        return f"{stand_in}{len(contents) - 1:06d}"

    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": mark(content)}
    if isinstance(content, (list, tuple)):  # parts: texts, images, ...
        parts = [
            {**part, "text": mark(part["text"])}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
        return {**message, "content": parts}
    return dict(message)


def _contents(skeleton: str, stand_in: str, contents: list[str], text: str) -> Iterator[tuple[int, int]]:
    """Contents in the order in which their stand-ins come out; one that comes out twice is none.

    Each is looked for behind the one before it, so a search can never begin beyond the right place.
    """
    hits = list(re.finditer(re.escape(stand_in) + r"(\d{6})", skeleton))
    times = Counter(hit[1] for hit in hits)
    edges = [0, *(edge for hit in hits for edge in hit.span()), len(skeleton)]
    place = 0
    for index, hit in enumerate(hits):
        if times[hit[1]] > 1:
            continue
        before = skeleton[max(edges[2 * index], hit.start() - _AROUND) : hit.start()]
        behind = skeleton[hit.end() : min(edges[2 * index + 3], hit.end() + _AROUND)]
        content = contents[int(hit[1])]
        forms = {content, content.strip(), content.lstrip(), content.rstrip()}
        found = [(text.find(before + form + behind, place), len(form)) for form in forms if form.strip()]
        if found := [one for one in found if one[0] >= 0]:
            at, length = min(found, key=lambda one: (one[0], -one[1]))
            at += len(before)
            place = at + length
            yield at, place


def _repeated(one: str, two: str) -> str:
    """What stands in ``one`` once and in ``two`` twice in a row, if that is all they differ in; else ""."""
    head, tail = _shared(one, two), _shared(one[::-1], two[::-1])
    found = one[max(0, len(one) - tail) : head].strip()
    return found if 2 * len(found) > len(two) - len(one) > 0 else ""  # else something else was added


def _shared(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return next(
        (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
