"""Meshes, the rules that say how parameters and caches are split over them, and chips that need not be there."""
