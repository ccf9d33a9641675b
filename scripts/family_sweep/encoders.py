"""Small text and image encoders of random weights, by the names of their classes."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

T5 = {"vocab_size": 1103, "d_model": 32, "d_ff": 37, "d_kv": 8, "num_layers": 2, "num_heads": 4}


def _chat_glm_model() -> Any:
    from diffusers.pipelines.kolors import ChatGLMModel
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig

    made: Any = ChatGLMModel(
        ChatGLMConfig(
            num_layers=2,
            padded_vocab_size=200,
            hidden_size=8,
            ffn_hidden_size=16,
            kv_channels=4,
            num_attention_heads=2,
            multi_query_attention=True,
            add_qkv_bias=True,
            original_rope=True,
        )
    )
    for weight in made.parameters():  # it leaves them as the memory was
        torch.nn.init.normal_(weight, std=0.02)
    return made


def _small(config: str, model: str, **options: Any) -> Callable[[], Any]:
    sizes = {
        "vocab_size": 1103,
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    library: Any = transformers
    return lambda: getattr(library, model)(getattr(library, config)(**{**sizes, **options}))


def _gemma3() -> Any:
    text = {
        "vocab_size": 1103,
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    return transformers.Gemma3ForConditionalGeneration(config)


def _qwen_vl(version: str) -> Callable[[], Any]:
    text = {
        "vocab_size": 152064,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {
            "mrope_section": [1, 1, 2],
            "rope_type": "default",
            "rope_theta": 1000000.0,
        },
    }
    vision: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 14}
    if version == "2":
        vision |= {"embed_dim": 32, "hidden_size": 16}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 16}
        vision |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [0]}
    library: Any = transformers

    def make() -> Any:
        config = getattr(library, f"Qwen{version}VLConfig")(text_config=text, vision_config=vision)
        return getattr(library, f"Qwen{version}VLForConditionalGeneration")(config)

    return make


ENCODERS: dict[str, Callable[[], Any]] = {
    "T5EncoderModel": lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)),
    "UMT5EncoderModel": lambda: transformers.UMT5EncoderModel(transformers.UMT5Config(**T5)),
    "BertModel": _small("BertConfig", "BertModel"),
    "LlamaForCausalLM": _small(
        "LlamaConfig", "LlamaForCausalLM", hidden_size=16, num_key_value_heads=4
    ),
    "SiglipVisionModel": _small("SiglipVisionConfig", "SiglipVisionModel", image_size=30),
    "Gemma3ForConditionalGeneration": _gemma3,
    "ChatGLMModel": _chat_glm_model,
    "Qwen2VLForConditionalGeneration": _qwen_vl("2"),
    "Qwen3VLForConditionalGeneration": _qwen_vl("3"),
}
