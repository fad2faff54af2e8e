"""What every package may use: settings, files, records as JSON, the registry, deadlines. It knows no model."""
