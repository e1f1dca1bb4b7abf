"""Boxes, arrows and words as SVG that can be read on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
  svg { --page: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #818b98; --box: #f0f3f6; --good: #1a7f37;
        --goodbox: #dafbe1; --bad: #a40e26; --badbox: #ffebe9; --deed: #0550ae; }
  @media (prefers-color-scheme: dark) {
    svg { --page: #0d1117; --ink: #e6edf3; --soft: #a5adb8; --line: #7d8590; --box: #21262d; --good: #57d06c;
          --goodbox: #12351f; --bad: #ff8f87; --badbox: #45191a; --deed: #79c0ff; }
  }
  text { font: 14px system-ui, 'DejaVu Sans', sans-serif; fill: var(--ink); }
  .title, .soft, .deed { paint-order: stroke; stroke-width: 4px; stroke: var(--page); }
  .plain, .inner { stroke: none; }
  .inner { font-size: 12.5px; fill: var(--soft); }
  .plain { font-size: 13px; }
  .name { font-weight: 600; }
  .page { fill: var(--page); }
  .box { fill: var(--box); stroke: var(--line); }
  .good { fill: var(--goodbox); stroke: var(--good); }
  .bad { fill: var(--badbox); stroke: var(--bad); }
  .title { font-weight: 600; }
  .soft { fill: var(--soft); font-size: 12.5px; }
  .deed { fill: var(--deed); font-size: 12.5px; }
  .arrow { stroke: var(--deed); stroke-width: 1.6; fill: none; marker-end: url(#head); }
  .tensor { stroke: var(--good); stroke-width: 4; fill: none; marker-end: url(#tensorhead); }
  .life { stroke: var(--line); stroke-dasharray: 4 4; }
  #head path { fill: var(--deed); }
  #tensorhead path { fill: var(--good); }
"""
_HEADS = """  <defs>
    <marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">
      <path d="M0,0 L9,4 L0,8 z"/>
    </marker>
    <marker id="tensorhead" markerWidth="4" markerHeight="4" refX="3" refY="2" orient="auto">
      <path d="M0,0 L4,2 L0,4 z"/>
    </marker>
  </defs>"""
LINE = 18
"""Height of a line of words."""


class Picture:
    """A picture of a size, to be drawn from the back to the front.

    Args:
        width: in pixels, as is everything else here.
        height: likewise.
        title: for those who hear the picture.
        told: the same at length.
    """

    def __init__(self, width: int, height: int, title: str, told: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' height="{height}" role="img" aria-labelledby="title told">',
            f'  <title id="title">{escape(title)}</title>',
            f'  <desc id="told">{escape(told)}</desc>',
            f"  <style>{_STYLE}  </style>",
            _HEADS,
            f'  <rect class="page" width="{width}" height="{height}" rx="8"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: Sequence[str],
        kind: str = "box",
        *,
        named: bool = True,
    ) -> None:
        """Draw a box with words in its middle; the first line is its name, if it is `named`."""
        self._parts.append(
            f'  <rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        )
        top = y + height / 2 - LINE * (len(lines) - 1) / 2 + 5
        for number, line in enumerate(lines):
            style = "plain" if not named else "name" if number == 0 else "inner"
            self.words(x + width / 2, top + LINE * number, line, style, "middle")

    def words(self, x: float, y: float, line: str, kind: str = "soft", anchor: str = "start") -> None:
        """Write one line; `anchor` is which part of it is at x: start, middle or end."""
        self._parts.append(
            f'  <text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(line)}</text>'
        )

    def paragraph(
        self, x: float, y: float, lines: Sequence[str], kind: str = "soft", anchor: str = "start"
    ) -> None:
        """Write lines below each other."""
        for number, line in enumerate(lines):
            self.words(x, y + LINE * number, line, kind, anchor)

    def path(self, way: str, kind: str = "arrow") -> None:
        """Draw a line along SVG's path data."""
        self._parts.append(f'  <path class="{kind}" d="{way}"/>')

    def text(self) -> str:
        """Return the picture as SVG."""
        return "\n".join([*self._parts, "</svg>", ""])
