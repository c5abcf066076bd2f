"""Deterministic, batch-invariant operators for post-training language models, and an autotuner around their launches.

Importing this package starts no device, reads no environment variable and touches no disk; import from its submodules.
"""

__version__ = "0.1.0"
