"""Judges of versions."""
