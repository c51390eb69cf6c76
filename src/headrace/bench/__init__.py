"""Measuring an engine: workloads, driving a runtime with them, and the arithmetic of the report. No torch."""
