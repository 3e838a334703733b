"""Nodes for ComfyUI: the same policies, predictors, plans and profiles on any model that ComfyUI loads."""

from .nodes import Holdover, HoldoverCalibrate, HoldoverCompare, HoldoverSummary

NODE_CLASS_MAPPINGS = {
    "Holdover": Holdover,
    "HoldoverSummary": HoldoverSummary,
    "HoldoverCalibrate": HoldoverCalibrate,
    "HoldoverCompare": HoldoverCompare,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "Holdover": "Holdover",
    "HoldoverSummary": "Holdover Summary",
    "HoldoverCalibrate": "Holdover Calibrate",
    "HoldoverCompare": "Holdover Compare",
}

__all__ = [
    "NODE_CLASS_MAPPINGS",
    "NODE_DISPLAY_NAME_MAPPINGS",
    "Holdover",
    "HoldoverCalibrate",
    "HoldoverCompare",
    "HoldoverSummary",
]
