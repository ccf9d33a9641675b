"""Numbers that are none: NaN and infinity where latents and pixels should be. Knows no pipeline."""

from typing import Any

import torch

from configs.errors import NonFiniteOutput


def refuse_non_finite(sample: torch.Tensor, maker: str) -> None:
    """Raise NonFiniteOutput unless all of `sample`, which `maker` gave, are numbers."""
    if not bool(torch.isfinite(sample).all()):
        raise NonFiniteOutput(
            f"{maker} gave NaN or infinity;"
            " another dtype (bfloat16 or float32), size or guidance may help"
        )


def watch_decoder(vae: Any) -> None:
    """Have an autoencoder refuse what its decoder makes of numbers too large for its type.

    Here and not in the pixels: on their way to those infinity is clamped to white or black.
    """
    decoder = getattr(vae, "decoder", None)
    if isinstance(decoder, torch.nn.Module):
        decoder.register_forward_hook(_look)


def _look(_module: Any, _arguments: Any, output: Any) -> None:
    sample = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
    if torch.is_tensor(sample):
        refuse_non_finite(sample, "the autoencoder")
