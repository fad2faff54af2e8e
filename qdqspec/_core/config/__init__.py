"""Settings of a run: options, environment, ``[tool.qdqspec]``, defaults, in this order.

`settings` has the values, `options` reads them, `declared` has the options of backends and the types of values of both,
`hooks` the declarations of backends.
Requirements on a model are set in specs, not here.
"""

from qdqspec._core.config.declared import BackendOption, BackendOptions, options_of
from qdqspec._core.config.folders import claim_folder, find_folder, note_owner, other_owner
from qdqspec._core.config.options import (
    OPTIONS,
    Setting,
    add_options,
    find_root,
    flags_given,
    list_settings,
    load_settings,
)
from qdqspec._core.config.settings import Option, Settings

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
