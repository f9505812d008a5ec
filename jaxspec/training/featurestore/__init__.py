"""Stored features: the record, its files, the manifest, capture, and the spool between producers and a trainer."""
