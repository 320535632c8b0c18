"""The policy of a replica in pure Python: requests in, `StepPlan` out, chunks back. No torch, no Ray."""
