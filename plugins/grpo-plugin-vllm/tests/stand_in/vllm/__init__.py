"""A stand-in for vLLM, for a machine without GPUs: it knows the calls that the plugin makes, and no model.

Each request is completed by one step, with as many tokens 7 as it asks for.  ``STAND_IN`` names a folder:
``calls`` in it lists the calls and what they were given, and a call that is named in ``fault`` fails once.
"""

from types import SimpleNamespace

__version__ = "stand-in"


class EngineArgs(SimpleNamespace):
    pass


class SamplingParams(SimpleNamespace):
    pass
