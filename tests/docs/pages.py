"""The Markdown of the repository, as its readers and their tools take it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("deploy", "protos", "store", "controlplane", "connector", "tests")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_SOURCE = re.compile(r"<(?:img|source)\s[^>]*?(?:src|srcset)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Page:
    """One file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return _read(self.path)

    @property
    def prose(self) -> str:
        """All but fenced blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self, *languages: str) -> Iterator[str]:
        """Fenced blocks of these languages, indentation taken off."""
        for indent, language, body in _FENCE.findall(self.text):
            if language in languages:
                yield re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)

    def spans(self) -> Iterator[str]:
        """Code within sentences."""
        for span in _SPAN.findall(self.prose):
            yield " ".join(span.replace("\\|", "|").split())

    def links(self) -> Iterator[str]:
        prose = _SPAN.sub("", self.prose)
        yield from _LINK.findall(prose)
        yield from _SOURCE.findall(prose)

    def anchors(self) -> set[str]:
        """What a link may name after #, by GitHub's rules."""
        found = list[str]()
        for heading in re.findall(r"^#{1,6} +(.+?) *$", self.prose, re.MULTILINE):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
            slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            seen = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
            found.append(f"{slug}-{seen}" if seen else slug)
        return {*found, *re.findall(r"<a (?:id|name)=\"([^\"]+)\"", self.text)}

    def commands(self, program: str) -> Iterator[list[str]]:
        """Calls of a program in shell blocks: the words after its name."""
        for block in self.blocks("bash", "sh"):
            for words in _shell(block):
                if words and words[0].rpartition("/")[2] == program:
                    yield words[1:]


@cache
def _read(path: Path) -> str:
    return path.read_text()


@cache
def pages() -> tuple[Page, ...]:
    found = [*ROOT.glob("*.md"), *(path for name in _FOLDERS for path in (ROOT / name).rglob("*.md"))]
    return tuple(Page(path) for path in sorted(found))


def _shell(block: str) -> Iterator[list[str]]:
    """The simple commands of a shell block: what is put before, after and between them is taken off."""
    current = list[str]()
    for word in _lines(block):
        if word is None:
            yield _bare(current)
            current = []
        else:
            current.append(word)
    yield _bare(current)


def _lines(block: str) -> Iterator[str | None]:
    """The words of a block; None where a command ends."""
    pending = ""
    for line in block.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that goes on
            pending += "\n"
            continue
        pending = ""
        for word in words:
            if word in ("&&", "||", "|", "&", ";"):
                yield None
            elif word.endswith(";") and len(word) > 1:
                yield from (word[:-1], None)
            else:
                yield word
        yield None
    if pending.strip():
        raise ValueError(f"a command does not end: {pending[:80]}")


def _bare(words: list[str]) -> list[str]:
    while words and (
        re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0], re.DOTALL) or words[0] in ("$", "export")
    ):
        words = words[1:]
    cut = next((at for at, word in enumerate(words) if re.fullmatch(r"\d?[<>]+.*", word)), len(words))
    return words[:cut]


def as_json(text: str) -> dict[str, Any]:
    """What an example says in JSON, with numbers for its placeholders."""
    found: dict[str, Any] = json.loads(re.sub(r"\b(EPOCH|TURN)\b", "1", text))
    return found
