"""Ready pipelines; each is a working example."""
