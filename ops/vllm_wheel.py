"""Builds `fairgate-vllm`, the wheel that vLLM's environment takes, from this project's modules.

The package `engine.vllm_plugin` becomes `fairgate_vllm`; every module of `engine` that it imports, directly
or not, goes with it under `fairgate_vllm.engine`, with its imports rewritten. So nothing is installed under
the names `engine` or `kernels`, and no module is kept twice. Equal sources make equal wheels, byte for byte.
"""

from __future__ import annotations

import ast
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from importlib import metadata
from pathlib import Path

PLUGIN = "engine.vllm_plugin"
PACKAGE = "fairgate_vllm"
DEPENDENCIES = ("msgspec>=0.20",)
ENTRY_POINTS = {
    "vllm.general_plugins": ("entry_points", "register"),
    "vllm.endpoint_plugins": ("channel.http_endpoint", "FairgateEndpoint"),
}
"""By group: module of the plug-in, and the object in it."""
WHEEL = b"Wheel-Version: 1.0\nGenerator: fairgate\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
ZIP_TIME = (2020, 1, 1, 0, 0, 0)


class CannotBuild(RuntimeError):
    """The plug-in imports something that its wheel cannot bring along."""


def build_wheel(directory: Path, root: Path | None = None) -> Path:
    """Writes the wheel into `directory` and returns its path. `root`: the directory that holds `engine`;
    None: that of the installed project. Raises `CannotBuild`; OSError."""
    root = root or Path(__file__).resolve().parent.parent
    version = _version()
    files = {
        _name_in_wheel(root, module): _rewritten(root, module).encode()
        for module in sorted(needed_modules(root))
    }
    info = f"{PACKAGE}-{version}.dist-info"
    licence = root / "LICENSE"
    files |= {
        f"{info}/METADATA": _metadata(version, has_licence=licence.is_file()).encode(),
        f"{info}/WHEEL": WHEEL,
        f"{info}/entry_points.txt": _entry_points(root).encode(),
    }
    if licence.is_file():
        files[f"{info}/licenses/LICENSE"] = licence.read_bytes()
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{PACKAGE}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, ZIP_TIME)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, content)
    return path


def needed_modules(root: Path) -> set[str]:
    """The plug-in's modules, those of `engine` that they import, and the packages around them."""
    folder = root / Path(*PLUGIN.split("."))
    files = [path.relative_to(root).with_suffix("").parts for path in sorted(folder.rglob("*.py"))]
    waiting = [".".join(parts).removesuffix(".__init__") for parts in files]
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        waiting += [*_imports(root, module), *([module.rpartition(".")[0]] if "." in module else [])]
    return found


def _path(root: Path, module: str) -> Path:
    path = root / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imports(root: Path, module: str) -> list[str]:
    found: list[str] = []
    for node in _import_nodes(root, module):
        assert node.module is not None
        found.append(node.module)
        inside = [f"{node.module}.{alias.name}" for alias in node.names]
        found += [name for name in inside if _path(root, name).is_file()]
    return found


def _import_nodes(root: Path, module: str) -> list[ast.ImportFrom]:
    """Its imports from `engine`. Raises `CannotBuild` for those that cannot be rewritten."""
    path = _path(root, module)
    found: list[ast.ImportFrom] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            if any(_is_ours(name) for name in names):
                raise CannotBuild(
                    f"{path}:{node.lineno}: write 'from ... import ...': the wheel rewrites those"
                )
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            if not (node.module or "").startswith("engine"):
                raise CannotBuild(
                    f"{path}:{node.lineno}: the wheel brings only modules of engine, not {node.module}"
                )
            found.append(node)
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("engine", "gateway", "kernels", "migrations", "ops", "tenants")


def _name_in_wheel(root: Path, module: str) -> str:
    """File of a module inside the wheel; a package's is its `__init__.py`."""
    renamed = _renamed(module)
    is_package = _path(root, module).name == "__init__.py"
    return "/".join(renamed.split(".")) + ("/__init__.py" if is_package else ".py")


def _renamed(module: str) -> str:
    if module == PLUGIN or module.startswith(f"{PLUGIN}."):
        return PACKAGE + module.removeprefix(PLUGIN)
    return f"{PACKAGE}.{module}"


def _rewritten(root: Path, module: str) -> str:
    lines = _path(root, module).read_text(encoding="utf-8").splitlines(keepends=True)
    for node in _import_nodes(root, module):
        line = lines[node.lineno - 1]
        assert node.module is not None
        before = f"from {node.module} import"
        if before not in line:
            raise CannotBuild(f"{module}:{node.lineno}: cannot rewrite {line.strip()!r}")
        lines[node.lineno - 1] = line.replace(before, f"from {_renamed(node.module)} import", 1)
    return "".join(lines)


def _metadata(version: str, *, has_licence: bool) -> str:
    lines = [
        "Metadata-Version: 2.4",
        "Name: fairgate-vllm",
        f"Version: {version}",
        "Summary: Token-fair scheduling between tenants inside vLLM, by Fairgate.",
        "License-Expression: Apache-2.0",
        *(["License-File: LICENSE"] if has_licence else []),
        "Requires-Python: >=3.11",
        *(f"Requires-Dist: {dependency}" for dependency in DEPENDENCIES),
    ]
    return "\n".join(lines) + "\n"


def _entry_points(root: Path) -> str:
    groups = [
        f"[{group}]\nfairgate = {PACKAGE}.{module}:{name}\n"
        for group, (module, name) in ENTRY_POINTS.items()
        if _path(root, f"{PLUGIN}.{module}").is_file()
    ]
    return "\n".join(groups)


def _digest(content: bytes) -> str:
    return urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()


def _version() -> str:
    try:
        return metadata.version("fairgate")
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "0+unknown"
