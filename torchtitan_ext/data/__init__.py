"""Text as streams of tokens that a checkpoint can hold: tokenizers, documents, packing."""
