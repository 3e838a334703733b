"""holdover inside vLLM-Omni: a plugin that makes its methods selectable with `--cache-backend`.

vLLM-Omni finds `register` through the entry point group `vllm_omni.general_plugins` and calls it in each of its
processes. Nothing else in holdover imports this package, and vLLM-Omni is not imported before `register` is called.
"""

from .plugin import METHODS, register, unregister

__all__ = ["METHODS", "register", "unregister"]
