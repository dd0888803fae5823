"""diffusers models: older processors and the newer dispatcher."""

import pytest
import torch

import intflash
from oracle import sqnr
from peaked_models import run

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


def wan(layers: int = 1) -> tuple[torch.nn.Module, dict]:
    """Image to video: each cross attention has text keys and image keys."""
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32, freq_dim=16,
        ffn_dim=32, num_layers=layers, image_dim=24, added_kv_proj_dim=32,
    ).eval()  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(1, 4, 2, 8, 8), timestep=torch.tensor([1.0]),
        encoder_hidden_states=torch.randn(1, 512, 32), encoder_hidden_states_image=torch.randn(1, 257, 24),
    )  # fmt: skip
    return model, inputs


def mochi() -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(0)
    model = diffusers.MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, pooled_projection_dim=16, in_channels=4,
        text_embed_dim=16, time_embed_dim=16, max_sequence_length=16,
    ).eval()  # fmt: skip
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 9:] = False  # its processor attends once for each sample, with that sample's text
    inputs = dict(
        hidden_states=torch.randn(2, 4, 2, 8, 8), timestep=torch.tensor([1.0, 2.0]),
        encoder_hidden_states=torch.randn(2, 16, 16), encoder_attention_mask=mask,
    )  # fmt: skip
    return model, inputs


def unet(processor=None) -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8,
    ).eval()  # fmt: skip
    if processor is not None:
        model.set_attn_processor(processor)
    return model, dict(sample=torch.randn(1, 4, 8, 8), timestep=10, encoder_hidden_states=torch.randn(1, 7, 32))


def ip_adapter() -> tuple[torch.nn.Module, dict]:
    """Every cross attention has text keys and the keys of an image prompt."""
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    model, inputs = unet()
    for name, module in model.named_modules():
        if name.endswith("attn2"):
            module.set_processor(IPAdapterAttnProcessor2_0(module.inner_dim, module.cross_attention_dim, [4]))
    model.encoder_hid_proj = ImagePrompt()
    model.register_to_config(encoder_hid_dim_type="ip_image_proj")
    return model, inputs | dict(added_cond_kwargs={"image_embeds": [torch.randn(1, 4, 32)]})


class ImagePrompt(torch.nn.Module):
    """Returns the image prompt's keys unchanged."""

    def forward(self, embeds):
        return embeds


MODELS = {
    "Wan I2V": (wan, 2, 3),
    "IP-Adapter": (ip_adapter, 8, 12),
    "Mochi": (mochi, 3, 3),
    "AttnProcessor": (lambda: unet(diffusers.models.attention_processor.AttnProcessor()), 8, 8),
}


@pytest.mark.parametrize("name", MODELS)
def test_processors(name):
    """Several attention calls in one forward, one call per sample, and a softmax that diffusers computes itself."""
    make, layers, calls = MODELS[name]
    model, inputs = make()
    reference = run(model, **inputs)
    with intflash.patch(model, "fp32") as report:
        assert sqnr(reference, run(model, **inputs)) > 100
        assert len(report.ran) == len(report.replaced) == layers
    scales = intflash.calibrate(model, [inputs])
    assert len(scales.layers) == calls
    for chosen in (None, scales):
        with intflash.patch(model, scales=chosen):
            assert 30 < sqnr(reference, run(model, **inputs)) < 100
    assert torch.equal(run(model, **inputs), reference)


def test_a_call_without_keys():
    """Without an image the first call of each cross attention has no keys, and its result is 0 as in torch."""
    model, inputs = wan()
    inputs["encoder_hidden_states_image"] = None
    reference = run(model, **inputs)
    with intflash.patch(model, "fp32"):
        assert sqnr(reference, run(model, **inputs)) > 100
    with intflash.patch(model):
        assert 30 < sqnr(reference, run(model, **inputs)) < 100
    with pytest.raises(intflash.InputError, match="never reached blocks.0.attn2$"):
        intflash.calibrate(model, [inputs])


def test_pyramid_attention_broadcast():
    """Its hooks replace the forward of each layer in the instance, and skip it in some steps."""
    from diffusers.hooks import HookRegistry, PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast

    model, inputs = wan()
    apply_pyramid_attention_broadcast(
        model,
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500,
            spatial_attention_block_identifiers=("blocks",),
        ),
    )  # fmt: skip
    hooked = [m for m in model.modules() if hasattr(m, "_diffusers_hook")]
    assert hooked and all("forward" in vars(m) for m in hooked)

    def steps():
        for module in hooked:
            HookRegistry.check_if_exists_or_initialize(module).reset_stateful_hooks()
        return [run(model, **inputs) for _ in range(2)]

    reference = steps()
    with intflash.patch(model) as report:
        out = steps()
        assert len(report.ran) == len(report.replaced) == 2
    assert all(30 < sqnr(a, b) < 100 for a, b in zip(reference, out, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(reference, steps(), strict=True))
