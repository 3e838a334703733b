"""General plugins are found by entry point and run in every process, once."""

from importlib.metadata import entry_points

GROUP = "vllm_omni.general_plugins"
loaded = False


def load_omni_general_plugins():
    global loaded
    if loaded:
        return
    loaded = True
    for point in entry_points(group=GROUP):
        point.load()()
