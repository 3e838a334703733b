"""ComfyUI node pack: copy or link this folder into custom_nodes; the package holdover must be installed."""

from holdover.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
