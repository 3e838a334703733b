"""holdover inside vLLM-Omni: a plugin that makes its methods selectable with `--cache-backend`.

vLLM-Omni finds `register` through the entry point group `vllm_omni.general_plugins` and calls it in each of its
processes. vLLM-Omni itself is imported only when `register` is called.
"""

from .plugin import config_for, method_names, register, unregister

__all__ = ["config_for", "method_names", "register", "unregister"]
