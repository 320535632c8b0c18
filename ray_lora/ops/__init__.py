"""The contract of the math: for every operator its semantics, shapes and a plain reference, which is the definition."""
