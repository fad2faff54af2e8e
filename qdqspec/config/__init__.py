"""Settings of a run: options, environment, ``[tool.qdqspec]``, defaults, in this order.

`settings` has the options with their values, `layers` reads them, `declared` checks the options of backends, `values`
has the types of values of both. What must hold of a model is set in specs, not here.
"""

from qdqspec.config.declared import BackendOption, BackendOptions, options_of
from qdqspec.config.folders import claim_folder, find_folder, note_owner, other_owner
from qdqspec.config.layers import Setting, find_root, list_settings, load_settings
from qdqspec.config.settings import OPTIONS, Option, Settings, add_options, flags_given

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
