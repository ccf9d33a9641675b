"""Image pipelines of several diffusers families with random weights, small enough for a test."""

from typing import Any

from diffusers import (
    AutoencoderDC,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)

from scripts.family_parts import (
    byte_tokenizer,
    clip,
    gemma,
    qwen3,
    qwen_processor,
    qwen_vae,
    qwen_vl,
    t5,
    tokenizer,
    vae,
)


def _unet(**options: Any) -> Any:
    return UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
        **options,
    )


def stable_diffusion() -> Any:
    """Stable Diffusion 1.5."""
    return StableDiffusionPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        unet=_unet(cross_attention_dim=32),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl() -> Any:
    """Stable Diffusion XL."""
    return StableDiffusionXLPipeline(
        vae=vae(force_upcast=True),
        text_encoder=clip(),
        text_encoder_2=clip(projection=True),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        unet=_unet(
            cross_attention_dim=64,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=80,
        ),
        scheduler=EulerDiscreteScheduler(steps_offset=1),
        add_watermarker=False,
    )


def stable_diffusion_3() -> Any:
    """Stable Diffusion 3."""
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=16,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            out_channels=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(16, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=clip(projection=True),
        tokenizer=tokenizer(),
        text_encoder_2=clip(projection=True),
        tokenizer_2=tokenizer(),
        text_encoder_3=t5(64),
        tokenizer_3=tokenizer(64),
    )


def flux() -> Any:
    """FLUX.1."""
    return FluxPipeline(transformer=_flux_transformer(), **_flux_parts())


def flux_kontext() -> Any:
    """FLUX.1 Kontext, which scales its images to a million pixels."""
    return FluxKontextPipeline(transformer=_flux_transformer(), **_flux_parts())


def _flux_transformer() -> Any:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )


def _flux_parts() -> dict[str, Any]:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "vae": vae(shift_factor=0.06, scaling_factor=1.5),
        "text_encoder": clip(),
        "tokenizer": tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": tokenizer(64),
    }


def pixart() -> Any:
    """PixArt-alpha."""
    return PixArtAlphaPipeline(
        tokenizer=tokenizer(64),
        text_encoder=t5(),
        vae=vae(),
        transformer=PixArtTransformer2DModel(
            sample_size=32,  # the pipeline knows 32, 64, 128 and 256 only
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
        ),
        scheduler=DPMSolverMultistepScheduler(),
    )


def sana() -> Any:
    """Sana."""
    return SanaPipeline(
        tokenizer=tokenizer(64),
        text_encoder=gemma(),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_out_channels=(8,) * 6,
            decoder_block_out_channels=(8,) * 6,
            encoder_qkv_multiscales=((), (), (), (), (), (5,)),
            decoder_qkv_multiscales=((), (), (), (), (), (5,)),
            encoder_layers_per_block=(1,) * 6,
            decoder_layers_per_block=(1,) * 6,
            downsample_block_type="conv",
            upsample_block_type="interpolate",
        ),
        transformer=SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=8,
            sample_size=16,  # trained at 512 x 512, says this to the pipeline
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def qwen_image() -> Any:
    """Qwen-Image."""
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=qwen_vae(),
        text_encoder=qwen_vl(),
        tokenizer=byte_tokenizer(),
        transformer=qwen_transformer(),
    )


def qwen_image_edit() -> Any:
    """Qwen-Image-Edit, which scales its image to a million pixels."""
    return QwenImageEditPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=qwen_vae(),
        text_encoder=qwen_vl(),
        tokenizer=byte_tokenizer(),
        processor=qwen_processor(),
        transformer=qwen_transformer(),
    )


def qwen_transformer() -> Any:
    """The denoiser of Qwen-Image."""
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    )


def z_image() -> Any:
    """Z-Image."""
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(16, shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=qwen3(),
        tokenizer=byte_tokenizer(),
        transformer=ZImageTransformer2DModel(
            in_channels=16,
            dim=48,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=3,
            n_kv_heads=3,
            cap_feat_dim=16,
            axes_dims=[4, 6, 6],
            axes_lens=[2048, 64, 64],
        ),
    )
