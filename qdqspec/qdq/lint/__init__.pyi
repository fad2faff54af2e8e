from .rules import (
    CHECKER as CHECKER,  # finding ONX001: ONNX's checker refuses the model
    LOAD as LOAD,  # finding RUN001: the runtime does not load the model
    RUN as RUN,  # finding RUN002: the runtime cannot run it optimized
    VALUES as VALUES,  # finding RUN003: the optimized runtime computes other values
    Find as Find,  # a rule's function: the hits in a view
    Hit as Hit,  # a node, and what is wrong with it
    Rule as Rule,  # one property that a target refuses or handles badly
    also_for as also_for,  # register a known rule for other targets too
    findings_to_json as findings_to_json,  # the findings of each target as data
    formats_newer_than_opset as formats_newer_than_opset,  # a stored type that the model's opset lacks
    lint_model as lint_model,  # the findings of a target
    named_node as named_node,  # the node of a model that a message names
    render_findings as render_findings,  # findings by rule, most severe first
    rules_for as rules_for,  # the rules of a target, or of all backends, by id
    severities as severities,  # the decorators of a target's rules: what is refused, what is slow, notes
    unequal_scales as unequal_scales,  # nodes that move values between unequal scales
    with_refusals as with_refusals,  # findings of rules, and refusals of the runtime
)
from .view import (
    LAYOUT as LAYOUT,  # operators that only move values
    QdqNumbers as QdqNumbers,  # the parameters of one Q or DQ
    View as View,  # queries on one model that several rules share
    interpolates as interpolates,  # whether a Resize computes values between those of its input
    type_name as type_name,  # ``uint8``; ``an unknown type`` if inference did not find it
)
