"""A case made ready for its search: model, data, space of placements, folder of results, and the shared resources."""
