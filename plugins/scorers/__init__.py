"""Scorers, and functions to score with."""
