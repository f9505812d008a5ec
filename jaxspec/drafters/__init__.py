"""Drafters: one file per method; `base` is the protocol, `registry` finds a method by its checkpoint."""
