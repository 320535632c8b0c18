"""One rank, one step: a plan becomes tensors, tensors become tokens."""
