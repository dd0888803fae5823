"""From calibration to deployment: observe a model, save scales and weights, load both in another process, and run.

python examples/calibrate_and_deploy.py            # calibrates, then starts itself as the deployment
python examples/calibrate_and_deploy.py FOLDER     # the deployment: loads what the calibration saved
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import intflash
from intflash.digits import DigitsViT, load_model  # stands for your model


def calibrate(folder: Path) -> None:
    """On any machine: needs the model and some inputs like those of deployment."""
    torch.manual_seed(0)
    model = load_model("vit")
    batches = [torch.rand(32, 1, 8, 8) for _ in range(4)]  # yours: 32 to 256 images
    scales = intflash.calibrate(
        model, batches, method="intflash_p8", observer="percentile",
        granularity={"q": "head", "k": "head", "v": "head"}, path=folder / "scales.json",
    )  # fmt: skip
    torch.save(model.state_dict(), folder / "weights.pt")
    print(f"{len(scales.layers)} layers from {scales.images} images: {folder / 'scales.json'}")


def deploy(folder: Path) -> None:
    """Where the model runs: weights first, then the scales, which are refused if they belong to other weights."""
    model: nn.Module = DigitsViT()
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    model.eval()
    print(intflash.patch(model, scales=folder / "scales.json"))
    # On a GPU: model = torch.compile(model.cuda(), fullgraph=True, mode="reduce-overhead")
    images = torch.rand(8, 1, 8, 8)
    with torch.inference_mode():
        together, alone = model(images), model(images[:1])
    same = torch.equal(together.argmax(-1)[:1], alone.argmax(-1))
    print(f"classes {together.argmax(-1).tolist()}; one image alone gets the same class: {same}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        deploy(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            calibrate(Path(name))
            subprocess.run([sys.executable, __file__, name], check=True)
