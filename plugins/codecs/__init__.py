"""Delta codecs."""
