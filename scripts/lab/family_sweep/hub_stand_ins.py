"""What the tiny pipelines would fetch from the hub, made here."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from scripts.lab.family_parts import byte_tokenizer, tokenizer
from workers.patches import ImageTextProcessor

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


# The first words come before others in the smallest vocabulary, of eight.
WORDS = ("red", "blue", "cat", "fish", "a", "dog", "gold", "tall", "in", "the", "sea", "hat")
_MARKS = ("<pad>", "</s>", "<s>", "<unk>")
_EIGHT = 8
_CHAT = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %} {% endfor %}"
)
_QWEN_MARKS = {
    f"<|{mark}|>": 151644 + index
    for index, mark in enumerate(
        (
            *("im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"),
            *("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad"),
            *("image_pad", "video_pad"),
        )
    )
}
_QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


class NotMade(Exception):
    """Nothing here stands in for what a test would download."""


def words(most: int | None = None, marks: Mapping[str, int] | None = None) -> Any:
    """A tokenizer of short words, at most so many; longer ones are cut and mostly unknown."""
    listed = {word: index for index, word in enumerate([*_MARKS, *WORDS][:most])}
    known = {**listed, **(marks or {})}
    backend: Any = Tokenizer(WordLevel(known, unk_token="<unk>"))  # noqa: S106 - no secret
    backend.add_special_tokens(list(marks or {}))
    backend.pre_tokenizer = Split(Regex(r"\w{1,4}|[^\w\s]"), "removed", invert=True)
    backend.post_processor = TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 1)]
    )
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), _MARKS, strict=True)),
        padding_side="right",
        model_max_length=512,
    )
    made.chat_template = _CHAT
    return made


@contextmanager
def hub_stand_ins() -> Iterator[None]:
    """Answer every `from_pretrained` of transformers that names no folder."""
    library: Any = transformers
    bases = (
        library.PreTrainedTokenizerBase,
        library.PreTrainedModel,
        library.ProcessorMixin,
        library.AutoTokenizer,
        library.AutoConfig,
        library.AutoProcessor,
        library.image_processing_base.ImageProcessingMixin,
    )
    own = {base: base.__dict__["from_pretrained"] for base in bases}
    for base, method in own.items():
        base.from_pretrained = classmethod(_answer(method.__func__))
    try:
        yield
    finally:
        for base, method in own.items():
            base.from_pretrained = method


def _answer(own: Callable[..., Any]) -> Callable[..., Any]:
    def from_pretrained(kind: Any, name: Any, *args: Any, **options: Any) -> Any:
        if Path(str(name)).is_dir():
            return own(kind, name, *args, **options)
        return _made(kind.__name__, str(name), options)

    return from_pretrained


def _made(kind: str, name: str, options: dict[str, Any]) -> Any:
    if kind in ENCODERS:
        return ENCODERS[kind]().eval()
    if kind in _OTHERS:
        return _OTHERS[kind]()
    if "Qwen" in name:
        return _qwen(kind, name)
    if "Tokenizer" in kind or name.endswith("only-processor"):
        made = words(_EIGHT if name.endswith("dummy-gemma") else None)
        made.model_max_length = options.get("model_max_length", made.model_max_length)
        return made
    raise NotMade(f"{kind} {name}")


def _qwen(kind: str, name: str) -> Any:
    if kind.endswith(("Tokenizer", "TokenizerFast")):
        return byte_tokenizer()
    if kind.endswith("Processor"):
        images = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
        return ImageTextProcessor(images, _qwen_words())
    raise NotMade(f"{kind} {name}")


def _qwen_words() -> Any:
    """Words, and marks with the numbers that Qwen's own configurations have for them."""
    made = words(marks=_QWEN_MARKS)
    made.chat_template = _QWEN_CHAT
    return made


def _chat_glm() -> Any:
    import sentencepiece
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

    folder = tempfile.mkdtemp()  # it is read again when the tokenizer is saved
    text = Path(folder) / "text"
    text.write_text("\n".join([" ".join(WORDS)] * 9))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=f"{folder}/words", vocab_size=40, hard_vocab_limit=False
    )
    return ChatGLMTokenizer(f"{folder}/words.model")


_OTHERS: dict[str, Callable[[], Any]] = {
    "AutoConfig": lambda: transformers.T5Config(**T5),
    "CLIPTokenizer": lambda: tokenizer(77),
    "ChatGLMTokenizer": _chat_glm,
    "SiglipImageProcessorPil": lambda: transformers.SiglipImageProcessor(
        size={"height": 30, "width": 30}
    ),
}
