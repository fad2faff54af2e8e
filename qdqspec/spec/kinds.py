"""Parts of a spec that come from the registry: check kinds with their parameters, strategy and backend names.

No check, strategy or backend is named here, and only the checks that a spec contains are imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    ValidationInfo,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, ValidationError, core_schema

from qdqspec._core import hooks, registry
from qdqspec.spec.fields import is_id, slug
from qdqspec.types import OPTIMIZERS, CheckSpec


def params_of(kind: str) -> type[BaseModel]:
    """The parameter model of a registered check kind."""
    check = registry.resolve("check", kind)
    params: type[BaseModel] = check.Params  # type: ignore[attr-defined]  # resolve() promises no more than object
    return params


def unknown_name(what: str, name: object, known: tuple[str, ...]) -> PydanticCustomError:
    """The error for a name that is not registered; message and hints are created when it is displayed."""
    return PydanticCustomError(
        "unknown_name", "unknown {what} '{name}'", {"what": what, "name": str(name), "known": known}
    )


def _check(value: object, info: ValidationInfo) -> CheckSpec:
    """One entry of ``checks``, validated by the model of its kind, whose errors keep their location."""
    if isinstance(value, CheckSpec):
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("check", "a check is a mapping with a 'kind'")
    known = registry.names("check")
    kind = value.get("kind")
    if kind is None:
        raise PydanticCustomError("check", "a check without a 'kind'", {"known": known})
    if kind not in known:
        raise refused({("kind",): unknown_name("check kind", kind, known)})
    model = params_of(str(kind))
    asked = value if "kind" in model.model_fields else {k: v for k, v in value.items() if k != "kind"}
    params = model.model_validate(asked, context=info.context)
    own = getattr(params, "id", None)
    if own is not None and not is_id(own):
        hint = "lower-case letters, digits and . _ - only, a letter or digit first"
        error = PydanticCustomError("id", "'{name}' cannot be an id", {"name": own, "hint": hint})
        raise refused({("id",): error})
    severity: Any = getattr(params, "severity", "error")
    return CheckSpec(id=own or "", kind=str(kind), params=params, severity=severity, line=1)


def _check_schema(_: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
    """One alternative for each registered kind."""
    choices = []
    for kind in registry.names("check"):
        reference = handler(params_of(kind).__pydantic_core_schema__)
        found = dict(handler.resolve_ref_schema(reference))
        properties = {"kind": {"title": "Kind"}, **found.get("properties", {})}
        properties["kind"] = {**properties["kind"], "const": kind}
        required = ["kind", *(name for name in found.get("required", []) if name != "kind")]
        choices.append({**found, "properties": properties, "required": required})
    return {"oneOf": choices}


def refused(errors: Mapping[tuple[int | str, ...], PydanticCustomError]) -> ValidationError:
    """Errors with their locations below the value that is validated; pydantic prepends its own location."""
    details = [InitErrorDetails(type=error, loc=loc, input=None) for loc, error in errors.items()]
    return ValidationError.from_exception_data("checks", details)


def named_apart(checks: tuple[CheckSpec, ...]) -> tuple[CheckSpec, ...]:
    """The checks, each with its id: its own, or its kind, numbered from the second of a kind on.

    Rejects an empty list of checks, and two checks with one id.
    """
    if not checks:
        raise PydanticCustomError("checks", "'checks' is empty: a spec without a check would prove nothing")
    kinds: Counter[str] = Counter()
    named: dict[str, CheckSpec] = {}
    twice: dict[tuple[int | str, ...], PydanticCustomError] = {}
    for index, check in enumerate(checks):
        kinds[check.kind] += 1
        nth = kinds[check.kind]
        own = getattr(check.params, "id", None)  # `check.id` may be that of another spec
        name = own or (slug(check.kind) if nth == 1 else f"{slug(check.kind)}-{nth}")
        if name in named:
            error = PydanticCustomError("id", "two checks are called '{name}'", {"name": name})
            twice[(index, "id") if own else (index,)] = error
        named[name] = replace(check, id=name)
    if twice:
        raise refused(twice)
    return tuple(named.values())


def _backend(name: str) -> str:
    """A backend, installed here or not, or one of its targets; any target of a backend that declares none."""
    owner = hooks.owner_of(name)
    if owner and (name == owner or name in (targets := hooks.declaration_of(owner).targets) or not targets):
        return name
    known = {*registry.names("backend"), *hooks.all_names("targets")}
    raise unknown_name("backend", name, tuple(sorted(known)))


def _one_of(
    what: str, known: Callable[[], tuple[str, ...]], is_known: Callable[[str], bool]
) -> GetPydanticSchema:
    """Accepts the ``known`` names; ``is_known`` tests one of them without importing what declares the others."""

    def check(name: str) -> str:
        if is_known(name):
            return name
        raise unknown_name(what, name, known())

    return GetPydanticSchema(
        lambda source, handler: core_schema.no_info_after_validator_function(check, handler(source)),
        lambda schema, handler: {**handler(schema), "enum": list(known())},
    )


def _registered(kind: registry.RegistryKind) -> GetPydanticSchema:
    """The names of a registry kind: of a backend without a variant, even if this machine lacks it."""
    return _one_of(kind, lambda: registry.names(kind), lambda name: name in registry.names(kind))


def _declared(names: hooks.DeclaredNames, what: str, *others: str) -> GetPydanticSchema:
    """The names that backends declare, and ``others``."""
    return _one_of(
        what,
        lambda: (*others, *hooks.all_names(names)),
        lambda name: name in others or hooks.declares(names, name),
    )


StrategyName: TypeAlias = Annotated[str, _registered("strategy")]
Target: TypeAlias = Annotated[str, AfterValidator(_backend)]
BackendName: TypeAlias = Annotated[str, _registered("backend")]
LintTargetName: TypeAlias = Annotated[str, _declared("lint_targets", "lint target")]
OptimizerName: TypeAlias = Annotated[str, _declared("optimizers", "optimizer", *OPTIMIZERS)]
Check: TypeAlias = Annotated[
    CheckSpec,
    GetPydanticSchema(
        lambda _, __: core_schema.with_info_plain_validator_function(_check),
        _check_schema,
    ),
]
Checks: TypeAlias = Annotated[tuple[Check, ...], AfterValidator(named_apart)]
