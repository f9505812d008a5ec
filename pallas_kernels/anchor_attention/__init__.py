"""Blocks of B rows that attend a prefix of a shared context and their own block (DFlash, DSpark)."""
