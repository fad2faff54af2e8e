"""Exports networks of the architectures that people use, with random weights, for `benchmarks/real.py`.

    python -m venv torch && torch/bin/pip install torch==2.13.0 onnxscript timm transformers
    torch/bin/python benchmarks/architectures.py OUT
    python benchmarks/real.py OUT --results results --minutes 0.25 > table.md

Vision models are those of timm at 160 pixels or at their own size, language and speech models those of transformers
with few layers. Times and structure matter, accuracy of random weights does not. A model that cannot be exported is
named on standard error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import timm
import torch
import transformers

WIDTH, LAYERS, HEADS, TOKENS, VOCABULARY = 256, 4, 4, 64, 5000

VISION = {
    "resnet18": 160, "resnet50": 160, "repvgg_a0": 160, "regnety_002": 160, "densenet121": 160, "hrnet_w18_small": 160,
    "mobilenetv3_small_100": 160, "efficientnet_b0": 160, "efficientnet_lite0": 160, "ghostnet_100": 160,
    "convnext_atto": 160, "poolformer_s12": 224, "mobilevit_xxs": 256, "levit_128s": 224, "vit_tiny_patch16_224": 224,
    "swin_tiny_patch4_window7_224": 224,
}  # fmt: skip

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}

# the output, the model and configuration of transformers, and sizes
LANGUAGE: Mapping[str, tuple[str, str, str, Mapping[str, object]]] = {
    "bert": ("last_hidden_state", "BertModel", "BertConfig", _SIZES),
    "roberta": (
        "last_hidden_state", "RobertaModel", "RobertaConfig", {**_SIZES, "max_position_embeddings": TOKENS + 2}
    ),
    "albert": ("last_hidden_state", "AlbertModel", "AlbertConfig", {**_SIZES, "embedding_size": 128}),
    "distilbert": (
        "last_hidden_state", "DistilBertModel", "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 4 * WIDTH},
    ),
    "gpt2": (
        "logits", "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS},
    ),
    "llama": ("logits", "LlamaForCausalLM", "LlamaConfig", {**_SIZES, "num_key_value_heads": HEADS // 2}),
    "t5": (
        "logits", "T5ForConditionalGeneration", "T5Config",
        {
            "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH,
            "num_layers": LAYERS, "num_heads": HEADS,
        },
    ),
}  # fmt: skip

# the same, and the shape of the input
SIGNAL: Mapping[str, tuple[str, str, str, Mapping[str, object], tuple[int, ...]]] = {
    "wav2vec2": (
        "last_hidden_state", "Wav2Vec2Model", "Wav2Vec2Config", {**_SIZES, "conv_dim": (128,) * 7}, (1, 8000)
    ),
    "segformer": (
        "logits", "SegformerForSemanticSegmentation", "SegformerConfig", {"num_labels": 19}, (1, 3, 128, 128)
    ),
    "yolos": (
        "pred_boxes", "YolosForObjectDetection", "YolosConfig", {**_SIZES, "image_size": [224, 224]}, (1, 3, 224, 224)
    ),
    "dinov2": (
        "last_hidden_state", "Dinov2Model", "Dinov2Config", {**_SIZES, "image_size": 224}, (1, 3, 224, 224)
    ),
}  # fmt: skip


class Language(torch.nn.Module):
    """One output of a model that reads tokens and a mask; a decoder behind an encoder reads the same tokens."""

    def __init__(self, model: torch.nn.Module, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        more = {"decoder_input_ids": input_ids} if self.model.config.is_encoder_decoder else {}
        if self.output == "logits":
            more["use_cache"] = False
        return getattr(self.model(input_ids=input_ids, attention_mask=attention_mask, **more), self.output)


class Signal(torch.nn.Module):
    """One output of a model of images or sound."""

    def __init__(self, model: torch.nn.Module, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self.model(x), self.output)


def main(folder: Path) -> None:
    """Export every model into ``folder``; those that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")
    for name, side in VISION.items():
        export(folder / f"{name}.onnx", partial(timm.create_model, name), torch.randn(1, 3, side, side))
    tokens = torch.randint(0, 1000, (1, TOKENS))
    for name, (output, *made_of) in LANGUAGE.items():
        make = partial(with_output, Language, output, *made_of)
        export(folder / f"{name}.onnx", make, tokens, torch.ones_like(tokens))
    for name, (output, *made_of, shape) in SIGNAL.items():
        export(folder / f"{name}.onnx", partial(with_output, Signal, output, *made_of), torch.randn(shape))


def with_output(
    wrapper: type[torch.nn.Module], output: str, model: str, config: str, sizes: Mapping[str, object]
) -> torch.nn.Module:
    """A model of transformers with that output alone."""
    return wrapper(getattr(transformers, model)(getattr(transformers, config)(**sizes)), output)


def export(path: Path, make: Callable[[], torch.nn.Module], *inputs: torch.Tensor) -> None:
    """Write the model as ONNX, with its weights in the same file."""
    if path.exists():
        return
    try:
        with torch.no_grad():
            torch.onnx.export(make().eval(), inputs, path, dynamo=True, external_data=False, verbose=False)
    except Exception as error:  # noqa: BLE001 - the exporter raises anything
        reason, _, _ = str(error).partition("\n")
        print(f"{path.stem}: {type(error).__name__}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
