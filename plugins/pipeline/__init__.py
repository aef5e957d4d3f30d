"""Pipeline-parallel training: schedules, staleness, a simulator and a runtime."""
