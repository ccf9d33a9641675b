"""Weights of a tiny transformer in a GGUF file, as quantized models are handed around."""

from pathlib import Path

import diffusers
import gguf


def quantized_file(model: Path, file: Path) -> Path:
    """Write the transformer of a saved FLUX pipeline, its matrices in 8 bits."""
    writer = gguf.GGUFWriter(file, "flux")
    matrices = gguf.GGMLQuantizationType.Q8_0
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(model, subfolder="transformer")
    for name, weight in transformer.state_dict().items():
        plain = weight.numpy()
        if plain.ndim == 2 and plain.shape[1] % gguf.GGML_QUANT_SIZES[matrices][0] == 0:
            writer.add_tensor(name, gguf.quantize(plain, matrices), raw_dtype=matrices)
        else:
            writer.add_tensor(name, plain)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
