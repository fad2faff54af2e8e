"""Renders a run record as text, tables and pages. Input is a record; nothing is measured and no model is read."""
