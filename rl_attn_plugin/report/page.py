"""What every page of this package is made with: one file that needs nothing else, safe for model text.

Model text reaches a page in two ways: through its template, which escapes it, and as JSON inside a script element, where
``<``, ``>`` and ``&`` are written as ``\\u003c`` and so on. A content security policy in the page allows its scripts by
their hashes and no network at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_attn_plugin.report import words

_TEMPLATES = Path(__file__).parent / "templates"


def render(
    name: str,
    *,
    verdict: str,
    data: Any,
    draws: bool,
    styles: Sequence[str],
    filters: Mapping[str, Any] | None = None,
    **values: Any,
) -> str:
    """A page as text: ``templates/<name>.html.j2`` fills ``base.html.j2``, ``templates/<name>.js`` draws with ``page.js``.

    Args:
        name: of the page.
        verdict: that its heading and colour say.
        data: plain JSON values for the script, which finds them as ``Page.data``.
        draws: whether there is anything to draw; without, plotly's four megabytes are left out.
        styles: of ``templates/``, in order.
        filters: of this page's template beside the common ones.
        values: that the template names.

    Raises:
        ImportError: jinja2 or plotly is missing.
    """
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ImportError(f"the HTML report needs {error.name}: pip install 'rl-attn-plugin[ray]'") from error

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "number": words.number,
        "signed": lambda value: words.number(value, signed=True),
        "percent": words.percent,
        "visible": words.visible,
        **(filters or {}),
    }
    plotly_js = get_plotlyjs().replace("\r\n", "\n") if draws else ""
    drawing = _text(f"{name}.js")
    script = _text("page.js") + drawing
    return environment.get_template(f"{name}.html.j2").render(
        words=words,
        verdict=verdict,
        data=_json_for_script(data),
        style="".join(_text(f"{style}.css") for style in styles),
        script=script,
        plotly_js=plotly_js,
        policy=_policy(plotly_js, script),
        **values,
    )


def flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as rows of dotted names and plain values."""
    if isinstance(value, Mapping):
        return [
            row
            for key, item in value.items()
            for row in flat(item, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(value, list):
        value = ", ".join(str(item) for item in value)
    return [(prefix, words.visible("–" if value is None else str(value)))]


def _text(name: str) -> str:
    return (_TEMPLATES / name).read_text("utf-8")


def _policy(*scripts: str) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    # plotly writes style elements and draws images from data addresses
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _json_for_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in, nor start a comment there."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
