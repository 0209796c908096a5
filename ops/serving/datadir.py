"""Files of the data directory and their locks.

The layout is in `docs/operating.md`. Only the owner can read it; a running gateway holds `serve.lock`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ops.settings.settings import Settings

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DataDirRefused(Exception):
    """The data directory cannot be used; the message says why and what to do."""


PEPPER_FILE = "pepper"
OWNER_KEY_FILE = "owner-key"
SET_UP_LINK_FILE = "set-up-link"
UNFINISHED_FILE = "restore-unfinished"
WORKERS = "workers"
"""Holds a data directory of each worker."""


@dataclass(frozen=True)
class ServerFile:
    """A running server, as the command line sees it."""

    url: str
    pid: int
    control_token: str
    """Bearer with the admin scopes, valid while the server runs."""
    admin_url: str = ""
    """Of its admin listener; empty: it has none."""

    @property
    def url_of_admin(self) -> str:
        return self.admin_url or self.url


def ensure(data_dir: Path) -> None:
    """Creates the directory for its owner only. Raises `DataDirRefused`."""
    require_whole(data_dir)
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (data_dir / "run").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise DataDirRefused(f"data directory {data_dir} cannot be created: {error.strerror}") from None
    if not os.access(data_dir, os.R_OK | os.W_OK | os.X_OK):
        raise DataDirRefused(f"data directory {data_dir} is not readable and writable by this user")


def mark_unfinished(data_dir: Path) -> Path:
    """Until the file is removed, nothing uses the directory: a restore fills it."""
    return private_file(data_dir / UNFINISHED_FILE, "a restore into this directory has not ended")


def require_whole(data_dir: Path) -> None:
    """Raises `DataDirRefused` where a restore was interrupted."""
    if (data_dir / UNFINISHED_FILE).exists():
        raise DataDirRefused(
            f"a restore into {data_dir} has not ended: where it does not run any more, delete that directory,"
            " and restore again"
        )


def pepper(settings: Settings) -> bytes:
    """The secret that keys are hashed with: from the settings, else the file, else a new one, which
    `keep_pepper` writes later. Raises `DataDirRefused`."""
    require_whole(settings.data_dir)
    if settings.pepper:
        return settings.pepper.encode()
    path = settings.data_dir / PEPPER_FILE
    if not path.exists():
        return secrets.token_urlsafe(48).encode()
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise DataDirRefused(
            f"pepper {path} cannot be read ({error.strerror}); "
            "without it no API key can be checked: restore it, or give FAIRGATE_PEPPER"
        ) from None
    except UnicodeDecodeError:
        text = ""
    if len(text) < 32:
        raise DataDirRefused(f"pepper {path} is damaged: it must hold at least 32 ASCII characters")
    return text.encode()


def keep_pepper(settings: Settings, secret: bytes) -> None:
    """Writes a new pepper before the first key is made with it; an existing one stays. Raises
    `DataDirRefused` where another process has made one meanwhile."""
    path = settings.data_dir / PEPPER_FILE
    if settings.pepper:
        return
    if not path.exists():
        partial = private_file(path.with_name(f"{PEPPER_FILE}.{secrets.token_hex(8)}"), secret.decode())
        try:
            os.link(partial, path)  # atomic: the first process wins, and no reader sees half a pepper
        except FileExistsError:
            pass
        finally:
            partial.unlink()
    if pepper(settings) != secret:
        raise DataDirRefused(f"another process has just made the pepper {path}; try again")


def write_owner_key(data_dir: Path, key: str) -> Path:
    path = data_dir / OWNER_KEY_FILE
    path.unlink(missing_ok=True)
    return private_file(path, key)


def write_set_up_link(data_dir: Path, link: str) -> Path:
    """The link that makes the console's first owner, in a file of its own; replaces an older one."""
    forget_set_up_link(data_dir)
    return private_file(data_dir / SET_UP_LINK_FILE, link)


def forget_set_up_link(data_dir: Path) -> None:
    (data_dir / SET_UP_LINK_FILE).unlink(missing_ok=True)


def private_file(path: Path, line: str) -> Path:
    """Writes a file with one line for the owner only. Raises `FileExistsError`."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    return path


def gateway_id(data_dir: Path) -> str:
    """The gateway's name, made at its first start; its reservations are recovered by it."""
    path = data_dir / "gateway-id"
    try:
        noted = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        noted = ""
    if noted:
        return noted
    made = f"gw_{secrets.token_hex(6)}"
    path.write_text(made + "\n", encoding="ascii")
    return made


def runs_in(data_dir: Path) -> str:
    """This boot of this machine and this very directory (no copy has the same); empty: not known."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
        stat = data_dir.stat()
    except (OSError, UnicodeDecodeError):
        return ""
    return f"{boot}:{stat.st_dev}:{stat.st_ino}"


@contextmanager
def serve_lock(data_dir: Path) -> Iterator[None]:
    """Held while a gateway runs on the directory. Raises `DataDirRefused` when another one holds it."""
    path = data_dir / "serve.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            running = read_server_file(data_dir)
            where = f" (process {running.pid}, {running.url})" if running else ""
            raise DataDirRefused(
                f"another fairgate serve already runs on {data_dir}{where}; "
                "stop it, or give this one its own --data-dir"
            ) from None
        yield
    finally:
        os.close(descriptor)


def is_serving(data_dir: Path) -> bool:
    try:
        descriptor = os.open(data_dir / "serve.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def worker_dir(data_dir: Path, number: int) -> Path:
    return data_dir / WORKERS / str(number)


def wait_for_workers(data_dir: Path, timeout_s: float) -> None:
    """Until those of an earlier server that was killed have ended. Raises `DataDirRefused`."""
    until_s = time.monotonic() + timeout_s
    for directory in sorted((data_dir / WORKERS).glob("*")):
        while is_serving(directory):
            if time.monotonic() > until_s:
                raise DataDirRefused(
                    f"a worker of an earlier server still runs on {directory}: it ends once its requests are"
                    " done (gateway.drain); try again later, or stop it"
                )
            time.sleep(0.05)


def write_server_file(data_dir: Path, server: ServerFile) -> None:
    path = data_dir / "run" / "server.json"
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(server), file)
    partial.replace(path)


def remove_server_file(data_dir: Path) -> None:
    (data_dir / "run" / "server.json").unlink(missing_ok=True)


def read_server_file(data_dir: Path) -> ServerFile | None:
    """The server that says it runs on this directory; None where there is none."""
    try:
        content = json.loads((data_dir / "run" / "server.json").read_text(encoding="utf-8"))
        return ServerFile(
            str(content["url"]),
            int(content["pid"]),
            str(content["control_token"]),
            str(content.get("admin_url", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def running_server(data_dir: Path) -> ServerFile | None:
    """The server that really runs on this directory (it holds the lock)."""
    return read_server_file(data_dir) if is_serving(data_dir) else None
