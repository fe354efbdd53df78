"""The profile of a long search: `python -m pytest tests/fuzz --hypothesis-profile=thorough`."""

from fuzz.profiles import PHASES
from hypothesis import settings

settings.register_profile("thorough", max_examples=2000, deadline=None, phases=PHASES)
