"""The real scheduler, cache and loop on a modelled device, in virtual time. No torch."""
