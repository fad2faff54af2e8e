"""Options of ModelOpt's autotune, given to ``tune``: an error that names the equivalent option."""

from __future__ import annotations

from collections.abc import Sequence

from qdqspec.config import hooks
from qdqspec.errors import ConfigError

_PRESETS = ("quick", "default", "extensive")
# ModelOpt's option: what to give instead. Backends declare those that concern their runtime.
_WORDS = {
    "--onnx_path": "give the model as the first argument: qdqspec tune model.onnx",
    "--output_dir": "use --output DIR",
    "--schemes_per_region": "use --trials N for the whole search, or --strategy region --trials-per-region N",
    "--num_schemes": "use --trials N for the whole search, or --strategy region --trials-per-region N",
    "--pattern_cache": "use --pattern-cache FILE with the patterns.yaml of an earlier run",
    "--qdq_baseline": "use --start-from MODEL, which takes the placement of a quantized model",
    "--state_file": "leave it out: a search resumes from trials.jsonl in its output folder",
    "--node_filter_list": "use --include GLOB for each pattern, or --include-file FILE",
    "--quant_type": "use --quant int8 (or fp8)",
    "--default_dq_dtype": "use --dq-dtype float16 (or float32, bfloat16), for tensors without a type in the model",
    "--timing_runs": "leave it out: a comparison takes more runs until it is decided",
    "--plugin_libraries": "use --plugin LIB.so, once for each library",
    "--plugins": "use --plugin LIB.so, once for each library",
    "--graph_json": "use --graph-json FILE",
    "--autotune": "run qdqspec tune MODEL --preset quick (or default, extensive)",
}


def equivalents() -> dict[str, str]:
    """All options of ModelOpt's autotune, each with what to give instead."""
    own = hooks.declared("equivalents").values()
    return _WORDS | {option: instead for words in own for option, instead in words.items()}


def refuse_mode(words: Sequence[str]) -> None:
    """Raise `ConfigError` for ModelOpt's ``--mode quick``: the option exists here with another meaning."""
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        given = value if equals else next(iter(words[position + 1 :]), "")
        if name == "--mode" and given in _PRESETS:
            raise ConfigError(
                f"--mode {given} is an option of ModelOpt's autotune; --mode here is run, measure, verify or plan",
                cure=f"use --preset {given}",
            )


def refuse_words(unknown: Sequence[str]) -> None:
    """Raise `ConfigError` for the first unknown option that is ModelOpt's, spelled with underscores or dashes.

    An option that exists here with dashes is unknown with underscores only.
    """
    words = equivalents()
    for word in unknown:
        name = word.partition("=")[0]
        known = words.get(f"--{name[2:].replace('-', '_')}") if name.startswith("--") else None
        if known is not None:
            raise ConfigError(f"{name} is an option of ModelOpt's autotune", cure=known)
