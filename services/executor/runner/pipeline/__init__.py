"""Pipelines: stages that divide the layers of a model among ranks."""
