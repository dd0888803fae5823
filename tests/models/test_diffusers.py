"""diffusers models: older processors and the newer dispatcher."""

import pytest
import torch

import intflash
from oracle import sqnr
from sharp import run

diffusers = pytest.importorskip("diffusers")


def test_unet():
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8,
    ).eval()  # fmt: skip
    inputs = (torch.randn(1, 4, 8, 8), torch.tensor([10]), torch.randn(1, 7, 32))
    reference = run(model, *inputs)
    with intflash.patch(model) as report:
        out = run(model, *inputs)
    assert len(report.replaced) == 8 and set(report.replaced.values()) == {"Attention"}
    assert 30 < sqnr(reference, out) < 100
    assert torch.equal(run(model, *inputs), reference)


def test_dispatched_attention_and_a_backend_of_its_own():
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ).eval()  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(1, 16, 4), encoder_hidden_states=torch.randn(1, 8, 32),
        pooled_projections=torch.randn(1, 32), timestep=torch.tensor([1.0]), img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(8, 3),
    )  # fmt: skip
    reference = run(model, **inputs)
    with intflash.patch(model) as report:
        out = run(model, **inputs)
    assert len(report.replaced) == 2
    assert 30 < sqnr(reference, out) < 100
    model.transformer_blocks[0].attn.set_attention_backend("flex")
    with intflash.patch(model) as report:
        assert len(report.replaced) == 1
        assert "attention backend" in report.left["transformer_blocks.0.attn"]
