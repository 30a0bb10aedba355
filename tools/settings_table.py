"""Write the table of settings into docs/configuration.md from the table that the server uses."""

from __future__ import annotations

from pathlib import Path

from hypercache.cli.config import show_default
from hypercache.server.config import FIELDS, OTHER_VARIABLES, PREFIX, flag_of, help_of, kind_of

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- settings: begin (make docs) -->\n", "<!-- settings: end -->\n"


def table() -> str:
    """Markdown of all settings and of the other environment variables."""
    rows = ["| key | environment, flag | default | allowed | meaning |", "|---|---|---|---|---|"]
    for key in FIELDS:
        allowed = kind_of(key).allowed.replace("|", "\\|")
        names = f"`{PREFIX}{key.upper()}` `{flag_of(key)}`"
        rows.append(f"| `{key}` | {names} | `{show_default(key)}` | {allowed} | {help_of(key)} |")
    rows += ["", "Further variables:", ""]
    rows += [f"- `{name}`: {text}" for name, text in OTHER_VARIABLES.items()]
    return "\n".join(rows) + "\n"


def render(page: str) -> str:
    """``page`` with the table of today between its marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE}: the marks {BEGIN.strip()} and {END.strip()} are missing")
    return f"{head}{BEGIN}{table()}{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
