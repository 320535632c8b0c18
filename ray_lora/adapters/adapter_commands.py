"""`ray-lora adapter inspect`, `compress`, `merge` and `convert`: PEFT directories, without a server or a base model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch

from ray_lora.adapters import adapter_tools
from ray_lora.adapters.adapter_report import AdapterReport, describe
from ray_lora.adapters.shard import DTYPES
from ray_lora.architecture import read_architecture
from ray_lora.errors import RayLoraError
from ray_lora.text_table import text_table

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
output_option = click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="A directory that does not exist yet."
)
dtype_option = click.option(
    "--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True, help="Of the tensors written."
)


@click.command("inspect")
@click.argument("path", type=DIRECTORY)
@click.option("--model", type=DIRECTORY, help="Check against this base model too.")
def inspect_command(path: Path, model: Path | None) -> None:
    """Show PATH by module.

    And what a server would refuse; the exit status is then 1.

    Norms are Frobenius norms; "99%" is how many ranks hold 99% of the energy of a module's delta.
    """
    with _errors_in_one_line():
        report = describe(path, read_architecture(model) if model else None)
    _print_report(report)
    if report.refusals:
        sys.exit(1)


@click.command("compress")
@click.argument("path", type=DIRECTORY)
@click.option("--energy", type=click.FloatRange(0, 1, min_open=True, max_open=True), help="Share to keep, e.g. 0.99.")
@click.option("--rank", type=click.IntRange(1), help="Largest rank to keep.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Of the tensors written; by default the adapter's.")
@output_option
def compress_command(path: Path, energy: float | None, rank: int | None, dtype: str | None, output: Path) -> None:
    """Lower the ranks of PATH.

    By singular value decomposition of each module's delta.

    Errors are relative: the norm of the change over the norm of the delta. An energy of E allows sqrt(1 - E).
    """
    if (energy is None) == (rank is None):
        raise click.UsageError("give either --energy or --rank")
    with _errors_in_one_line():
        done = adapter_tools.compress(path, output, energy=energy, rank=rank, dtype=DTYPES[dtype] if dtype else None)
    rows = [(cut.name, f"{cut.old_rank}", f"{cut.new_rank}", _ratio(cut.error, cut.norm)) for cut in done]
    click.echo(text_table(("module", "rank", "new rank", "error"), rows))
    error, norm = (torch.tensor(values).norm().item() for values in ([c.error for c in done], [c.norm for c in done]))
    click.echo(f"\ntotal error {_ratio(error, norm)}; written to {output}")


@click.command("merge")
@click.argument("paths", type=DIRECTORY, nargs=-1, required=True)
@click.option("--weights", required=True, help="One number for each path, e.g. 0.7,0.3.")
@dtype_option
@output_option
def merge_command(paths: tuple[Path, ...], weights: str, dtype: str, output: Path) -> None:
    """Write the weighted sum of PATHS.

    Of their deltas: ranks add up; compress afterwards if that is too many.
    """
    try:
        numbers = [float(weight) for weight in weights.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{weights!r} is not a list of numbers such as 0.7,0.3", param_hint="--weights"
        ) from None
    with _errors_in_one_line():
        ranks = adapter_tools.merge(paths, numbers, output, DTYPES[dtype])
    click.echo(f"{len(ranks)} modules, largest rank {max(ranks.values())}; written to {output}")


@click.command("convert")
@click.argument("path", type=DIRECTORY)
@click.option("--initial", required=True, type=DIRECTORY, help="The adapter as it was saved before training.")
@dtype_option
@output_option
def convert_command(path: Path, initial: Path, dtype: str, output: Path) -> None:
    """Turn PiSSA and its like into plain LoRA.

    A PiSSA, CorDA, OLoRA or LoRA-GA adapter, for the original base model, of twice the rank.
    """
    with _errors_in_one_line():
        ranks = adapter_tools.convert(path, initial, output, DTYPES[dtype])
    click.echo(f"{len(ranks)} modules, largest rank {max(ranks.values())}; written to {output}")


def _print_report(report: AdapterReport) -> None:
    rows = [
        (
            module.name,
            f"{module.out_features}x{module.in_features}",
            f"{module.rank}",
            f"{module.rank_99}",
            f"{module.scale:.4g}",
            f"{module.norm_a:.4g}",
            f"{module.norm_b:.4g}",
            f"{module.norm_delta:.4g}",
        )
        for module in report.modules
    ]
    click.echo(text_table(("module", "shape", "rank", "99%", "scale", "|A|", "|B|", "|delta|"), rows))
    pages = f"{report.num_pages} page{'' if report.num_pages == 1 else 's'} of 16 ranks"
    click.echo(f"\n{len(rows)} modules, {report.num_params:,} parameters, {report.num_bytes:,} bytes, {pages}")
    for refusal in report.refusals:
        click.echo(f"refused: {refusal}")


def _ratio(error: float, norm: float) -> str:
    return f"{error / norm if norm else 0.0:.3g}"


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except RayLoraError as error:
        sys.exit(f"ray-lora: {error}")
