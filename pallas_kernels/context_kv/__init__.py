"""Target features to the K and V of every draft layer, normed, rotated and written to their pages (DFlash §1.2)."""
