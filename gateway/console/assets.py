"""Style sheets, scripts and the icon of the console, including vendored ones (`assets/vendor/vendored.json`).

Names contain digests, so browsers may cache them forever."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

from litestar import Response, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from gateway.http.asgi import Request, headers_of

FOLDER = Path(__file__).parent / "assets"
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
DIGEST_CHARACTERS = 16
HEADERS = {
    "cache-control": "public, max-age=31536000, immutable",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    # An SVG that is opened by itself is a page, and a shared worker asks under the policy of its own file.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'",
    "vary": "accept-encoding",
}


def _named(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST_CHARACTERS]
    return f"{path.stem}.{digest}{path.suffix}"


_FILES = {_named(path): path for path in sorted(FOLDER.rglob("*")) if path.suffix in TYPES}
_CONTENTS = {name: path.read_bytes() for name, path in _FILES.items()}
_COMPRESSED = {name: gzip.compress(content, mtime=0) for name, content in _CONTENTS.items()}
_ADDRESSES = {path.name: f"/console/assets/{name}" for name, path in _FILES.items()}


def address(name: str) -> str:
    return _ADDRESSES[name]


def text(name: str) -> str:
    return _CONTENTS[_ADDRESSES[name].rpartition("/")[2]].decode()


@get("/console/assets/{name:str}", include_in_schema=False)
async def asset(request: Request, name: FromPath[str]) -> Response[bytes]:
    if name not in _CONTENTS:
        raise NotFoundException
    media_type = TYPES[_FILES[name].suffix]
    if "gzip" in headers_of(request.scope).get("accept-encoding", ""):
        return Response(
            _COMPRESSED[name], headers=HEADERS | {"content-encoding": "gzip"}, media_type=media_type
        )
    return Response(_CONTENTS[name], headers=HEADERS, media_type=media_type)


HANDLERS = [asset]
