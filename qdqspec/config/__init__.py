"""Settings of a run: options, environment, ``[tool.qdqspec]``, defaults, in this order.

`settings` has the options and reads their values, `declared` those of backends and the types of values of both.
Requirements on a model are set in specs, not here.
"""

from qdqspec.config.declared import BackendOption, BackendOptions, options_of
from qdqspec.config.folders import claim_folder, find_folder, note_owner, other_owner
from qdqspec.config.settings import (
    OPTIONS,
    Option,
    Setting,
    Settings,
    add_options,
    find_root,
    flags_given,
    list_settings,
    load_settings,
)

__all__ = [
    "OPTIONS",
    "BackendOption",
    "BackendOptions",
    "Option",
    "Setting",
    "Settings",
    "add_options",
    "claim_folder",
    "find_folder",
    "find_root",
    "flags_given",
    "list_settings",
    "load_settings",
    "note_owner",
    "options_of",
    "other_owner",
]
