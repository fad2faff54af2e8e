"""Shows a run record. Text in, text out: never measures, never reads a graph."""
