"""Image generation by a Stable Diffusion pipeline of diffusers with integer attention in its UNet."""

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

import intflash


def tiny_pipeline() -> StableDiffusionPipeline:
    """Random weights; yours is StableDiffusionPipeline.from_pretrained(...)."""
    unet = UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
    )  # fmt: skip
    vae = AutoencoderKL(block_out_channels=(16,), norm_num_groups=8, layers_per_block=1)
    scheduler = DDIMScheduler(clip_sample=False, steps_offset=1)
    pipe = StableDiffusionPipeline(
        vae=vae, text_encoder=None, tokenizer=None, unet=unet, scheduler=scheduler, safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main() -> None:
    torch.manual_seed(0)
    pipe = tiny_pipeline()
    pipe.unet.eval()
    config = CLIPTextConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        bos_token_id=98, eos_token_id=99,
    )  # fmt: skip
    text = CLIPTextModel(config).eval()
    with torch.no_grad():  # yours: pipe("a lighthouse in fog")
        prompt, empty = (text(torch.randint(0, 99, (1, 16))).last_hidden_state for _ in range(2))

    def generate() -> torch.Tensor:
        return pipe(
            prompt_embeds=prompt, negative_prompt_embeds=empty, num_inference_steps=4, height=8, width=8,
            output_type="pt", generator=torch.Generator().manual_seed(1),
        ).images  # fmt: skip

    reference = generate()
    with intflash.patch(pipe.unet, "intflash") as report:
        image = generate()
    print(report)
    sqnr = 20 * torch.log10(reference.norm() / (image - reference).norm())
    print(f"image {list(image.shape)}: {sqnr:.1f} dB from the one by float attention")


if __name__ == "__main__":
    main()
