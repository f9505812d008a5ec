"""Norm and rotation of a joined q/k/v product, with its K and V written to their pages in the same launch."""
