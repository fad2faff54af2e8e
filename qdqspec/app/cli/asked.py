"""The options of ``tune`` that set keys of a spec, and the case they define for a spec or a model.

An option is the argument of `qdqspec.tune` with dashes; its value is validated like the key of a spec. An option of
ModelOpt's autotune is an error that names the equivalent one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from qdqspec._core import hooks
from qdqspec.app.cli.arguments import (
    ArgumentGroup,
    Joined,
    argument,
    data_given,
    number,
    shapes_option,
    values,
)
from qdqspec.errors import ConfigError
from qdqspec.types import Case


def _corrections(text: str) -> str | list[str]:
    return text if text in ("auto", "none") else text.split(",")


def _truth(text: str) -> bool | str:
    """``true`` or ``false``; other text unchanged, for the validation of the spec."""
    return {"true": True, "false": False}.get(text, text)


GROUPS = (
    ArgumentGroup("data and shapes", (
        argument("--calibration", "PATH",
            "Data for the ranges of activations: .npz or .npy, a folder or a quoted glob of them, or a quoted"
            " table as in a spec, such as '{images: photos, size: 224}'.", type=data_given),
        argument("--evaluation --data", "PATH",
            "Data for accuracy: inputs, and 'labels' if --metric, --min or --max-drop is given.", type=data_given),
        shapes_option("--shapes", "Shapes of inputs whose dimensions are dynamic; several with commas."),
        argument("--values", "NAME:16000",
            "Inputs fixed to a number, true or false; the tuned model does not have them. Several with "
            "commas.", type=values, action=Joined),
        argument("--scales", "FILE", "A file of known ranges: a calibration cache, or JSON."),
        shapes_option("--min-shapes",
            "Smallest shapes of inputs whose dimensions are dynamic (default: --opt-shapes)."),
        shapes_option("--opt-shapes", "The shapes at which models are timed, in place of --shapes."),
        shapes_option("--max-shapes", "Largest shapes (default: --opt-shapes)."),
    )),
    ArgumentGroup("quantization", (
        argument("--quant", "FORMAT", "Number format (default of a model: int8)."),
        argument("--corrections", "auto|none|LIST",
            "Corrections of scales, weights and biases, which cost no time in the model: auto (default), "
            "none, or a list with commas: bits, equalization, bias, ranges.",
            type=_corrections),
        argument("--dq-dtype", "float32|float16|bfloat16",
            "Output type of DequantizeLinear if the model does not state the type, as after operators of "
            "plugins; without it such tensors are not quantized."),
        argument("--allow", "PATTERN",
            "Quantize only operators that match, such as 'Conv > Relu'. Repeatable.", action="append"),
        argument("--deny", "PATTERN", "Do not quantize operators that match. Repeatable.", action="append"),
        argument("--include", "GLOB",
            "Quantize only nodes with matching names, such as '/body/*'. Repeatable.", action="append"),
        argument("--include-file", "FILE",
            "A file of globs over node names, one a line; for operator patterns use --allow."),
        argument("--exclude", "GLOB", "Do not quantize nodes with matching names. Repeatable.", action="append"),
    )),
    ArgumentGroup("limits", (
        argument("--min-sqnr-db", "DB|none",
            "Smallest SQNR of the selected model in dB (default: 20 without a task metric); none: no limit.",
            type=number),
        argument("--metric", "NAME", "Metric of --min and --max-drop: top1, top5 or miou (default: top1)."),
        argument("--min", "VALUE",
            "Smallest value of the task metric of the selected model, such as 0.97 or 97%.", type=number),
        argument("--max-drop", "VALUE",
            "Largest loss of the task metric against the reference, such as 0.01 or 1%.", type=number),
        argument("--min-gain", "SHARE",
            "Share of the time that the selected model must save, proved by its interval, such as 0.02 or 2% "
            "(default: 2%).", type=number),
    )),
    ArgumentGroup("search", (
        argument("--strategy", "NAME", "Search strategy (default: attribution)."),
        argument("--preset", "quick|default|extensive", "Size of the search."),
        argument("--trials", "N", "Largest number of builds.", type=number),
        argument("--trials-per-region", "N",
            "Largest number of builds for each region, with --strategy region.", type=number),
        argument("--region-models", "true|false",
            "Whether strategy region writes the best model of each region to regions/ (default: false).",
            type=_truth),
        argument("--validate-groups", "true|false",
            "Whether strategy subgraph measures each step on the whole model (default: true); false adds all "
            "groups that won alone at once.", type=_truth),
        argument("--minutes", "M",
            "Time limit of the search: minutes, or 90s, 10m, 1h. Calibration before it, and the timing of its "
            "finalists and the comparison of outputs after it, come on top.", type=number),
        argument("--objective", "latency|coverage|pareto",
            "latency: the fastest placement that meets the limits (default); pareto: also the front of "
            "latency and accuracy; coverage: the placement with the most multiplications in narrow formats, "
            "built and not timed."),
        argument("--start-from", "FILE",
            "A start of the search: a pattern cache, journal, scheme or Q/DQ model. Repeatable.", action="append"),
        argument("--start-scales", "keep|recalibrate",
            "Whether the scales of Q/DQ models in --start-from are kept (default), or computed from "
            "calibration data."),
        argument("--pattern-cache", "FILE",
            "The patterns.yaml of an earlier run; the same as --start-from. Repeatable.",
            action="append"),
        argument("--graph-json", "FILE",
            "Layer information exported by a tool of the runtime; regions follow the kernels of the engine."),
    )),
)  # fmt: skip


def case_as_asked(case: Case, arguments: argparse.Namespace) -> Case:
    """The case with the options of the command line in place of the keys of its spec.

    Raises `SpecError`, in terms of the command line, if a value is not valid, and `ConfigError` if options contradict.
    """
    own = [option for group in GROUPS for option in group.arguments]
    flags = {option.key: option.names[0] for option in own}
    asked = {key: value for key in flags if (value := getattr(arguments, key)) is not None}
    if not asked:
        return case
    from qdqspec.spec.inline import with_words

    bounds = {bound: asked.pop(f"{bound}_shapes", {}) for bound in ("min", "opt", "max")}
    if any(bounds.values()):
        if "shapes" in asked:
            raise ConfigError(
                "--shapes and --min-shapes, --opt-shapes or --max-shapes are both given",
                cure="--shapes is for one shape, the others for a range",
            )
        usual = bounds["opt"]
        if not usual:
            raise ConfigError("--opt-shapes is missing: the shapes at which models are timed", cure="add it")
        for bound, shapes in bounds.items():
            if missing := [name for name in shapes if name not in usual]:
                raise ConfigError(
                    f"--{bound}-shapes names '{missing[0]}', and --opt-shapes does not", cure="add it there"
                )
        asked["shapes"] = {
            name: {bound: shapes.get(name, dims) for bound, shapes in bounds.items()}
            for name, dims in usual.items()
        }
        flags["shapes"] = ", ".join(f"--{bound}-shapes" for bound in bounds)
    if patterns := asked.pop("pattern_cache", None):
        asked["start_from"] = [*asked.get("start_from", ()), *patterns]
    if graph := asked.pop("graph_json", None):
        if Path(graph).suffix == ".onnx":
            tools = ", ".join(hooks.declared("exported_by").values())
            raise ConfigError("--graph-json is a model", cure=f"name a file that {tools} wrote")
        asked |= {"regions": "fusion", "graph": graph}
        flags |= dict.fromkeys(("regions", "graph"), "--graph-json")
    return with_words(case, asked, written=lambda name: flags.get(name, name))


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
