"""One file a report format, found by name."""
