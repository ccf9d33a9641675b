"""Which arguments of diffusers' denoisers merge in which way, by name.

A name that stands nowhere here is not merged, and neither is a call that has it.
"""

# The sample being denoised says how many rows a call has: the first dimension of a tensor, or the
# length of a list with one tensor for each sample (Z-Image).
SAMPLES = ("sample", "hidden_states", "x")


BY_ROW = frozenset(
    (
        *SAMPLES,
        *("encoder_hidden_states", "encoder_hidden_states_2", "encoder_hidden_states_t5"),
        *("encoder_hidden_states_image", "encoder_hidden_states_mask", "encoder_mask"),
        *("encoder_attention_mask", "encoder_attention_mask_2", "attention_mask"),
        *("pooled_projections", "text_embeds", "image_embeds", "cap_feats", "class_labels"),
        *("text_embedding_mask", "text_embedding_mask_t5", "image_meta_size", "style"),
        *("time_ids", "timestep_cond", "resolution", "aspect_ratio"),
        *("original_size", "target_size", "crop_coords", "pooled_embeds"),
        *("prior_token_id", "prior_token_drop", "video_coords", "condition_mask"),
        *("inpaint_latents", "control_latents", "text_bth", "text_lens"),
        *("audio_hidden_states", "audio_encoder_hidden_states", "audio_coords"),
        *("audio_encoder_attention_mask", "perturbation_mask"),
        *("latents_clean", "latents_history_2x", "latents_history_4x"),
        *("latents_history_short", "latents_history_mid", "latents_history_long"),
    )
)


# Of a sample that is a video one for each of its frames, those of a sample together: AnimateDiff.
BY_FRAME = frozenset(("encoder_hidden_states",))


# With the samples in the second dimension, after the layers of a text encoder: HiDream.
BY_SECOND = frozenset(("encoder_hidden_states_llama3",))


# Lists of tensors, one for each layer of a text encoder, that have a row for each sample.
LAYERS = frozenset(("text_encoder_layers",))


# One number for all rows or one for each.
TIMES = frozenset(
    (
        *("timestep", "timesteps", "t", "timestep_r", "guidance"),
        *("audio_timestep", "sigma", "audio_sigma"),
    )
)


# Masks, each with its text. In a call that names its mask a text may be made longer.
TEXT_MASKS = {
    "encoder_hidden_states_mask": "encoder_hidden_states",
    "encoder_attention_mask": "encoder_hidden_states",
    "encoder_attention_mask_2": "encoder_hidden_states_2",
    "audio_encoder_attention_mask": "audio_encoder_hidden_states",
}


# Positions and the like: the same for every row, so they must be equal.
SHARED = frozenset(
    (
        *("img_ids", "txt_ids", "image_rotary_emb", "rope_interpolation_scale", "position_ids"),
        *("visual_rope_pos", "text_rope_pos", "scale_factor", "padding_mask", "ofs"),
        *("indices_latents", "indices_latents_clean", "indices_hidden_states"),
        *("indices_latents_history_2x", "indices_latents_history_4x"),
        *("indices_latents_history_short", "indices_latents_history_mid"),
        *("indices_latents_history_long", "spatio_temporal_guidance_blocks", "skip_layers"),
    )
)


# Of them those that may have a row for each sample, all equal (Flux 2); others are whole.
POSITION_ROWS = frozenset(("img_ids", "txt_ids"))


# Lists with one entry for each row, all equal.
ALIKE = frozenset(("img_shapes", "fps"))


DICTS = frozenset(
    ("added_cond_kwargs", "attention_kwargs", "cross_attention_kwargs", "joint_attention_kwargs")
)


# Numbers that mean the same for any number of rows.
_SIZES = ("patch_size", "f_patch_size", "num_frames", "height", "width", "fps", "frame_rate")


_SCALES = ("scale", "rope_interpolation_scale", "scale_factor", "base_sequence_length")


_LAYERS = ("spatio_temporal_guidance_blocks", "skip_layers")


NUMBERS = TIMES | {*_SIZES, *_SCALES, *_LAYERS, "audio_num_frames"}
