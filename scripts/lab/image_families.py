"""Image families of diffusers with random weights, small enough for a test."""

from typing import Any

from diffusers import (
    AutoencoderDC,
    AutoencoderKLQwenImage,
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
from transformers import (
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen3Config,
    Qwen3Model,
)

from scripts.lab.family_parts import WORDS, byte_tokenizer, clip, t5, tokenizer, vae
from workers.patches import ImageTextProcessor


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


def qwen_image() -> Any:
    """Qwen-Image."""
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_qwen_vae(),
        text_encoder=_qwen_vl(),
        tokenizer=byte_tokenizer(),
        transformer=_qwen_transformer(),
    )


def qwen_image_edit() -> Any:
    """Qwen-Image-Edit, which scales its image to a million pixels."""
    return QwenImageEditPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_qwen_vae(width=2),
        text_encoder=_qwen_vl(),
        tokenizer=byte_tokenizer(),
        processor=_qwen_processor(),
        transformer=_qwen_transformer(),
    )


def _qwen_transformer() -> Any:
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


def _qwen_vl() -> Any:
    """The text encoder of Qwen-Image, 32 wide, with its eyes."""
    words = byte_tokenizer()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
        image_token_id=words.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=words.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=words.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=words.convert_tokens_to_ids("<|vision_end|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _qwen_processor() -> Any:
    """What shows the image to the text encoder of Qwen-Image-Edit, at few pixels."""
    images = Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
    return ImageTextProcessor(images, byte_tokenizer())


def _qwen_vae(width: int = 8) -> Any:
    """The autoencoder of Qwen-Image: 8 x 8 pixels to a latent of 16 channels.

    Editing takes a narrow one: a CPU needs four seconds for a million pixels with a width of 8.
    """
    return AutoencoderKLQwenImage(base_dim=width, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def sana() -> Any:
    """Sana."""
    return SanaPipeline(
        tokenizer=tokenizer(64),
        text_encoder=_gemma(),
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


def _gemma() -> Any:
    """The text encoder of Sana, 8 wide."""
    config = Gemma2Config(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=WORDS - 1,
        bos_token_id=WORDS - 2,
        eos_token_id=WORDS - 1,
    )
    return Gemma2Model(config).eval()


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


def z_image() -> Any:
    """Z-Image."""
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(16, shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=_qwen3(),
        tokenizer=byte_tokenizer(),
        transformer=z_image_transformer(),
    )


def z_image_transformer() -> Any:
    """The denoiser of Z-Image."""
    return ZImageTransformer2DModel(
        in_channels=16,
        dim=48,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[2048, 64, 64],
    )


def _qwen3() -> Any:
    """The text encoder of Z-Image, 16 wide."""
    config = Qwen3Config(
        vocab_size=len(byte_tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    return Qwen3Model(config).eval()
