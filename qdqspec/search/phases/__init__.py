"""The phases of the default strategy, one file each. Each may be removed from `Attribution.phases`."""
