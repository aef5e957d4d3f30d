"""The report: a run, or two, as one HTML page that needs no network."""
