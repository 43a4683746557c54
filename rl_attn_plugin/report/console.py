"""What the tables of several reports share in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_attn_plugin.report.words import visible

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

STYLES = {"PASS": "green", "DRIFT": "red", "INCONCLUSIVE": "yellow", "INVALID": "magenta"}


def panel(verdict: str, lines: Text, subtitle: str = "") -> Panel:
    """The box on top, in the verdict's colour.

    Args:
        verdict: its title.
        lines: what it says.
        subtitle: dim, at its lower right; may be model text.
    """
    from rich.panel import Panel
    from rich.text import Text

    return Panel(
        lines,
        title=Text(f" {verdict} ", style=f"bold reverse {STYLES[verdict]}"),
        title_align="left",
        subtitle=Text(visible(subtitle), style="dim") if subtitle else None,
        subtitle_align="right",
        border_style=STYLES[verdict],
        padding=(1, 2),
    )


def titled_table(title: str) -> Table:
    """An empty one."""
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def marked(before: str, text: str, after: str, width: int, most: int) -> Text:
    """A token and what surrounds it, two thirds of the room before it.

    Args:
        before: what stands before it; all three may be model text.
        text: the token.
        after: what stands after it.
        width: columns of all.
        most: columns of the token.
    """
    from rich.text import Text

    text = (visible(text) or "∅")[:most]
    room = width - len(text)
    before, after = visible(before)[-(room * 2 // 3) :], visible(after)[: room // 3]
    return Text.assemble((before, "dim"), (text, "bold reverse"), (after, "dim"))
