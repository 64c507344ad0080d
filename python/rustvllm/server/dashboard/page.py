"""The page itself: one HTML file with its style and scripts inside, and the headers that it is sent with.

Nothing is fetched from elsewhere, so it works without a network; the policy allows just these scripts and this style.
"""

import base64
import functools
import hashlib
from importlib.resources import files
from typing import Final

_STYLE: Final = "style.css"
_SCRIPTS: Final = ("drawing.js", "live.js", "hour.js", "playground.js")
_COMMON_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
DATA_HEADERS: Final = {**_COMMON_HEADERS, "X-Accel-Buffering": "no"}
"""Of the streams that the page reads."""


@functools.cache
def page() -> tuple[str, dict[str, str]]:
    """The page, and its headers."""
    style = _read(_STYLE)
    script = "(() => {\n'use strict';\n" + "".join(map(_read, _SCRIPTS)) + "})();\n"
    html = _read("page.html").replace("/* style */", style).replace("/* script */", script)
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        **_COMMON_HEADERS,
        "Content-Security-Policy": policy,
        "Cross-Origin-Opener-Policy": "same-origin",
        "X-Frame-Options": "DENY",
    }
    return html, headers


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _source(content: str) -> str:
    """What a policy allows: the content whose hash this is."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}'"
