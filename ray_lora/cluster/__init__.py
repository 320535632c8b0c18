"""From a plan to the ranks: in this process, or Ray actors that own one tensor-parallel shard each."""
