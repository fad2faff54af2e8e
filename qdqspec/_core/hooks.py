"""The declaration of a backend in its package: names that specs use, and functions for other packages.

A backend's package assigns a `Declaration` to ``declaration``; importing the package must load neither the runtime nor
numpy, because specs are validated against it. An installed backend declares in the module that its entry point names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from qdqspec._core import registry
from qdqspec._core.registry import DEFAULT_BACKEND
from qdqspec.errors import ConfigError

DeclaredNames: TypeAlias = Literal["targets", "lint_targets", "optimizers"]  # fields of `Declaration`
Hook: TypeAlias = str  # "module:attribute", imported when it is used


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Names and hooks of one backend. Each name is the backend's name and a word, joined by a hyphen.

    The comment of a hook begins with its arguments.
    """

    # The backend and variants that budgets may name; of a backend that declares none all are valid.
    targets: tuple[str, ...] = ()
    # The targets that lint has rules for: one for each version, or of the installed `lint_package`, the distribution
    # whose version the rules apply to. `lint_rules` is the module that registers them (`qdqspec.qdq.lint.rules.rule`).
    lint_targets: tuple[str, ...] = ()
    lint_package: str = ""
    lint_rules: str = ""
    # (model, folder): those of the check `survival`; each writes the model that it makes of a file; its path.
    optimizers: Mapping[str, Hook] = field(default_factory=dict)
    # (graph, model): the nodes of a model that those of its optimized graph come from.
    kernel_origins: Hook = ""
    # (files, model): an engine from files that the runtime's tools export with the command `exported_by`, as a
    # `qdqspec.backends.base.Exported`.
    exported: Hook = ""
    exported_by: str = ""
    # (data): the largest magnitude of each tensor in a calibration cache of the runtime, with its place in the file;
    # `None` if the data are no such cache.
    ranges: Hook = ""
    # Options of ModelOpt's autotune that concern the runtime, each with its replacement.
    equivalents: Mapping[str, str] = field(default_factory=dict)
    # (model, file, options): the shell command that builds and times a file of a model with a tool of the runtime.
    replay: Hook = ""
    # The words of `polygraphy run` that select its runner for a model of this backend, such as ``--onnxrt``.
    polygraphy: tuple[str, ...] = ()
    # (model, path, *, keep_io): the model in float16, an `onnx.ModelProto`.
    float16: Hook = ""
    # (options): the end of a Python program that builds the file `MODEL` with the runtime alone, as the backend does,
    # and runs it once on the arrays `FEEDS`.
    program: Hook = ""
    # Its options that have an option ``--BACKEND-WORD`` of the command line and of pytest too, each with a help: of
    # backends of this package only, because those that are installed are not imported to parse a command line.
    command_line: Mapping[str, str] = field(default_factory=dict)
    # The options of a build that computes each operator as ONNX defines it and fuses nothing, and of one with all
    # optimizations; the default backend has both.
    as_defined: Mapping[str, str] = field(default_factory=dict)
    optimized: Mapping[str, str] = field(default_factory=dict)


def declaration_of(backend: str) -> Declaration:
    """The declaration of a backend, empty if there is none. Raises `ConfigError` for an unknown name."""
    try:
        found = getattr(registry.module_of("backend", backend), "declaration", None)
    except ImportError:  # reported when the backend is used
        return Declaration()
    return found if isinstance(found, Declaration) else Declaration()


def owner_of(name: str) -> str:
    """The backend that a target, lint target or optimizer belongs to by its name; empty if there is none."""
    owners = [one for one in registry.names("backend") if name == one or name.startswith(f"{one}-")]
    return max(owners, key=len, default="")


def declares(names: DeclaredNames, name: str) -> bool:
    """Whether the backend that a name belongs to declares it. Imports the package of that backend alone."""
    owner = owner_of(name)
    return bool(owner) and name in getattr(declaration_of(owner), names)


def all_names(names: DeclaredNames) -> tuple[str, ...]:
    """The names that all backends declare. Imports the packages of all."""
    return tuple(name for found in declared(names).values() for name in found)


def default() -> Declaration:
    """The declaration of the default backend."""
    return declaration_of(DEFAULT_BACKEND)


def declared(field_name: str, *, built_in: bool = False) -> dict[str, Any]:
    """A field of `Declaration` by backend, where it is not empty. Imports the packages of all, or of those built in."""
    names = registry.built_in("backend") if built_in else registry.names("backend")
    found = {name: getattr(declaration_of(name), field_name) for name in names}
    return {name: value for name, value in found.items() if value}


def readers(field_name: Literal["exported", "ranges"]) -> tuple[Any, ...]:
    """The functions that read such files, of all backends."""
    return tuple(load(hook) for hook in dict.fromkeys(declared(field_name).values()))


def load(hook: Hook) -> Any:
    """Import the object of a hook. Raises `ConfigError` if there is none at that place."""
    module, _, attribute = hook.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the hook '{hook}' of a backend cannot be imported: {error}",
            cure="correct it in the backend's package: module:attribute",
        ) from error


def attributes_of(module: str, *names: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562) that takes these attributes from a module when they are first read."""
    package = module.rpartition(".")[0]

    def attribute(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(module), name)
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return attribute
