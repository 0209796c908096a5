"""The release that runs. Without SQLAlchemy, for `fairgate --version`."""

from __future__ import annotations

from importlib import metadata


def this_release() -> str:
    try:
        return metadata.version("fairgate")
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "0+unknown"
