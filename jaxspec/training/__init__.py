"""Training a drafter: data, features, anchors, the compiled step, the loop and its checkpoints."""
