"""The processor of Qwen-Image-Edit's text encoder, for images and text alone.

That of transformers also holds one for videos, which nothing here uses and which needs torchvision;
without this, editing models could not be loaded where torchvision is missing. Knows no pipeline.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

from transformers import Qwen2VLProcessor

_REPLACED = ("transformers", "Qwen2VLProcessor")


class ImageTextProcessor(Qwen2VLProcessor):
    """The same, without videos; transformers reads from the signature what it is made of."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: Any = None,
        **options: Any,
    ) -> None:
        """Take the parts that :meth:`from_pretrained` loads."""
        self.image_token = "<|image_pad|>"  # noqa: S105 - a token of text
        self.video_token = "<|video_pad|>"  # noqa: S105
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        # Past the parent, which would ask for the part for videos.
        super(Qwen2VLProcessor, self).__init__(
            image_processor, tokenizer, chat_template=chat_template, **options
        )


def replaced_parts(index: Mapping[str, Any], model: str, **options: Any) -> dict[str, Any]:
    """Return the parts of a pipeline to load in place of those its `index` names.

    Empty where torchvision is there, and for pipelines without such a processor. `options` are
    those of `from_pretrained`.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return {}
    return {
        name: ImageTextProcessor.from_pretrained(model, subfolder=name, **options)
        for name, kind in index.items()
        if isinstance(kind, (list, tuple)) and tuple(kind) == _REPLACED
    }
