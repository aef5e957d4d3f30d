"""Property tests repeat themselves by default; `--hypothesis-profile explore` looks further.

How long examples take to draw says how busy the machine is, and is not judged.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

PATIENT = [HealthCheck.too_slow]
settings.register_profile("repeatable", derandomize=True, suppress_health_check=PATIENT)
settings.register_profile("explore", derandomize=False, suppress_health_check=PATIENT)
settings.load_profile("repeatable")
