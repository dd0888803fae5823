"""The commands `eval`, `calibrate` and `convert`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from intflash.cli.console import console
from intflash.cli.options import Backend, BestDevice, Method, Methods, one_of
from intflash.cli.tables import tables
from intflash.models.papers import QFLASH_MODELS, timm_name
from intflash.outputs import check_file
from intflash.quant.calibrate import OBSERVERS

if TYPE_CHECKING:
    from rich.table import Table

    from intflash.models.evaluate import Evaluation

DTYPES = ("float32", "float16", "bfloat16")
_PAPER_NAMES = ", ".join(QFLASH_MODELS.values())
Model = Annotated[
    str,
    typer.Option(
        "--model",
        callback=timm_name,
        help=f"A timm name, transformers:NAME, digits:vit, digits:swin, or a name of QFlash's paper: {_PAPER_NAMES}.",
    ),  # fmt: skip
]
Data = Annotated[
    Path | None,
    typer.Option(
        exists=True, file_okay=False,
        help="The folder that holds a folder of images for each class, or one that holds it as val. The digit models "
        "bring their own images.",
    ),
]  # fmt: skip
Dtype = Annotated[str, typer.Option(help="The model's dtype: float32, float16 or bfloat16.", callback=one_of(*DTYPES))]
Pretrained = Annotated[bool, typer.Option(help="Use the published weights, or random ones.")]
Checkpoint = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A file of weights for a timm model.")
]
Observer = Annotated[
    str,
    typer.Option(
        help="How scales follow from observed values: absmax, percentile or mse.", callback=one_of(*OBSERVERS)
    ),
]
Images = Annotated[int, typer.Option(min=1, help="How many images to calibrate on, taken from all of the folder.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per batch.")]


def evaluate_command(
    model: Model,
    data: Data = None,
    method: Methods = None,
    scales: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help="Add a row with the static scales of this file; may be repeated."
        ),
    ] = None,
    integer: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Add a row with this integer model, a file of intflash convert; may be repeated.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Classify only this many images.")] = None,
    out: Annotated[Path, typer.Option(help="The JSON file. An interrupted run keeps its sums beside it.")] = Path(
        "results/eval.json"
    ),
    batch_size: BatchSize = 32,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 2,
    backend: Backend = None,
    device: BestDevice = None,
    dtype: Dtype = "float32",
    pretrained: Pretrained = True,
    checkpoint: Checkpoint = None,
) -> None:
    """Measure Top-1 and Top-5 of an image classifier with attention computed by every method.

    Every scales file and every integer model gives one more row, whatever methods are chosen.
    An interrupted run goes on where it was. Under torchrun the processes share the images.
    """
    import torch

    from intflash.integer import load
    from intflash.methods import METHODS
    from intflash.models.data import load_classifier, load_images
    from intflash.models.evaluate import Variant, check_variants, evaluate
    from intflash.quant.calibrate import Scales

    loaded = {path: Scales.load(path) for path in scales or ()}
    variants = [Variant(name) for name in method or METHODS]
    named = Counter(path.name for path in loaded)
    for path, found in loaded.items():  # a file's name tells it from the others, but for two of one name
        variants.append(Variant(found.method, found, path.name if named[path.name] == 1 else str(path)))
    for path in integer or ():
        made = load(path, backend=backend)
        attention = made.provenance.get("options", {}).get("method", "")
        variants.append(Variant(attention or "intflash", file=path.name, integer=made))
    check_variants(variants)
    check_file(out)
    device, main, leave = _process_group(device)
    network, transform = load_classifier(model, pretrained=pretrained, checkpoint=checkpoint)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not main) as progress:
        task = progress.add_task("images")
        result = evaluate(
            network, load_images(model, data, transform), variants, name=model, data=str(data or "its own data"),
            batch_size=batch_size,
            workers=workers, limit=limit, device=device, dtype=getattr(torch, dtype), backend=backend,
            state=out.with_suffix(".state"),
            on_batch=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
    if main:
        result.save(out)
        for table in evaluation_tables(result, console.width):
            console.print(table)
        for row in result.rows:
            if row.error:
                console.print(f"[yellow]{escape(row.name)}[/]: {escape(row.error)}")
        for name, reason in result.left.items():
            console.print(f"[dim]left {name}: {escape(reason)}[/]")
        console.print(f"wrote {out}")
    leave()


def calibrate_command(
    model: Model,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="The JSON file of the scales.")] = Path("results/scales.json"),
    method: Method = "auto",
    observer: Observer = "absmax",
    granularity: Annotated[
        list[str] | None,
        typer.Option(
            help="Granularity of a tensor's scales, as q=head or v=channel; may be repeated (default: the method's)."
        ),
    ] = None,
    images: Images = 128,
    batch_size: BatchSize = 32,
    device: BestDevice = None,
    dtype: Dtype = "float32",
    pretrained: Pretrained = True,
    checkpoint: Checkpoint = None,
) -> None:
    """Find static scales for every attention layer of a model on your images, and write them to a file."""
    import torch

    from intflash.models.calibration import calibrate, static_granularity
    from intflash.models.data import load_classifier, load_images, unwrapped
    from intflash.models.evaluate import batches

    chosen = dict(_pair(text) for text in granularity or ())
    static_granularity(method, chosen)  # refuses before the model is loaded
    check_file(out)
    network, transform = load_classifier(model, pretrained=pretrained, checkpoint=checkpoint)
    network = network.to(device=device, dtype=getattr(torch, dtype))
    stream = batches(load_images(model, data, transform, train=True), images, batch_size, device, getattr(torch, dtype))
    with console.status(f"calibrating {model}"):
        found = calibrate(
            unwrapped(network), stream, method, observer=observer, granularity=chosen, path=out,
            forward=lambda _, images: network(images),
        )  # fmt: skip
    console.print(
        f"{len(found.layers)} layers of {found.model} from {found.images} images, {found.observer}, per "
        + ", ".join(f"{name} {kind}" for name, kind in found.granularity.items())
    )
    console.print(f"wrote {out}")


def convert_command(
    model: Model,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="The safetensors file of the integer model.")] = Path(
        "results/integer.safetensors"
    ),
    method: Annotated[
        str,
        typer.Option(help="Method of attention: intflash or intflash_p8.", callback=one_of("intflash", "intflash_p8")),
    ] = "intflash",
    observer: Observer = "absmax",
    residual_bits: Annotated[int, typer.Option(help="Bits of the residual stream: 16 or 32.")] = 16,
    activation_bits: Annotated[int, typer.Option(help="Bits of the index of activation tables: 8, 10 or 12.")] = 10,
    fold: Annotated[bool, typer.Option(help="Fold the scales of single channels into the next weights.")] = True,
    scales: Annotated[
        str, typer.Option(help="Granularity of attention's scales: tensor or head.", callback=one_of("tensor", "head"))
    ] = "head",
    image: Annotated[
        str,
        typer.Option(
            help="Images that the model will take: float (normalized) or uint8 (raw).",
            callback=one_of("float", "uint8"),
        ),
    ] = "float",
    images: Images = 128,
    batch_size: BatchSize = 32,
    device: BestDevice = None,
    pretrained: Pretrained = True,
    checkpoint: Checkpoint = None,
) -> None:
    """Convert a model to integers, calibrated on your images, and write it to one file."""
    import torch

    from intflash import integer
    from intflash.integer.registry import translate
    from intflash.models.data import load_classifier, load_images, normalization, unwrapped
    from intflash.models.evaluate import batches

    options = dict(
        method=method, observer=observer, residual_bits=residual_bits, activation_bits=activation_bits, fold=fold,
        scales=scales, image=image,
    )  # fmt: skip
    integer.Options(**options)  # refuses before the model is loaded
    check_file(out)
    network, transform = load_classifier(model, pretrained=pretrained, checkpoint=checkpoint)
    network = unwrapped(network)
    translate(network)
    if image == "uint8":
        options["mean"], options["std"] = normalization(transform)
    network = network.to(device=device, dtype=torch.float32)
    stream = batches(load_images(model, data, transform, train=True), images, batch_size, device, torch.float32)
    made = integer.convert(network, integer.calibrate(network, stream, images=images), **options)
    made.save(out)
    console.print(escape(f"{made.provenance['model']} in {len(made.program.operations)} integer operations"))
    console.print(escape(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)"))


def _pair(text: str) -> tuple[str, str]:
    """ "q=head" as ("q", "head")."""
    name, found, kind = text.partition("=")
    if not found:
        raise typer.BadParameter(
            f"expected a tensor and its granularity, as q=head, got {text!r}", param_hint="'--granularity'"
        )
    return name, kind


def _process_group(device: str) -> tuple[str, bool, Callable[[], None]]:
    """(device, is the first process, how to leave): joins torchrun's group where there is one."""
    import torch

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # set by torchrun
        return device, True, lambda: None
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device, torch.distributed.get_rank() == 0, torch.distributed.destroy_process_group


def evaluation_tables(result: Evaluation, width: int) -> Iterator[Table]:
    """Ours beside QFlash Table 5; BOPs are counted as the paper counts them."""
    counts = ("Top-1\n%", "paper's\nTop-1", "Top-5\n%", "agrees\n%", "logits\ndB")
    costs = ("GBOPs", "paper's\nGBOPs", "ms per\nimage", "layers")
    rows, styles = [], []
    for row in result.rows:
        ours = "bold green" if row.name.startswith("intflash") else None
        styles.append("yellow" if row.error else ours)
        if row.error:
            rows.append([escape(row.name), "refused"])
            continue
        paper_top1 = "" if row.paper is None else f"{row.paper.top1:.2f}"
        paper_bops = "" if row.paper is None or row.paper.bops is None else f"{row.paper.bops:.1f}"
        rows.append([
            escape(row.name), f"{row.top1:.2f}", paper_top1, f"{row.top5:.2f}", f"{row.agreement:.2f}",
            "" if row.logits_sqnr is None else f"{row.logits_sqnr:.1f}", "yes" if row.integer_only else "",
            row.granularity, "" if row.gbops is None else f"{row.gbops:.1f}", paper_bops, f"{row.ms_per_image:.2f}",
            str(row.replaced or ""),
        ])  # fmt: skip
    return tables(
        ("method", *counts, "integer\nonly", "Q/K/V", *costs), rows, width, styles=styles,
        title=escape(f"{result.model}: {result.images} images of {result.data}"), left=("integer\nonly", "Q/K/V"),
        caption="agrees: with the float model's classes. dB: SQNR of the logits. Layers: those replaced.",
    )  # fmt: skip
