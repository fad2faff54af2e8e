"""Search strategies: each proposes the placements to build next. `base` defines the interface; none measures."""
