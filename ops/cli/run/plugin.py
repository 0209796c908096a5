"""`fairgate plugin`: the wheel that brings token-fair scheduling into vLLM."""

from __future__ import annotations

from pathlib import Path

import click

from ops.cli.base import Failure, answer, group


@group()
def plugin() -> None:
    """Token-fair scheduling inside vLLM.

    \b
      fairgate plugin build --out dist
      VLLM_ENVIRONMENT/bin/pip install dist/fairgate_vllm-*.whl
      vllm serve MODEL --scheduler-cls fairgate_vllm.FairScheduler
    """


@plugin.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("dist"),
    show_default=True,
    help="Directory for the wheel.",
)
def build(out: Path) -> None:
    """Builds the wheel fairgate-vllm from this installation; it needs nothing but msgspec.

    \b
    With --json: {"wheel": "dist/fairgate_vllm-0.1.0-py3-none-any.whl"}
    """
    from ops.vllm_wheel import CannotBuild, build_wheel

    try:
        path = build_wheel(out)
    except (CannotBuild, OSError) as error:
        raise Failure(str(error)) from None
    answer({"wheel": str(path)}, str(path))
