"""Bundled plugins, one capability a file; each uses only the public plugin API."""
