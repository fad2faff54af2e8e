"""The options of ``tune`` that correspond to keys of a spec, and the case they define for a spec or a model.

An option is the argument of `qdqspec.tune` with dashes; its value is validated like the key of a spec. Some set a key
in another form, such as shapes one bound at a time. An option of ModelOpt's autotune is an error that names the
equivalent one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqspec.cli.words import Joined, data_given, number, shapes, values
from qdqspec.config import hooks
from qdqspec.errors import ConfigError
from qdqspec.types import Case


@dataclass(frozen=True, slots=True)
class Word:
    """An option. ``read`` converts the text to a spec's value; options with ``many`` may be repeated.

    ``group`` is its heading in the help.
    """

    name: str
    group: str
    metavar: str
    help: str
    read: Callable[[str], object] = str
    many: bool = False

    @property
    def flag(self) -> str:
        """``--min-sqnr-db``."""
        return f"--{self.name.replace('_', '-')}"


def _corrections(text: str) -> str | list[str]:
    return text if text in ("auto", "none") else text.split(",")


def _switch(text: str) -> bool | str:
    """``true`` or ``false``; other text unchanged, for the validation of the spec."""
    return {"true": True, "false": False}.get(text, text)


_DATA, _LIMITS, _QUANTIZED, _SEARCH = "data and shapes", "limits", "quantization", "search"
# Options that only --help-all shows.
RARE = frozenset(
    {"scales", "corrections", "dq_dtype", "trials_per_region", "region_models", "validate_groups", "include_file"}
    | {"start_scales", "min_shapes", "opt_shapes", "max_shapes", "pattern_cache", "graph_json"}
)  # fmt: skip
WORDS = (
    Word("quant", _QUANTIZED, "FORMAT", "Number format (default of a model: int8)."),
    Word("calibration", _DATA, "PATH",
        "Data for the ranges of activations: .npz or .npy, a folder or a quoted glob of them, or a quoted"
        " table as in a spec, such as '{images: photos, size: 224}'.", read=data_given),
    Word("evaluation", _DATA, "PATH",
        "Data for accuracy: inputs, and 'labels' if --metric, --min or --max-drop is given.", read=data_given),
    Word("shapes", _DATA, "NAME:1x3x224x224",
        "Shapes of inputs whose dimensions are dynamic; several with commas.", read=shapes),
    Word("values", _DATA, "NAME:16000",
        "Inputs fixed to a number, true or false; the tuned model does not have them. Several with "
        "commas.", read=values),
    Word("scales", _DATA, "FILE", "A file of known ranges: a calibration cache, or JSON."),
    Word("corrections", _QUANTIZED, "auto|none|LIST",
        "Corrections of scales, weights and biases, which cost no time in the model: auto (default), "
        "none, or a list with commas: equalization, margins, ranges, rounding, bits, bias.", read=_corrections),
    Word("dq_dtype", _QUANTIZED, "float32|float16|bfloat16",
        "Output type of DequantizeLinear if the model does not state the type, as after operators of "
        "plugins; without it such tensors are not quantized."),
    Word("strategy", _SEARCH, "NAME", "Search strategy (default: attribution)."),
    Word("preset", _SEARCH, "quick|default|extensive", "Size of the search."),
    Word("trials", _SEARCH, "N", "Largest number of builds.", read=number),
    Word("trials_per_region", _SEARCH, "N",
        "Largest number of builds for each region, with --strategy region.", read=number),
    Word("region_models", _SEARCH, "true|false",
        "Whether strategy region writes the best model of each region to regions/ (default: false).",
        read=_switch),
    Word("validate_groups", _SEARCH, "true|false",
        "Whether strategy subgraph measures each step on the whole model (default: true); false adds all "
        "groups that won alone at once.", read=_switch),
    Word("minutes", _SEARCH, "M", "Time limit of the search: minutes, or 90s, 10m, 1h.", read=number),
    Word("objective", _SEARCH, "latency|pareto",
        "latency: the fastest placement that meets the limits (default); pareto: also the front of "
        "latency and accuracy."),
    Word("min_sqnr_db", _LIMITS, "DB|none",
        "Smallest SQNR of the selected model in dB (default: 20 without a task metric); none: no limit.",
        read=number),
    Word("metric", _LIMITS, "NAME", "Metric of --min and --max-drop: top1, top5 or miou (default: top1)."),
    Word("min", _LIMITS, "VALUE",
        "Smallest value of the task metric of the selected model, such as 0.97 or 97%.", read=number),
    Word("max_drop", _LIMITS, "VALUE",
        "Largest loss of the task metric against the reference, such as 0.01 or 1%.", read=number),
    Word("min_gain", _LIMITS, "SHARE",
        "Share of the time that the selected model must save, proved by its interval, such as 0.02 or 2% "
        "(default: 2%).", read=number),
    Word("allow", _QUANTIZED, "PATTERN",
        "Quantize only operators that match, such as 'Conv > Relu'. Repeatable.", many=True),
    Word("deny", _QUANTIZED, "PATTERN", "Do not quantize operators that match. Repeatable.", many=True),
    Word("include", _QUANTIZED, "GLOB",
        "Quantize only nodes with matching names, such as '/body/*'. Repeatable.", many=True),
    Word("include_file", _QUANTIZED, "FILE",
        "A file of globs over node names, one a line; for operator patterns use --allow."),
    Word("exclude", _QUANTIZED, "GLOB", "Do not quantize nodes with matching names. Repeatable.", many=True),
    Word("start_from", _SEARCH, "FILE",
        "A start of the search: a pattern cache, journal, scheme or Q/DQ model. Repeatable.", many=True),
    Word("start_scales", _SEARCH, "keep|recalibrate",
        "Whether the scales of Q/DQ models in --start-from are kept (default), or computed from "
        "calibration data."),
)  # fmt: skip


def add_words(parser: argparse.ArgumentParser) -> None:
    """Declare the options, each in the group of its heading."""
    groups = {title: parser.add_argument_group(title) for title in (_DATA, _QUANTIZED, _LIMITS, _SEARCH)}
    for word in WORDS:
        groups[word.group].add_argument(
            word.flag,
            dest=word.name,
            metavar=word.metavar,
            type=word.read,
            help=word.help.replace("%", "%%"),
            action="append" if word.many else Joined if word.read in (shapes, values) else "store",
        )
    add_combined(groups)


def case_as_asked(case: Case, arguments: argparse.Namespace) -> Case:
    """The case with the options of the command line in place of the keys of its spec.

    Raises `SpecError`, in terms of the command line, if that is not valid.
    """
    given: dict[str, Any] = {word.name: getattr(arguments, word.name) for word in WORDS}
    asked = {name: value for name, value in given.items() if value is not None}
    combined = combined_words(arguments)
    asked |= combined
    if not asked:
        return case
    from qdqspec.spec.inline import with_words

    flags = {word.name: word.flag for word in WORDS}
    flags |= {name: flag for name, flag in FLAGS.items() if name in combined}
    return with_words(case, asked, written=lambda name: flags.get(name, name))


_BOUNDS = ("min", "opt", "max")
# The option that set a word of `qdqspec.tune`, for messages.
FLAGS: Mapping[str, str] = {
    "graph": "--graph-json",
    "regions": "--graph-json",
    "shapes": "--min-shapes, --opt-shapes, --max-shapes",
}


def add_combined(groups: Mapping[str, argparse._ArgumentGroup]) -> None:
    """Declare the options."""
    for bound in _BOUNDS:
        groups[_DATA].add_argument(
            f"--{bound}-shapes",
            type=shapes,
            action=Joined,
            metavar="NAME:1x3x224x224",
            help={
                "min": "Smallest shapes of inputs whose dimensions are dynamic (default: --opt-shapes).",
                "opt": "The shapes at which models are timed, in place of --shapes.",
                "max": "Largest shapes (default: --opt-shapes).",
            }[bound],
        )
    groups[_SEARCH].add_argument(
        "--pattern-cache",
        action="append",
        metavar="FILE",
        help="The patterns.yaml of an earlier run; the same as --start-from. Repeatable.",
    )
    groups[_SEARCH].add_argument(
        "--graph-json",
        metavar="FILE",
        help="Layer information exported by a tool of the runtime; regions follow the kernels of the engine.",
    )


def combined_words(arguments: argparse.Namespace) -> dict[str, Any]:
    """The words of `qdqspec.tune` that these options give. Raises `ConfigError` if they contradict others."""
    words: dict[str, Any] = {}
    given = {bound: getattr(arguments, f"{bound}_shapes") for bound in _BOUNDS}
    if any(given.values()):
        words["shapes"] = _spans(given, arguments)
    if arguments.pattern_cache:
        words["start_from"] = [*(arguments.start_from or ()), *arguments.pattern_cache]
    if arguments.graph_json:
        if Path(arguments.graph_json).suffix == ".onnx":
            tools = ", ".join(hooks.declared("exported_by").values())
            raise ConfigError("--graph-json is a model", cure=f"name a file that {tools} wrote")
        words |= {"regions": "fusion", "graph": arguments.graph_json}
    return words


def _spans(given: Mapping[str, dict[str, list[int]] | None], arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.shapes is not None:
        raise ConfigError(
            "--shapes and --min-shapes, --opt-shapes or --max-shapes are both given",
            cure="--shapes is for one shape, the others for a range",
        )
    usual = given["opt"]
    if usual is None:
        raise ConfigError("--opt-shapes is missing: the shapes at which models are timed", cure="add it")
    for bound in ("min", "max"):
        for name in given[bound] or ():
            if name not in usual:
                raise ConfigError(
                    f"--{bound}-shapes names '{name}', and --opt-shapes does not", cure="add it there"
                )
    return {
        name: {bound: (given[bound] or {}).get(name, dims) for bound in _BOUNDS}
        for name, dims in usual.items()
    }


_PRESETS = ("quick", "default", "extensive")
# ModelOpt's option: its replacement. Backends declare those that concern their runtime.
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
    """All options of ModelOpt's autotune, each with its replacement."""
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
