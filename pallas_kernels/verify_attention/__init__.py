"""Attention of a few rows a request over paged K/V: causal, a bidirectional block, a tree; windows."""
