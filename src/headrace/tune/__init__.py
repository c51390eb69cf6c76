"""The best settings for a workload and its limits, by measuring what a simulation has not ruled out. No torch."""
