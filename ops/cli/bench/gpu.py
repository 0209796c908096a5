"""`fairgate bench gpu`: the engine on a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from ops.cli.base import Failure
from ops.cli.bench.options import command, verdict

SECTIONS = ["kernels", "roofline", "decode", "mixed", "split"]


@command()
@click.option("--section", "sections", type=click.Choice(SECTIONS), multiple=True, help="Only it (repeat).")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default="gpu.json",
    show_default=True,
    help="Written as each section ends.",
)
@click.option("--rehearse", is_flag=True, help="All of it in small on the CPU; measures nothing.")
def gpu(sections: tuple[str, ...], out: Path, rehearse: bool) -> None:
    """Kernels, decode steps and a mixed workload on a GPU, in eight minutes, with nothing else running.

    Its sections: docs/gpu.md. Ends with 1 where one failed or a kernel is wrong, with 3 where one's time was
    up. --json answers {"card": "NVIDIA H100", "date": "2026-11-28", "sections": {"decode": {…}, …}, "ok": …}.
    """
    from ops.bench.common.errors import CannotBench
    from ops.bench.gpu.run import run

    try:
        report = run(sections, out, rehearse, lambda line: click.echo(line, err=True))
    except CannotBench as error:
        raise Failure(str(error)) from None
    verdict(report, lambda: click.echo(f"written to {out}"))
