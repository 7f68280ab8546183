"""What is asked of TensorFlow: one module per file of `data/`. Imports TensorFlow."""
