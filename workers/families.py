"""What is peculiar to a family of diffusers, in tables; all other code reads their fields.

A family is told by the class of its pipeline, a denoiser by its own class (several families may
share one), and some manners by the name of an argument, whichever family has it.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from configs.parameters import Parameters

# Of a video, where nothing says what the model was trained for.
DEFAULT_FPS = 16.0


@dataclass(frozen=True, slots=True)
class Family:
    """Pipelines whose classes begin alike; each field is what most families do by default.

    Attributes:
        start: How the names of the classes begin.
        told_by: Entry of the pipeline's configuration that must be set, for weights that differ
            from others of the same class.
        one_generator: Its pipelines draw by torch itself, which takes no list of generators.
        needs_negative_prompt: A call with guidance fails without one, be it empty.
        one_image_for_all: A call takes one image for all of its outputs, and encodes it without
            noise once for each seed; so requests from an image are not started together.
        max_images: Input images of one request; no attribute of diffusers says how many.
        prompt_tokens: Tokens of a prompt, where the code of the pipeline alone says so.
        most_sequence: The most that `check_inputs` lets `max_sequence_length` be; other families
            are held to the default of their call.
        weighs_prompt: `encode_prompt` returns one row for each token of `tokenizer`, first for the
            prompt and then for the negative one.
        counts_chat_template: Writes the prompt into a chat and cuts that, so what stands before
            the prompt counts; others allow for what they add.
        patches_per_token: Patches along a side of the picture that the pipeline checks for beyond
            what its parts say.
        size_in_pixels: `default_sample_size` in the configuration counts pixels, not latents.
        frames: Frames of a video, where the code of the pipeline alone says so.
        fps: Frames in a second where the call has no argument for them: those of the examples in
            diffusers' documentation of the family.
        image_to_video: Class that makes videos from an image with the same weights, where diffusers
            does not list it.
        last_image_key: Entry of the denoiser's configuration that is set where the weights need a
            first and a last image; requests have a field for the first alone.
        decodes_in_tiles: The autoencoder can do nothing without tiles.
        as_large_as_image: Edits an image in its own size, and takes no other.
    """

    start: str
    told_by: str | None = None
    one_generator: bool = False
    needs_negative_prompt: bool = False
    one_image_for_all: bool = False
    max_images: int = 1
    prompt_tokens: int | None = None
    most_sequence: int | None = None
    weighs_prompt: bool = False
    counts_chat_template: bool = False
    patches_per_token: int = 1
    size_in_pixels: bool = False
    frames: int | None = None
    fps: float = DEFAULT_FPS
    image_to_video: str | None = None
    last_image_key: str | None = None
    decodes_in_tiles: bool = False
    as_large_as_image: bool = False


# pipeline_wan_i2v.py: `image` of one picture is repeated for the batch; `pos_embed_seq_len` is that
# of Wan 2.1 FLF2V.
_WAN = Family("Wan", one_image_for_all=True, last_image_key="pos_embed_seq_len")


# Of several that fit the longest start counts, and of equal ones that with `told_by`.
FAMILIES = (
    # autoencoder_kl_allegro.py: `_encode` and `_decode` without tiling are not implemented.
    Family("Allegro", fps=15.0, decodes_in_tiles=True),
    Family("AnimateDiff", fps=8.0),
    Family("CogVideoX", fps=8.0),
    # pipeline_easyanimate.py: `encode_prompt` goes through the negative prompts, None raises.
    Family("EasyAnimate", fps=8.0, needs_negative_prompt=True),
    # pipeline_flux.py: "`max_sequence_length` cannot be greater than 512".
    Family("Flux", most_sequence=512),
    Family("Flux2Pipeline", max_images=10),
    Family("Flux2Klein", counts_chat_template=True),
    Family("Flux2KleinPipeline", counts_chat_template=True, max_images=4),
    # pipeline_glm_image.py: `check_inputs` wants multiples of the autoencoder's and two patches.
    Family("GlmImagePipeline", patches_per_token=2),
    # pipeline_helios.py: `torch.rand(..., generator=generator)`.
    Family("Helios", fps=24.0, one_generator=True),
    Family("HunyuanVideo", fps=15.0),
    Family("HunyuanVideo15", fps=24.0),
    # pipeline_if.py: `max_length = 77` in `encode_prompt`.
    Family("IF", prompt_tokens=77),
    # pipeline_kandinsky3.py: `max_length = 128`.
    Family("Kandinsky3", prompt_tokens=128),
    Family("Kandinsky5", fps=24.0),
    # pipeline_latte.py: `max_length = 120`.
    Family("Latte", fps=8.0, prompt_tokens=120),
    # pipeline_ltx2.py: where the model has no part that tells how long the video is to be.
    Family("LTX2", frames=121),
    Family("Mochi", fps=30.0),
    Family("MotifVideo", fps=24.0),
    # pipeline_prx.py registers it, for its bins of resolutions.
    Family("PRX", size_in_pixels=True),
    # pipeline_qwenimage.py: `max_sequence_length` 1024 at most.
    Family("QwenImage", most_sequence=1024),
    # The model card says one to three.
    Family("QwenImageEditPlusPipeline", max_images=3, most_sequence=1024),
    Family("SkyReels", fps=24.0),
    # CLIP's tokens are the rows of what `encode_prompt` returns.
    Family("StableDiffusion", weighs_prompt=True),
    # pipeline_stable_diffusion_3.py: "`max_sequence_length` cannot be greater than 512".
    Family("StableDiffusion3", most_sequence=512),
    # pipeline_stable_diffusion_instruct_pix2pix.py: `height, width = image_latents.shape[-2:]`.
    Family("StableDiffusionInstructPix2Pix", as_large_as_image=True),
    _WAN,
    # Wan 2.2 5B: these weights alone were trained for both tasks, and at 24 frames in a second.
    replace(_WAN, told_by="expand_timesteps", fps=24.0, image_to_video="WanImageToVideoPipeline"),
    Family("ZImage", counts_chat_template=True),
)


def family_of(pipe: Any) -> Family:
    """Return the family of a pipeline, or of a class of pipelines; one of no manners if unknown."""
    if isinstance(pipe, type):
        name, config = pipe.__name__, dict[str, Any]()
    else:
        name, config = type(pipe).__name__, getattr(pipe, "config", {})
    return next(each for each in _fitting(name) if not each.told_by or config.get(each.told_by))


@functools.cache
def _fitting(name: str) -> tuple[Family, ...]:
    """All that a class of that name may be of, the most particular first."""
    found = [each for each in FAMILIES if name.startswith(each.start)]
    found.sort(key=lambda each: (len(each.start), each.told_by is not None), reverse=True)
    return (*found, Family(""))


@dataclass(frozen=True, slots=True)
class DenoiserManners:
    """What is peculiar to a class of denoisers.

    Attributes:
        one_row_calls: Pipelines call it for one sample at a time: without guidance by a batch, or
            once with the prompt and once without. Copies of it would have work for merged requests
            alone.
        plain_guidance: Its argument `guidance` is the scale as it is; that of others is a multiple
            of it (HunyuanVideo 1000, Sana Sprint 0.1).
        divides_sequence: Whether diffusers' plan for sharing its sequence works.
    """

    one_row_calls: bool = False
    plain_guidance: bool = False
    divides_sequence: bool = True


# By the class alone, since that of the next generation (Flux 3) need not be like it.
DENOISER_MANNERS = {
    "ChronoEditTransformer3DModel": DenoiserManners(one_row_calls=True),
    "Flux2Transformer2DModel": DenoiserManners(one_row_calls=True, plain_guidance=True),
    "FluxTransformer2DModel": DenoiserManners(one_row_calls=True, plain_guidance=True),
    "HeliosTransformer3DModel": DenoiserManners(one_row_calls=True),
    # Their attention masks have an entry for each head, which no rank cuts (diffusers 0.42.1).
    "LTX2VideoTransformer3DModel": DenoiserManners(divides_sequence=False),
    "LTXVideoTransformer3DModel": DenoiserManners(divides_sequence=False),
    "QwenImageTransformer2DModel": DenoiserManners(one_row_calls=True, plain_guidance=True),
    "WanTransformer3DModel": DenoiserManners(one_row_calls=True),
}


_USUAL_MANNERS = DenoiserManners()


def manners_of(denoiser: Any) -> DenoiserManners:
    """Return what is peculiar to the class of a denoiser."""
    return DENOISER_MANNERS.get(type(denoiser).__name__, _USUAL_MANNERS)


# Autoencoders that their makers run in float32, by class; several families share Wan's.
# https://huggingface.co/docs/diffusers/main/en/api/pipelines/wan: the VAE in float32 for better
# decoding quality.
FLOAT32_AUTOENCODERS = frozenset({"AutoencoderKLWan"})


@dataclass(frozen=True, slots=True)
class GivenArgument:
    """An argument that pipelines get a value for which their clients do not give.

    Attributes:
        name: Of the argument; pipelines without it get none.
        value: Makes the value.
        needed: Tells whether a call with these parameters needs it; else it has its default.
    """

    name: str
    value: Callable[[Parameters], Any]
    needed: Callable[[Parameters], bool] = lambda _: True


GIVEN_ARGUMENTS = (
    # Sana Sprint has a timestep of its own between two steps, and refuses it for other numbers.
    GivenArgument(
        "intermediate_timesteps", lambda _: None, lambda asked: asked.num_inference_steps != 2
    ),
    # FLUX Kontext scales every size to this many pixels.
    GivenArgument("max_area", lambda asked: asked.width * asked.height),
    # PixArt would lower and strip the prompt where beautifulsoup happens to be installed.
    GivenArgument("clean_caption", lambda _: False),
)


def given_arguments(parameters: Parameters, taken: Collection[str]) -> dict[str, Any]:
    """Return those of a call that takes the arguments `taken`."""
    return {
        each.name: each.value(parameters)
        for each in GIVEN_ARGUMENTS
        if each.name in taken and each.needed(parameters)
    }


# What families have different names for. Of the first two the model sees the number of frames, and
# those in a second where it has a name for them.
FRAME_COUNTS = ("num_frames", "video_length", "frames")


FRAME_RATES = ("frame_rate", "fps")


OUTPUT_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")


# Attributes of a pipeline: pixels for one latent, and frames for one.
SPATIAL_SCALES = (
    "vae_scale_factor",
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
)


TEMPORAL_SCALES = (
    "vae_scale_factor_temporal",
    "vae_temporal_compression_ratio",
    "vae_temporal_scale_factor",
)


# Fields of a pipeline's output: Kandinsky 5 and Cosmos 3 alone have the second of each.
IMAGE_FIELDS = ("images", "image")


VIDEO_FIELDS = ("frames", "video")


# The video itself, where all others have a list of one (Cosmos 3).
SINGLE_VIDEO_FIELD = "video"
