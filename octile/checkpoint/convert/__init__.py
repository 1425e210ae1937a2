"""Convert any Hugging Face checkpoint to FP8, or back to BF16 or FP32."""

from octile.checkpoint.convert.folder import ConversionReport, convert_checkpoint

__all__ = ["ConversionReport", "convert_checkpoint"]
