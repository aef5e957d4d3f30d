"""Store addresses: a local path taken literally, `memory://`, or `s3://bucket/prefix?options`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import icechunk

from .errors import ErrorCode, InputError

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_S3_OPTIONS: Final = ("endpoint", "region", "path_style", "anonymous")


class Kind(Enum):
    """Where a store lives."""

    LOCAL = "local"
    MEMORY = "memory"
    S3 = "s3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A parsed store address. `text` is what messages show: an absolute path or the URL."""

    kind: Kind
    text: str
    path: Path | None = None
    bucket: str = ""
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    anonymous: bool = False


def parse_location(url: str | Path) -> Location:
    """The location behind an address. Raises `InputError` for an unknown scheme or option.

    Local paths are literal (spaces, `%`, `#` and non-ASCII characters stand for themselves) and
    made absolute once, here. Credentials for S3 come from the environment, never from the URL.
    """
    text = str(url)
    if text.startswith("memory://"):
        return Location(kind=Kind.MEMORY, text=text)
    if text.startswith("s3://"):
        return _parse_s3(text)
    if _SCHEME.match(text):
        raise InputError(
            f"store address must be a path, memory:// or s3://, got {text!r}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    if not text.strip():
        raise InputError("store address must not be empty.", code=ErrorCode.INVALID_ARGUMENT)
    path = Path(text).expanduser().absolute()
    return Location(kind=Kind.LOCAL, text=str(path), path=path)


def backend_storage(location: Location) -> icechunk.Storage:
    """Icechunk's storage object for a location."""
    if location.kind is Kind.MEMORY:
        return icechunk.in_memory_storage()
    if location.kind is Kind.LOCAL:
        return icechunk.local_filesystem_storage(location.text)
    return icechunk.s3_storage(
        bucket=location.bucket,
        prefix=location.prefix,
        region=location.region,
        endpoint_url=location.endpoint,
        allow_http=location.endpoint is not None and location.endpoint.startswith("http://"),
        force_path_style=location.path_style,
        anonymous=location.anonymous or None,
        from_env=None if location.anonymous else True,
    )


def _parse_s3(text: str) -> Location:
    parts = urlsplit(text)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(options) - set(_S3_OPTIONS))
    if not parts.netloc or "@" in parts.netloc or unknown or parts.fragment:
        raise InputError(
            f"S3 address must be s3://bucket/prefix with options {', '.join(_S3_OPTIONS)}, "
            f"got {text!r}.",
            code=ErrorCode.INVALID_ARGUMENT,
            remedy="Credentials are read from the environment (AWS_ACCESS_KEY_ID, ...).",
        )
    endpoint = options.get("endpoint")
    return Location(
        kind=Kind.S3,
        text=text,
        bucket=parts.netloc,
        prefix=unquote(parts.path.strip("/")),
        endpoint=endpoint,
        region=options.get("region", "us-east-1" if endpoint else None),
        path_style=_flag(options, "path_style", default=endpoint is not None, text=text),
        anonymous=_flag(options, "anonymous", default=False, text=text),
    )


def _flag(options: dict[str, str], name: str, *, default: bool, text: str) -> bool:
    value = options.get(name)
    if value is None:
        return default
    if value not in ("true", "false"):
        raise InputError(
            f"{name} must be true or false, got {value!r} in {text!r}.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    return value == "true"
