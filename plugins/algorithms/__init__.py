"""Advantage estimators and their losses."""
