"""Loads a pipeline, puts the cache on it and generates requests with it."""

import torch

from vllm_omni.diffusion.cache.selector import get_cache_backend
from vllm_omni.diffusion.request import DiffusionRequestBatch


class DiffusionModelRunner:
    """What runs in each worker process."""

    def __init__(self, od_config):
        self.od_config = od_config
        self.pipeline = self.cache_backend = None

    def load_model(self, pipeline):
        self.pipeline = pipeline
        self.cache_backend = get_cache_backend(self.od_config.cache_backend, self.od_config.cache_config)
        if self.cache_backend is not None:
            self.cache_backend.enable(self.pipeline)

    def execute_model(self, *requests):
        with torch.inference_mode():
            steps = requests[0].sampling_params.num_inference_steps
            if self.cache_backend is not None and self.cache_backend.is_enabled() and steps is not None:
                self.cache_backend.refresh(self.pipeline, steps)
            return self.pipeline.forward(DiffusionRequestBatch(requests=list(requests)))
