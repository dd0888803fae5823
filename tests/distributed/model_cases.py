"""Models under context parallelism beside themselves in one process; each function runs on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import intflash
from distributed.faults import refused
from documents import allow_torchvision
from intflash.digits import load_model
from intflash.distributed import context_parallel, unshard

allow_torchvision()

from diffusers import FluxTransformer2DModel, UNet2DConditionModel, WanTransformer3DModel  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

RECIPE = intflash.Recipe(q="head", k="head", v="head")


def _same(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference over the largest value: layers around attention are float products of fewer rows."""
    return float((x - y).abs().max() / y.abs().max())


def llama(**changes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, **changes)).eval()


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    return BertModel(BertConfig(**sizes)).eval()


def wan(**changes: Any) -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(0)
    sizes = dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32, freq_dim=16)
    model = WanTransformer3DModel(**sizes, ffn_dim=32, num_layers=2, **changes).eval()
    inputs = dict(
        hidden_states=torch.randn(1, 4, 3, 8, 8), timestep=torch.tensor([1.0]),
        encoder_hidden_states=torch.randn(1, 512, 32),
    )  # fmt: skip
    if changes:
        inputs["encoder_hidden_states_image"] = torch.randn(1, 257, 24)
    return model, inputs


def flux() -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ).eval()  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(1, 24, 4), encoder_hidden_states=torch.randn(1, 12, 32),
        pooled_projections=torch.randn(1, 32), timestep=torch.tensor([1.0]), img_ids=torch.randn(24, 3),
        txt_ids=torch.zeros(12, 3),
    )  # fmt: skip
    return model, inputs


@torch.no_grad()
def transformers_models(rank: int) -> dict[str, float]:
    """Differences from one process."""
    found = {}
    ids, mask = torch.randint(0, 64, (2, 37)), torch.ones(2, 37, dtype=torch.long)
    mask[1, 30:] = 0
    for name, model in (("llama", llama()), ("bert", bert())):
        for masked in (False, True):
            inputs = {"input_ids": ids, **({"attention_mask": mask} if masked else {})}
            with intflash.patch(model, "intflash" if name == "llama" else None, recipe=RECIPE):
                want = model(**inputs, use_cache=False)[0]
                with context_parallel(model) as parallel:
                    assert parallel.layout == ("zigzag" if name == "llama" else "contiguous")
                    out = model(**inputs)
                    found[f"{name}, masked {masked}"] = _same(out[0][mask > 0], want[mask > 0])
                    if name == "bert":
                        first = model.pooler(want)
                        found[f"bert pooled, {masked}"] = _same(out.pooler_output, first)
                assert torch.equal(model(**inputs, use_cache=False)[0], want)  # undone
    model = llama()
    with intflash.patch(model, "intflash_p8", recipe=RECIPE):
        want = model(ids, use_cache=False)[0]
        with context_parallel(model, layout="contiguous", gather=False):
            found["llama, not gathered"] = _same(unshard(model(ids)[0], 1, length=37), want)
    return found


@torch.no_grad()
def diffusers_models(rank: int) -> dict[str, float]:
    found = {}
    models = {"wan": wan(), "wan image": wan(image_dim=24, added_kv_proj_dim=32), "flux": flux()}
    world = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("gather", "ulysses"))
        if world > 2 and world % 2 == 0
        else None
    )
    for name, (model, inputs) in models.items():
        with intflash.patch(model):
            want = model(**inputs, return_dict=False)[0]
            for group in (None, mesh):
                if name == "flux" and group is not None:
                    continue
                with context_parallel(model, group):
                    out = model(**inputs, return_dict=False)[0]
                found[f"{name} {'grid' if group else ''}"] = _same(out, want)
            assert torch.equal(model(**inputs, return_dict=False)[0], want)
    return found


def refusals(rank: int) -> dict[str, str]:
    """What context_parallel refuses."""
    found = {"no model": refused(context_parallel, "llama"), "not patched": refused(context_parallel, llama())}
    small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    window = MistralConfig(**small, num_key_value_heads=2, sliding_window=8, vocab_size=64)
    t5 = T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    models = {
        "default causal": (llama(), None),
        "window": (MistralModel(window), RECIPE),
        "vit": (ViTModel(ViTConfig(**small, image_size=16, patch_size=8)), RECIPE),
        "t5": (T5EncoderModel(t5), RECIPE),
        "unet": (
            UNet2DConditionModel(
                sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32,),
                down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
                cross_attention_dim=32, attention_head_dim=8,
            ), None,
        ),
    }  # fmt: skip
    for name, (model, recipe) in models.items():
        with intflash.patch(model.eval(), None if recipe is None else "intflash", recipe=recipe):
            found[name] = refused(context_parallel, model)
    with intflash.patch(digits := load_model("vit")):
        found["library"] = refused(context_parallel, digits)
    model, ids = llama(), torch.zeros(1, 8, dtype=torch.long)
    with intflash.patch(model, "intflash", recipe=RECIPE):
        cache = model(ids, use_cache=True)
        cache = cache.get("past_key_values", cache.get("cache"))
        name = "cache" if "cache" in model.model.forward.__wrapped__.__code__.co_varnames else "past_key_values"
        found["layout"] = refused(context_parallel, model, layout="striped")
        with context_parallel(model) as parallel:
            found["twice"] = refused(context_parallel, model)
            found["mask"] = refused(model, ids, attention_mask=torch.ones(1, 1, 8, 8))
            found["attentions"] = refused(model, ids, output_attentions=True)
            found["cache"] = refused(model, ids, **{name: cache})
            intflash.unpatch(model)
            found["unpatched"] = refused(model, ids)
            parallel.remove()
        assert torch.isfinite(model(ids)[0]).all()
    return found


def all_models(rank: int) -> tuple[dict, dict, dict]:
    return transformers_models(rank), diffusers_models(rank), refusals(rank)
