"""What users write: options, recipes, policies."""
