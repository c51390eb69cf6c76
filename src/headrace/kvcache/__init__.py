"""Block bookkeeping of the KV cache: pools per layer group, radix index, tables, leases, eviction. Integers only."""
