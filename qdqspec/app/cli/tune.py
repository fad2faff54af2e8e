"""Command ``tune``: search without a test run, through the same session as the pytest plugin."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec._core import hooks
from qdqspec._core.config import BUILD_OPTIONS, Settings, find_folder, note_owner, other_owner
from qdqspec._core.files import RESULT, explained
from qdqspec._core.progress import Display, Heartbeat, ProgressBar, can_draw, shown_on
from qdqspec.app.cases import find_cases
from qdqspec.app.cli.command import (
    COLOR,
    FINE,
    IMPOSSIBLE,
    WANTING,
    Joined,
    answer,
    argument,
    complain,
    data_given,
    group,
    number,
    output,
    refuse_input_as_output,
    settings_from,
    shapes_option,
    switch,
    values,
    verb,
    writable_folder,
)
from qdqspec.app.cli.verify import reduce_failures
from qdqspec.app.cluster import open_session
from qdqspec.errors import ConfigError, OutputError, QdqspecError
from qdqspec.types import Case, RunRecord

if TYPE_CHECKING:
    from qdqspec.app.session import Session

_WRITTEN = ("reference.onnx", "tuned.onnx", "tuned_raw.onnx")  # the models that a run writes
_OWN = frozenset(
    {"run", "json", "color", "what", "output", "reduce_failures"}
)  # arguments beside those of a case


# ---- options that set keys of a spec ---------------------------------------------------------------
# An option is the argument of `qdqspec.tune` with dashes; its value is validated like the key of a spec.


def _corrections(text: str) -> str | list[str]:
    return text if text in ("auto", "none") else text.split(",")


def _truth(text: str) -> bool | str:
    """``true`` or ``false``; other text unchanged, for the validation of the spec."""
    return {"true": True, "false": False}.get(text, text)


GROUPS = (
    group("data and shapes",
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
    ),
    group("quantization",
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
    ),
    group("limits",
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
    ),
    group("search",
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
    ),
)  # fmt: skip


def case_as_asked(case: Case, arguments: argparse.Namespace) -> Case:
    """The case with the options of the command line in place of the keys of its spec.

    Raises `SpecError`, in terms of the command line, if a value is not valid, and `ConfigError` if options contradict.
    """
    given = {word: value for word, value in vars(arguments).items() if not word.startswith("qdq_")}
    asked = {word: value for word, value in given.items() if value is not None and word not in _OWN}
    if not asked:
        return case
    from qdqspec.spec import with_words

    flags: dict[str, str] = {}
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
    return with_words(case, asked, written=lambda word: flags.get(word, f"--{word.replace('_', '-')}"))


# ---- the verb ------------------------------------------------------------------------------------


@verb(
    "tune",
    "qdqspec tune model.onnx --calibration data.npz --minutes 5 -o tuned/",
    argument("what", "SPEC|MODEL", "A spec, one case of it (file::case), or a model."),
    output(
        "DIR|FILE.onnx",
        "Folder of models and results. For a model it may be a file: the tuned model is copied to it.",
        required=False,
    ),
    switch(
        "--reduce-failures",
        "Reduce the first failed candidate of each case to a few nodes, as verb `reduce` does (DIR/faults).",
    ),
    *GROUPS,
    options=(
        *("backend", "device", "mode", "threads", "jobs", "seed", "time-limit"),
        *("require", "scheme", "baseline"),
        *("cache-dir", "no-cache", "retune", "build-limit", "report", "allow-path", *BUILD_OPTIONS),
        *("cluster", "cluster-device", "cluster-tls"),
    ),
)
def tune(arguments: argparse.Namespace) -> int:
    """Search for the fastest Q/DQ placement of a model or spec. Of a spec: of each case. With several backends
    (--backend A,B): on each of them, and then time the models of all together.

    Returns 1 if a check of a spec fails, 2 if one could not be evaluated.
    """
    is_model = Path(arguments.what).suffix == ".onnx"
    backends = backends_asked(arguments)
    single = is_model and not backends
    settings = settings_from(arguments)
    model_file = _model_file(arguments, single=single)
    if arguments.output is not None and model_file is None:
        settings = replace(settings, output=arguments.output.absolute(), layout="" if single else "case")
    if is_model:
        found: tuple[Case, ...] = (Case(id="default", model=Path(arguments.what).absolute()),)
    elif arguments.what.endswith(".py"):
        raise ConfigError(
            "specs in Python are collected by pytest only",
            where=arguments.what,
            cure=f"run: pytest {arguments.what}",
        )
    else:
        found = find_cases(arguments.what, settings, Path.cwd())
    cases = on_backends([case_as_asked(case, arguments) for case in found], backends)
    _prepare_output(cases, settings)
    if settings.report:
        from qdqspec.app.report.write import refuse_unknown_formats

        refuse_unknown_formats(settings.report)
    with closing(open_session(settings, cases)) as session:
        if settings.mode == "plan":
            return _print_plans(cases, session, arguments)
        errors = _judge_cases(cases, session)
        record = session.record()
        if arguments.reduce_failures:
            reduce_failures(session, cases)
    if model_file is not None and not errors:
        from qdqspec.graph import load_model, save_model

        (case,) = record.cases
        assert case.evidence.output is not None
        tuned = case.evidence.output / "tuned.onnx"
        model_file.parent.mkdir(parents=True, exist_ok=True)
        save_model(load_model(tuned).proto, model_file, inputs=[tuned], base=tuned.parent)
    _write_reports(record, settings, arguments, errors, model_file)
    if errors:
        return IMPOSSIBLE
    wanting = {"fail", "inconclusive"} if "conclusive" in settings.require else {"fail"}
    results = [result for each in record.cases for result in each.results]
    return WANTING if any(r.severity == "error" and r.verdict.outcome in wanting for r in results) else FINE


def _model_file(arguments: argparse.Namespace, *, single: bool) -> Path | None:
    """The file that ``-o FILE.onnx`` names for the tuned model of a bare model, else ``None``."""
    output: Path | None = arguments.output
    if output is None or output.suffix != ".onnx" or output.is_dir():
        return None
    if not single:
        raise ConfigError(
            "a file holds one tuned model, and this makes several", where=output, cure="name a folder with -o"
        )
    refuse_input_as_output(output, [Path(arguments.what)])
    return output.absolute()


def _prepare_output(cases: list[Case], settings: Settings) -> None:
    """Create the folders of the cases, before hours of work, and claim a folder that is given with ``-o``.

    Raises `OutputError` if the folder holds the results of another model, or its models would replace a given one.
    """
    for case in cases:
        folder = find_folder(settings, case)
        for name in _WRITTEN:
            refuse_input_as_output(folder / name, [case.model])
        if settings.mode == "plan":
            continue
        writable_folder(folder)
        if settings.layout == "spec/case":
            continue
        other, results = other_owner(folder, case), (RESULT, "trials.jsonl", "tuned.onnx")
        if other is not None and any((folder / name).exists() for name in results):
            raise OutputError(
                f"this folder holds the results of another model or spec ({other})",
                where=folder,
                cure="choose another folder with -o, or remove this one",
            )
        with explained("the output folder", folder, "choose another with -o"):
            note_owner(folder, case)


def _print_plans(cases: list[Case], session: Session, arguments: argparse.Namespace) -> int:
    plans = {case.name: session.planned(case) for case in cases}
    listed = [{"case": name, "plan": plan.text, **asdict(plan)} for name, plan in plans.items()]
    return answer(
        arguments, {"plans": listed}, "\n".join(f"{name}: {plan.text}" for name, plan in plans.items())
    )


def _judge_cases(cases: list[Case], session: Session) -> list[str]:
    """Evaluate the checks of each case, or search and measure if it has none, and time the runtimes of one model
    together. Print and return the errors, each once.

    A case that cannot run on this machine is an error too, and the others are evaluated.
    """
    from qdqspec.app.session import judge_case

    errors: list[str] = []
    for case in cases:
        found = session.availability(case)
        if not found.usable:
            lacking = found.error(case.backend or session.settings.backend)
            session.skip(case, "; ".join(filter(None, (lacking.what, lacking.cure))))
            errors.append(str(lacking))
            continue
        with _show_progress(session):
            try:
                errors += map(str, judge_case(session, case).values())
            except QdqspecError as error:
                if len(cases) == 1:
                    raise
                session.skip(case, str(error))
                errors.append(f"{case.name}: {error}")
    with _show_progress(session):
        try:
            session.compare_runtimes()
        except QdqspecError as error:
            errors.append(str(error))
    errors = [*dict.fromkeys(errors)]
    for text in errors:
        complain(f"qdqspec: {text}")
    return errors


def _show_progress(session: Session) -> AbstractContextManager[None]:
    display: Display = (
        ProgressBar(file=sys.stderr, colored=COLOR.get() != "never")
        if can_draw(is_terminal=sys.stderr.isatty())
        else Heartbeat(complain)
    )
    return shown_on(display, session)


def _write_reports(
    record: RunRecord,
    settings: Settings,
    arguments: argparse.Namespace,
    errors: Sequence[str],
    model_file: Path | None,
) -> None:
    from qdqspec.app.report.compare import runtimes_text
    from qdqspec.app.report.record import record_to_json
    from qdqspec.app.report.tables import summary_table, warning_lines
    from qdqspec.app.report.write import annotation_lines, is_github, write_reports, write_results

    write_results(record)
    write_reports(record, settings.report)
    folders = [(case.evidence.case.name, case.evidence.output) for case in record.cases]
    data: dict[str, Any] = {}
    if arguments.json:
        outputs = {name: str(folder) for name, folder in folders if folder is not None}
        reports = [str(path) for path in settings.report]
        data = {**record_to_json(record), "outputs": outputs, "reports": reports, "errors": list(errors)}
        data["model_file"] = None if model_file is None or errors else str(model_file)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not arguments.json else None
    lines = [summary_table(record, width=width)]
    lines += [  # notes of the table name the inconclusive checks
        f"{'warning' if result.severity == 'warn' else 'fail'}: "
        f"{case.evidence.case.name}::{result.id} - {result.verdict.headline}"
        for case in record.cases
        for result in case.results
        if result.verdict.outcome == "fail"
    ]
    lines += warning_lines(record)
    if record.runtimes:
        lines.append(f"\n{runtimes_text(record.runtimes)}\n")
    lines += [f"Models and measurements: {folder}" for _, folder in folders if folder is not None]
    if model_file is not None and not errors:
        is_unchanged = record.cases[0].evidence.status == "unchanged"
        lines.append(
            f"{'The model is unchanged; a copy is' if is_unchanged else 'Tuned model'}: {model_file}"
        )
    for path in settings.report:
        lines += annotation_lines(record, settings.root) if is_github(path) else [f"Report: {path}"]
    answer(arguments, data, "\n".join(lines))


def backends_asked(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The backends of ``--backend`` if it names several, and ``arguments`` get the first; none otherwise.

    Raises `ConfigError` for an unknown name.
    """
    if arguments.qdq_backend is None:
        return ()
    given = tuple(dict.fromkeys(name.strip() for name in arguments.qdq_backend.split(",")))
    for name in given[::-1]:
        arguments.qdq_backend = name
        settings_from(arguments)
    return given if len(given) > 1 else ()


def on_backends(cases: Sequence[Case], backends: Sequence[str]) -> list[Case]:
    """Each case on each backend; the cases themselves without backends.

    Raises `ConfigError` for a case whose spec chooses its backend.
    """
    if not backends:
        return list(cases)
    if own := [case for case in cases if case.backend is not None]:
        what = "this spec chooses its backend already"
        raise ConfigError(what, where=own[0].name, cure="leave --backend out")
    return [
        replace(
            case,
            id=backend if case.id == "default" else f"{case.id}-{backend}",
            backend=backend,
            matrix={**case.matrix, "backend": backend},
        )
        for case in cases
        for backend in backends
    ]


# ---- options of ModelOpt's autotune, each an error that names the equivalent one -------------------

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
    if given := re.search(r"--mode[= ](quick|default|extensive)\b", " ".join(words)):
        what = f"--mode {given[1]} is an option of ModelOpt's autotune; --mode here is run, measure, verify or plan"
        raise ConfigError(what, cure=f"use --preset {given[1]}")


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
