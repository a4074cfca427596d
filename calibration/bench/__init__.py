"""The benchmark harness: many ways of decoding on the same prompts, checked and compared."""
